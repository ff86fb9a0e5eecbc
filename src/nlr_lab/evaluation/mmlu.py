"""MMLU, 5-shot, over local rows {"subject", "question", "choices", "answer"}; its task file is mmlu.yaml.

The prompt is that of lm-eval's `mmlu`, which is that of Hendrycks et al. (arXiv:2009.03300): a line that names
the subject, the subject's first five `dev` questions with their answers, the question, and "Answer:", after which
" A" to " D" are compared by log-likelihood.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError

from .task_file import DataFile, LocalGroup, LocalTask, LocalTasks, Row, find_file, read_rows, read_task_file

ALL = "mmlu_local"
SHOTS = 5
TASK = read_task_file("mmlu.yaml")
CATEGORIES: dict[str, dict[str, int]] = TASK["metadata"]
SUBJECTS = {subject: count for subjects in CATEGORIES.values() for subject, count in subjects.items()}
PUBLISHED = sum(SUBJECTS.values())
NAMES = (ALL, *(f"{ALL}_{part}" for part in (*CATEGORIES, *SUBJECTS)))


def find(names: Sequence[str], folder: Path, shots: int | None = None) -> LocalTasks:
    """Return the tasks and groups of these names over `test` and `dev` files of a folder.

    Args:
        names: of `NAMES`.
        folder: holds test.jsonl and dev.jsonl (also .json, .xz, .gz), or a folder `mmlu` that does.
        shots: examples in front of each question; None: five.

    Raises:
        UserError: a file is missing, a row is not as it should be (its line is named), or a subject has no
            questions, or fewer than `shots` examples.
    """
    shots = SHOTS if shots is None else shots
    asked = {name.removeprefix(ALL).removeprefix("_") for name in names}
    subjects = [each for category, all_ in CATEGORIES.items() for each in all_ if asked & {"", category, each}]
    test_path, test, files = _read(folder, "test")
    if shots:
        dev_path, dev, more = _read(folder, "dev")
        files += more
    present = [subject for subject in subjects if subject in test]
    absent = sorted(asked & set(subjects) - set(present)) or ([] if present else subjects)
    if absent:
        raise UserError(f"{test_path} has no questions of {', '.join(absent[:3])}")
    tasks = []
    for subject in present:
        examples = dev.get(subject, [])[:shots] if shots else []
        if len(examples) < shots:
            raise UserError(f"{dev_path} has {len(examples)} examples of {subject}, not {shots}; try --num-fewshot")
        topic = subject.replace("_", " ")
        about = f"The following are multiple choice questions (with answers) about {topic}.\n\n"
        tasks.append(
            LocalTask(
                name=f"{ALL}_{subject}",
                config={**TASK, "description": about, "num_fewshot": shots},
                docs=test[subject],
                shots=examples,
                published=SUBJECTS[subject],
                files=files,
            )
        )
    return LocalTasks(tasks=tasks, groups=_groups(asked, present))


def _groups(asked: set[str], present: Sequence[str]) -> list[LocalGroup]:
    """A group for each category that was asked for, and two for the whole."""
    groups = []
    for category, subjects in CATEGORIES.items():
        members = [f"{ALL}_{subject}" for subject in subjects if subject in present]
        if members and asked & {"", category}:
            published = sum(subjects.values())
            groups.append(LocalGroup(name=f"{ALL}_{category}", members=members, pooled=True, published=published))
    if "" in asked:
        categories = [group.name for group in groups]
        members = [f"{ALL}_{subject}" for subject in present]
        groups.append(LocalGroup(name=ALL, members=members, pooled=True, published=PUBLISHED))
        if len(categories) == len(CATEGORIES):
            name = "acc_of_categories"
            groups.append(LocalGroup(name=ALL, members=categories, pooled=False, published=PUBLISHED, metric=name))
    return groups


def _read(folder: Path, split: str) -> tuple[Path, dict[str, list[dict[str, Any]]], list[DataFile]]:
    path = find_file((folder, folder / "mmlu"), (split,))
    if path is None:
        raise UserError(f"{folder} has no {split}.jsonl of MMLU (also .json, .xz, .gz); name its folder with --data")
    rows, file = read_rows(path)
    docs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        docs[row.text("subject")].append(_doc(row))
    return path, docs, [file]


def _doc(row: Row) -> dict[str, Any]:
    subject, question = row.text("subject"), row.text("question")
    choices, answer = row.values.get("choices"), row.values.get("answer")
    if subject not in SUBJECTS:
        raise UserError(f"{row.place}: {subject!r} is no subject of MMLU")
    if not isinstance(choices, list) or len(choices) != 4 or not all(isinstance(each, str) for each in choices):
        raise UserError(f"{row.place}: field 'choices' must be four strings")
    if type(answer) is not int or not 0 <= answer < 4:
        raise UserError(f"{row.place}: field 'answer' must be 0, 1, 2 or 3, got {answer!r}")
    return {"question": question, "choices": choices, "answer": answer}
