"""The eight commonsense tests of LLM-Adapters over local rows {"instruction", "answer", ...}.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError

from .rows import Row, find_file, read_rows
from .task_file import LocalGroup, LocalTask, LocalTasks

ALL = "commonsense_local"


@dataclass(frozen=True, kw_only=True)
class Test:
    """One of the eight."""

    files: Sequence[str]
    """Stems of its file, LLM-Adapters' own name first."""
    published: int
    """Questions of the published test."""
    opening: str
    """What its instructions begin with, before the question."""
    word: str | None
    """Choices are written as "Answer1: ... Answer2: ..."; None: true or false."""
    answers: Sequence[str]
    """What a generated answer may be; the first that occurs counts."""
    config: dict[str, Any]
    """lm-eval's task file of the test's `choices`."""
    clean: Callable[[str], str] = field(default=str.strip)
    """Applied to question and choices, as lm-eval's task does."""


def _without_brackets(text: str) -> str:
    """HellaSwag's tags [header], [title], [step], as lm-eval takes them out."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ").strip()


def _numbered(word: str, count: int) -> tuple[str, ...]:
    return tuple(f"{word}{number}" for number in range(1, count + 1))


_ACC = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
_ACC_NORM = {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}
_QUESTION: dict[str, Any] = {
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [_ACC, _ACC_NORM],
}
_CHOOSE_ANSWER = "Please choose the correct answer to the question: "

TESTS: dict[str, Test] = {
    "boolq_local": Test(
        files=("boolq",),
        published=3270,
        opening="Please answer the following question with true or false, question: ",
        word=None,
        answers=("true", "false"),
        config={**_QUESTION, "doc_to_choice": ["no", "yes"], "metric_list": [_ACC]},
    ),
    "piqa_local": Test(
        files=("piqa",),
        published=1838,
        opening="Please choose the correct solution to the question: ",
        word="Solution",
        answers=_numbered("solution", 2),
        config=_QUESTION,
    ),
    "siqa_local": Test(
        files=("social_i_qa", "siqa"),
        published=1954,
        opening=_CHOOSE_ANSWER,
        word="Answer",
        answers=_numbered("answer", 5),
        config={**_QUESTION, "doc_to_text": "Q: {{question}}\nA:", "metric_list": [_ACC]},
    ),
    "hellaswag_local": Test(
        files=("hellaswag", "hellaswag_val_sample"),
        published=10_042,
        opening="Please choose the correct ending to complete the given sentence: ",
        word="Ending",
        answers=_numbered("ending", 4),
        config={**_QUESTION, "doc_to_text": "question"},
        clean=_without_brackets,
    ),
    "winogrande_local": Test(
        files=("winogrande",),
        published=1267,
        opening="Please choose the correct answer to fill in the blank to complete the given sentence: ",
        word="Option",
        answers=_numbered("option", 2),
        # Partial evaluation: the rest of the sentence is scored after each way to fill the blank.
        config={
            "doc_to_text": "gold",
            "doc_to_choice": "choices",
            "doc_to_target": "ending",
            "metric_list": [_ACC],
        },
    ),
    "arc_easy_local": Test(
        files=("ARC-Easy", "arc_easy"),
        published=2376,
        opening=_CHOOSE_ANSWER,
        word="Answer",
        answers=_numbered("answer", 5),
        config=_QUESTION,
    ),
    "arc_challenge_local": Test(
        files=("ARC-Challenge", "arc_challenge"),
        published=1172,
        opening=_CHOOSE_ANSWER,
        word="Answer",
        answers=_numbered("answer", 5),
        config=_QUESTION,
    ),
    "openbookqa_local": Test(
        files=("openbookqa",),
        published=500,
        opening=_CHOOSE_ANSWER,
        word="Answer",
        answers=_numbered("answer", 5),
        config={**_QUESTION, "doc_to_text": "question"},
    ),
}
NAMES = (ALL, *TESTS)


def find(names: Sequence[str], folder: Path) -> LocalTasks:
    """The tests of these names over the files of a folder.

    Args:
        names: of `NAMES`; the whole needs all eight files.
        folder: holds `<name>.jsonl` (also .json, .xz, .gz) or LLM-Adapters' `<name>/test.json`, or a folder
            `commonsense` or `test` that does.

    Raises:
        UserError: a file is missing, or a row is not as it should be (its line is named).
    """
    wanted = [name for name in TESTS if name in names or ALL in names]
    places = [folder, *(folder / each for each in ("test", "commonsense", "commonsense/test", "dataset"))]
    paths = {}
    for name in wanted:
        stems = [each for stem in TESTS[name].files for each in (stem, f"{stem}/test")]
        path = find_file(places, stems)
        if path is not None:
            paths[name] = path
    missing = [name for name in wanted if name not in paths]
    if missing:
        files = ", ".join(f"{TESTS[name].files[0]}.jsonl" for name in missing)
        there = f"; there are --tasks {' '.join(paths)}" if paths else " (--data)"
        raise UserError(f"{folder} has no {files}{there}")
    published = sum(TESTS[name].published for name in wanted)
    groups = [LocalGroup(name=ALL, members=wanted, by="members", published=published)] if ALL in names else []
    return LocalTasks(tasks=[_task(name, paths[name]) for name in wanted], groups=groups)


def _task(name: str, path: Path) -> LocalTask:
    test = TESTS[name]
    rows, file = read_rows(path)
    return LocalTask(
        name=name,
        # A number of examples of 0 is one that lm-eval does not change.
        config={"output_type": "multiple_choice", "test_split": "test", "num_fewshot": 0, **test.config},
        docs=[_doc(row, name, test) for row in rows],
        published=test.published,
        files=[file],
    )


def _doc(row: Row, name: str, test: Test) -> dict[str, Any]:
    """The parts of an instruction.

    Returns:
        instruction and answer as they were; question, choices and gold (0-based) as lm-eval asks them.
    """
    instruction, answer = row.text("instruction"), row.text("answer")
    if not instruction.startswith(test.opening):
        raise UserError(f"{row.place}: no question of {name}, which begin with {test.opening.strip()!r}")
    body = instruction.removeprefix(test.opening)
    if test.word is None:
        found = re.fullmatch(r"(?P<question>.*)\n\nAnswer format: true/false\s*", body, re.DOTALL)
        allowed: Sequence[str] = ("false", "true")
        parts: list[str] = []
    else:
        layout = rf"(?P<question>.*?)\n\n{test.word}1:(?P<choices>.*?)\s*Answer format: \S+\s*"
        found = re.fullmatch(layout, body, re.DOTALL)
        # Text and number take turns: " a", "2", "b", "3", "c".
        parts = re.split(rf"\s*{test.word}(\d): ?", found["choices"]) if found else []
        allowed = _numbered(test.word.lower(), len(parts) // 2 + 1)
    if found is None or parts[1::2] != [str(number) for number in range(2, len(parts) // 2 + 2)]:
        choices_as = "" if test.word is None else f"{test.word}1: ... {test.word}2: ... "
        raise UserError(f"{row.place}: the instruction does not end in '{choices_as}Answer format: ...'")
    if answer not in allowed:
        raise UserError(f"{row.place}: field 'answer' must be one of {', '.join(allowed)}, got {answer!r}")
    question, choices = test.clean(found["question"]), [test.clean(part) for part in parts[::2]]
    if not question or not all(choices):
        raise UserError(f"{row.place}: the question or a choice is empty")
    doc = {
        "instruction": instruction,
        "answer": answer,
        "question": question,
        "choices": choices,
        "gold": allowed.index(answer),
    }
    if test.word == "Option":
        before, blank, after = question.partition("_")
        if not blank or not after.strip():
            raise UserError(f"{row.place}: the sentence has no blank '_' with words after it")
        doc |= {"choices": [before + choice for choice in choices], "ending": after.strip()}
    return doc
