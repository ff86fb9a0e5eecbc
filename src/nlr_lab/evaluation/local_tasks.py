"""Tasks of lm-eval over rows of a user's files: MMLU (mmlu.yaml) and the eight commonsense tests of LLM-Adapters (Hu et
al., arXiv:2304.01933; commonsense.yaml), which wrote every test as one instruction. docs/evaluate.md has their forms.

For lm-eval an instruction is taken apart into question and choices, which are asked as its task of that name asks them;
for `score_answers` it stays as it is.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nlr_lab.tasks.text.data import json_records
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import hash_file

MMLU = "mmlu_local"
COMMONSENSE = "commonsense_local"
MMLU_TASK: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("mmlu.yaml").read_text(encoding="utf-8"))
TESTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("commonsense.yaml").read_text(encoding="utf-8"))
CATEGORIES: dict[str, dict[str, int]] = MMLU_TASK["metadata"]
SUBJECTS = {subject: count for subjects in CATEGORIES.values() for subject, count in subjects.items()}
MMLU_NAMES = (MMLU, *(f"{MMLU}_{part}" for part in (*CATEGORIES, *SUBJECTS)))
COMMONSENSE_NAMES = (COMMONSENSE, *TESTS)
_ENDINGS = ("jsonl", "jsonl.xz", "jsonl.gz", "json", "json.xz", "json.gz")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """Record of a file that a result was made from."""

    name: str
    bytes: int
    sha256: str
    """Hash of the file as it lies there, compressed or not."""
    rows: int


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """One task of lm-eval whose questions lie here."""

    name: str
    config: dict[str, Any]
    """A task file of lm-eval, except `task` and what names its data."""
    docs: Sequence[dict[str, Any]]
    """The questions, in the file's order, with the fields that `config` reads; all of the same fields."""
    shots: Sequence[dict[str, Any]] = ()
    """Answered examples to put in front, in this order."""
    published: int
    """Questions of the published test; with another number, a score is not comparable with published ones."""
    files: Sequence[DataFile]
    """Files of the questions and examples."""


class LocalGroup(NamedTuple):
    """Tasks that are reported together."""

    name: str
    members: Sequence[str]
    """Names of tasks, or of groups that come before this one."""
    published: int
    """Questions of the published tests, also of members that have none here."""
    pooled: bool = True
    """Report the share of right answers over all questions, not the mean of the members' shares."""
    metric: str = "acc"
    """The name under which it is reported."""


@dataclass(frozen=True)
class LocalTasks:
    """All that was asked for."""

    tasks: Sequence[LocalTask] = ()
    groups: Sequence[LocalGroup] = ()

    @property
    def files(self) -> list[DataFile]:
        """Every file once, in the order of the tasks."""
        return list(dict.fromkeys(file for task in self.tasks for file in task.files))

    @property
    def hidden(self) -> set[str]:
        """Tasks that a table need not show, being many and part of a group; results have them."""
        pooled = {member for group in self.groups if group.pooled for member in group.members}
        return pooled & {task.name for task in self.tasks}

    def split(self, names: Collection[str]) -> tuple["LocalTasks", "LocalTasks"]:
        """Return the tasks and groups of these names, and the others."""
        inside, outside = (
            LocalTasks(
                [task for task in self.tasks if (task.name in names) == wanted],
                [group for group in self.groups if (group.name in names) == wanted],
            )
            for wanted in (True, False)
        )
        return inside, outside


def is_local(name: str) -> bool:
    """Return whether a task of that name reads its questions from a folder (lm-eval has none of such a name); raise
    UserError where it only resembles one of ours."""
    known = (*COMMONSENSE_NAMES, *MMLU_NAMES)
    if name not in known and (name.endswith("_local") or name.startswith((MMLU, COMMONSENSE))):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise UserError(f"there is no local task {name!r}; did you mean {near[0]!r}?")
    return name in known


def find_local_tasks(names: Sequence[str], folder: str | Path, *, shots: int | None = None) -> LocalTasks:
    """Read and check the rows of local tasks, of names as `is_local` knows them, before any model is loaded.

    The folder holds test.jsonl and dev.jsonl of MMLU (also .json, .xz, .gz), or a folder `mmlu` that does; of the
    commonsense tests, `<name>.jsonl` or LLM-Adapters' `<name>/test.json`, or a folder `commonsense` or `test` that
    does. `shots` are examples in front of each question of MMLU; None: five. Raise UserError where a file is missing, a
    row is malformed (the message names file and line), or a subject has no questions, or too few examples."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder} (--data)")
    tasks: list[LocalTask] = []
    groups: list[LocalGroup] = []
    if set(names) & set(COMMONSENSE_NAMES):
        tasks += _find_commonsense(names, folder)
        if COMMONSENSE in names:
            published = sum(task.published for task in tasks)
            groups.append(LocalGroup(COMMONSENSE, [task.name for task in tasks], published, pooled=False))
    if set(names) & set(MMLU_NAMES):
        asked = {name.removeprefix(MMLU).removeprefix("_") for name in names}
        found = _find_mmlu(asked, folder, 5 if shots is None else shots)
        tasks += found
        groups += _mmlu_groups(asked, {task.name for task in found})
    return LocalTasks(tasks, groups)


@dataclass(frozen=True)
class _Row:
    """One object of a file; `place` is "FILE, line 3" or, in a JSON array, "FILE, record 3", counted from one."""

    place: str
    values: dict[str, Any]

    def text(self, field: str) -> str:
        """Return the string in a field."""
        value = self.values.get(field)
        if not isinstance(value, str):
            found = f"is {type(value).__name__}, not a string" if field in self.values else "is missing"
            raise UserError(f"{self.place}: field {field!r} {found}")
        return value


def _find_file(folders: Sequence[Path], stems: Sequence[str]) -> Path | None:
    paths = (folder / f"{stem}.{ending}" for folder in folders for stem in stems for ending in _ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def _read_rows(path: Path) -> tuple[list[_Row], DataFile]:
    """Read all objects of JSON lines, or of a JSON array."""
    rows = [_Row(*each) for each in json_records(path)]
    for row in rows:
        if not isinstance(row.values, dict):
            raise UserError(f"{row.place}: must be a JSON object, got {type(row.values).__name__}")
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows, DataFile(name=path.name, bytes=path.stat().st_size, sha256=hash_file(path), rows=len(rows))


def _find_mmlu(asked: set[str], folder: Path, shots: int) -> list[LocalTask]:
    """Return the subjects that were asked for, by themselves, by category, or as the whole ("")."""
    subjects = [each for category, all_ in CATEGORIES.items() for each in all_ if asked & {"", category, each}]
    test, file = _read_mmlu(folder, "test")
    dev, more = _read_mmlu(folder, "dev") if shots else ({}, file)
    present = [subject for subject in subjects if subject in test]
    absent = sorted(asked & set(subjects) - set(present)) or ([] if present else subjects)
    if absent:
        raise UserError(f"{folder}: {file.name} has no questions of {', '.join(absent[:3])}")
    tasks = []
    for subject in present:
        examples = dev.get(subject, [])[:shots]
        if len(examples) < shots:
            what = f"{len(examples)} examples of {subject}, not {shots}"
            raise UserError(f"{more.name} has {what}; try --num-fewshot {len(examples)}")
        topic = subject.replace("_", " ")
        about = f"The following are multiple choice questions (with answers) about {topic}.\n\n"
        tasks.append(
            LocalTask(
                name=f"{MMLU}_{subject}",
                config={**MMLU_TASK, "description": about, "num_fewshot": shots},
                docs=test[subject],
                shots=examples,
                published=SUBJECTS[subject],
                files=list(dict.fromkeys([file, more])),
            )
        )
    return tasks


def _mmlu_groups(asked: set[str], present: set[str]) -> list[LocalGroup]:
    """A group for each category that was asked for, and two for the whole."""
    groups, pooled = [], []
    for category, subjects in CATEGORIES.items():
        members = [f"{MMLU}_{subject}" for subject in subjects if f"{MMLU}_{subject}" in present]
        if members and asked & {"", category}:
            groups.append(LocalGroup(f"{MMLU}_{category}", members, sum(subjects.values())))
            pooled += members
    if "" in asked:
        categories, published = [group.name for group in groups], sum(SUBJECTS.values())
        groups.append(LocalGroup(MMLU, pooled, published))
        if len(categories) == len(CATEGORIES):
            groups.append(LocalGroup(MMLU, categories, published, pooled=False, metric="acc_of_categories"))
    return groups


def _read_mmlu(folder: Path, split: str) -> tuple[dict[str, list[dict[str, Any]]], DataFile]:
    path = _find_file((folder, folder / "mmlu"), (split,))
    if path is None:
        raise UserError(f"{folder} has no {split}.jsonl of MMLU (also .json, .xz, .gz); name its folder with --data")
    rows, file = _read_rows(path)
    docs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        subject, question = row.text("subject"), row.text("question")
        choices, answer = row.values.get("choices"), row.values.get("answer")
        if subject not in SUBJECTS:
            raise UserError(f"{row.place}: {subject!r} is not an MMLU subject")
        if not isinstance(choices, list) or len(choices) != 4 or not all(isinstance(each, str) for each in choices):
            raise UserError(f"{row.place}: field 'choices' must be four strings")
        if type(answer) is not int or not 0 <= answer < 4:
            raise UserError(f"{row.place}: field 'answer' must be 0, 1, 2 or 3, got {answer!r}")
        docs[subject].append({"question": question, "choices": choices, "answer": answer})
    return docs, file


def answers_of(name: str) -> Sequence[str]:
    """Generated answers to a commonsense test, by pattern; the first that occurs counts."""
    about = TESTS[name]["metadata"]
    return _numbered(about["word"], about["most"]) if "word" in about else ("true", "false")


def _find_commonsense(names: Sequence[str], folder: Path) -> list[LocalTask]:
    places = [folder / each for each in (".", "test", "commonsense", "commonsense/test", "dataset")]
    paths, missing = {}, []
    for name, test in TESTS.items():
        if name in names or COMMONSENSE in names:
            stems = test["metadata"]["files"]
            if path := _find_file(places, [each for stem in stems for each in (stem, f"{stem}/test")]):
                paths[name] = path
            else:
                missing.append(f"{stems[0]}.jsonl")
    if missing:
        there = f"; there are --tasks {' '.join(paths)}" if paths else " (--data)"
        raise UserError(f"{folder} has no {', '.join(missing)}{there}")
    tasks = []
    for name, path in paths.items():
        rows, file = _read_rows(path)
        docs, published = [_commonsense_doc(row, name) for row in rows], TESTS[name]["metadata"]["published"]
        tasks.append(LocalTask(name=name, config=TESTS[name], docs=docs, published=published, files=[file]))
    return tasks


def _commonsense_doc(row: _Row, name: str) -> dict[str, Any]:
    """Return instruction and answer as they were; question, choices and gold (0-based) as lm-eval asks them."""
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
