"""MMLU, 5-shot, over local rows {"subject", "question", "choices", "answer"}.

The prompt is that of lm-eval's `mmlu`, which is that of Hendrycks et al. (arXiv:2009.03300): a line that names
the subject, the subject's first five `dev` questions with their answers, the question, and "Answer:", after which
" A" to " D" are compared by log-likelihood.

Categories are those of Hendrycks et al.: `anatomy` is in Other. lm-eval counts it to STEM, which moves
135 questions between those two categories and leaves the overall share as it is.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError

from .rows import DataFile, Row, find_file, read_rows
from .task_file import LocalGroup, LocalTask, LocalTasks

ALL = "mmlu_local"
SHOTS = 5
PUBLISHED = 14_042
"""Questions of the test."""

# Questions of each subject's published test.
CATEGORIES: dict[str, dict[str, int]] = {
    "stem": {
        "abstract_algebra": 100,
        "astronomy": 152,
        "college_biology": 144,
        "college_chemistry": 100,
        "college_computer_science": 100,
        "college_mathematics": 100,
        "college_physics": 102,
        "computer_security": 100,
        "conceptual_physics": 235,
        "electrical_engineering": 145,
        "elementary_mathematics": 378,
        "high_school_biology": 310,
        "high_school_chemistry": 203,
        "high_school_computer_science": 100,
        "high_school_mathematics": 270,
        "high_school_physics": 151,
        "high_school_statistics": 216,
        "machine_learning": 112,
    },
    "humanities": {
        "formal_logic": 126,
        "high_school_european_history": 165,
        "high_school_us_history": 204,
        "high_school_world_history": 237,
        "international_law": 121,
        "jurisprudence": 108,
        "logical_fallacies": 163,
        "moral_disputes": 346,
        "moral_scenarios": 895,
        "philosophy": 311,
        "prehistory": 324,
        "professional_law": 1534,
        "world_religions": 171,
    },
    "social_sciences": {
        "econometrics": 114,
        "high_school_geography": 198,
        "high_school_government_and_politics": 193,
        "high_school_macroeconomics": 390,
        "high_school_microeconomics": 238,
        "high_school_psychology": 545,
        "human_sexuality": 131,
        "professional_psychology": 612,
        "public_relations": 110,
        "security_studies": 245,
        "sociology": 201,
        "us_foreign_policy": 100,
    },
    "other": {
        "anatomy": 135,
        "business_ethics": 100,
        "clinical_knowledge": 265,
        "college_medicine": 173,
        "global_facts": 100,
        "human_aging": 223,
        "management": 103,
        "marketing": 234,
        "medical_genetics": 100,
        "miscellaneous": 783,
        "nutrition": 306,
        "professional_accounting": 282,
        "professional_medicine": 272,
        "virology": 166,
    },
}
SUBJECTS = {subject: count for subjects in CATEGORIES.values() for subject, count in subjects.items()}
NAMES = (ALL, *(f"{ALL}_{part}" for part in (*CATEGORIES, *SUBJECTS)))

_CONFIG: dict[str, Any] = {
    "output_type": "multiple_choice",
    "test_split": "test",
    "fewshot_split": "dev",
    "fewshot_config": {"sampler": "first_n"},
    "doc_to_text": (
        "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:"
    ),
    "doc_to_choice": ["A", "B", "C", "D"],
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def find(names: Sequence[str], folder: Path, shots: int | None = None) -> LocalTasks:
    """The tasks and groups of these names over `test` and `dev` files of a folder.

    Args:
        names: of `NAMES`.
        folder: holds test.jsonl and dev.jsonl (also .json, .xz, .gz), or a folder `mmlu` that does.
        shots: examples in front of each question; None: five.

    Raises:
        UserError: a file is missing, a row is not as it should be (its line is named), or a subject has no
            questions, or fewer than `shots` examples.
    """
    shots = SHOTS if shots is None else shots
    subjects = _asked(names)
    test_path, test, test_file = _read(folder, "test")
    dev_path, dev, dev_file = _read(folder, "dev") if shots else (None, {}, None)
    present = [subject for subject in subjects if subject in test]
    alone = {subject for subject in subjects if f"{ALL}_{subject}" in names}
    absent = sorted(alone - set(present)) or ([] if present else subjects)
    if absent:
        raise UserError(f"{test_path} has no questions of {', '.join(absent[:3])}")
    tasks = []
    for subject in present:
        examples = dev.get(subject, [])[:shots]
        if len(examples) < shots:
            raise UserError(f"{dev_path} has {len(examples)} examples of {subject}, not {shots}; try --num-fewshot")
        topic = subject.replace("_", " ")
        tasks.append(
            LocalTask(
                name=f"{ALL}_{subject}",
                config={
                    **_CONFIG,
                    "description": f"The following are multiple choice questions (with answers) about {topic}.\n\n",
                    "num_fewshot": shots,
                },
                docs=test[subject],
                shots=examples,
                published=SUBJECTS[subject],
                files=[test_file, *([] if dev_file is None else [dev_file])],
            )
        )
    groups = _groups(names, present)
    grouped = {member for group in groups for member in group.members}
    return LocalTasks(tasks=tasks, groups=groups, hidden=frozenset(grouped & {task.name for task in tasks}))


def _asked(names: Sequence[str]) -> list[str]:
    """Subjects behind names, in the order of the table."""
    parts = {name.removeprefix(ALL).removeprefix("_") for name in names}
    return [
        subject for category, subjects in CATEGORIES.items() for subject in subjects if parts & {"", category, subject}
    ]


def _groups(names: Sequence[str], present: Sequence[str]) -> list[LocalGroup]:
    """A group for each category that was asked for, and two for the whole."""
    groups = []
    for category, subjects in CATEGORIES.items():
        name = f"{ALL}_{category}"
        members = [f"{ALL}_{subject}" for subject in subjects if subject in present]
        if members and (ALL in names or name in names):
            published = sum(subjects.values())
            groups.append(LocalGroup(name=name, members=members, by="questions", published=published))
    if ALL in names:
        categories = [group.name for group in groups]
        members = [f"{ALL}_{subject}" for subject in present]
        groups.append(LocalGroup(name=ALL, members=members, by="questions", published=PUBLISHED))
        if len(categories) == len(CATEGORIES):
            groups.append(
                LocalGroup(name=ALL, members=categories, by="members", published=PUBLISHED, metric="acc_of_categories")
            )
    return groups


def _read(folder: Path, split: str) -> tuple[Path, dict[str, list[dict[str, Any]]], DataFile]:
    path = find_file((folder, folder / "mmlu"), (split,))
    if path is None:
        raise UserError(f"{folder} has no {split}.jsonl of MMLU (also .json, .xz, .gz); name its folder with --data")
    rows, file = read_rows(path)
    docs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        docs[row.text("subject")].append(_doc(row))
    return path, dict(docs), file


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
