"""The eight commonsense tests of LLM-Adapters over local rows {"instruction", "answer", ...}: see commonsense.yaml.

Hu et al. (arXiv:2304.01933) wrote every test as one instruction; DoRA and the sine papers follow them. A row is
scored in two ways, which are not comparable with each other:

choices    the instruction is taken apart into question and choices, and these are asked as lm-eval's task of that
           name asks them (zero-shot, log-likelihood of each choice; `acc`, and `acc_norm` over the choice's length
           where lm-eval has it). The figures are lm-eval's, with two exceptions that lie in the files: BoolQ's rows
           have no passage, and HellaSwag's second sentence keeps its small first letter.
generate   the instruction is put into the prompt of the release, and the answer is looked for in what the model
           writes (see `answers`). It is what the papers print, for models tuned on commonsense-170k.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError

from .task_file import LocalGroup, LocalTask, LocalTasks, Row, find_file, read_rows, read_task_file

ALL = "commonsense_local"
TESTS: dict[str, dict[str, Any]] = read_task_file("commonsense.yaml")
NAMES = (ALL, *TESTS)


def answers_of(name: str) -> Sequence[str]:
    """Generated answers to a test, by pattern; the first that occurs counts."""
    about = TESTS[name]["metadata"]
    return _numbered(about["word"], about["most"]) if "word" in about else ("true", "false")


def find(names: Sequence[str], folder: Path) -> LocalTasks:
    """Return the tests of these names over the files of a folder.

    Args:
        names: of `NAMES`; the whole needs all eight files.
        folder: holds `<name>.jsonl` (also .json, .xz, .gz) or LLM-Adapters' `<name>/test.json`, or a folder
            `commonsense` or `test` that does.

    Raises:
        UserError: a file is missing, or a row is not as it should be (its line is named).
    """
    wanted = {name: test["metadata"] for name, test in TESTS.items() if name in names or ALL in names}
    places = [folder / each for each in (".", "test", "commonsense", "commonsense/test", "dataset")]
    found = {
        name: find_file(places, [each for stem in about["files"] for each in (stem, f"{stem}/test")])
        for name, about in wanted.items()
    }
    paths = {name: path for name, path in found.items() if path is not None}
    if missing := [f"{about['files'][0]}.jsonl" for name, about in wanted.items() if name not in paths]:
        there = f"; there are --tasks {' '.join(paths)}" if paths else " (--data)"
        raise UserError(f"{folder} has no {', '.join(missing)}{there}")
    tasks = []
    for name, path in paths.items():
        rows, file = read_rows(path)
        docs = [_doc(row, name) for row in rows]
        published = wanted[name]["published"]
        tasks.append(LocalTask(name=name, config=TESTS[name], docs=docs, published=published, files=[file]))
    published = sum(task.published for task in tasks)
    groups = [LocalGroup(name=ALL, members=list(paths), pooled=False, published=published)] if ALL in names else []
    return LocalTasks(tasks=tasks, groups=groups)


def _doc(row: Row, name: str) -> dict[str, Any]:
    """Parts of an instruction.

    Returns:
        instruction and answer as they were; question, choices and gold (0-based) as lm-eval asks them.
    """
    instruction, answer = row.text("instruction"), row.text("answer")
    opening, word = TESTS[name]["metadata"]["opening"], TESTS[name]["metadata"].get("word", "")
    if not instruction.startswith(opening):
        raise UserError(f"{row.place}: no question of {name}, which begin with {opening.strip()!r}")
    body = instruction.removeprefix(opening)
    parts: list[str] = []
    if word:
        layout = rf"(?P<question>.*?)\n\n{word}1:(?P<choices>.*?)\s*Answer format: \S+\s*"
        found = re.fullmatch(layout, body, re.DOTALL)
        # Text and number take turns: " a", "2", "b", "3", "c".
        parts = re.split(rf"\s*{word}(\d): ?", found["choices"]) if found else []
        allowed = _numbered(word, len(parts) // 2 + 1)
    else:
        found = re.fullmatch(r"(?P<question>.*)\n\nAnswer format: true/false\s*", body, re.DOTALL)
        allowed = ("false", "true")
    if found is None or parts[1::2] != [str(number) for number in range(2, len(parts) // 2 + 2)]:
        choices_as = f"{word}1: ... {word}2: ... " if word else ""
        raise UserError(f"{row.place}: the instruction does not end in '{choices_as}Answer format: ...'")
    if answer not in allowed:
        raise UserError(f"{row.place}: field 'answer' must be one of {', '.join(allowed)}, got {answer!r}")
    clean = _without_tags if name == "hellaswag_local" else str.strip
    question, choices = clean(found["question"]), [clean(part) for part in parts[::2]]
    if not question or not all(choices):
        raise UserError(f"{row.place}: the question or a choice is empty")
    doc: dict[str, Any] = {"instruction": instruction, "answer": answer, "question": question, "choices": choices}
    doc["gold"] = allowed.index(answer)
    if name == "winogrande_local":
        before, blank, after = question.partition("_")
        if not blank or not after.strip():
            raise UserError(f"{row.place}: the sentence has no blank '_' with words after it")
        doc |= {"choices": [before + choice for choice in choices], "ending": after.strip()}
    return doc


def _numbered(word: str, count: int) -> tuple[str, ...]:
    return tuple(f"{word.lower()}{number}" for number in range(1, count + 1))


def _without_tags(text: str) -> str:
    """Take out HellaSwag's tags [header], [title], [step], as lm-eval does."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ").strip()
