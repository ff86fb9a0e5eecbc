"""Scores of tasks as lines of text."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def task_table(scores: Mapping[str, Mapping[str, Any]], hidden: Collection[str] = ()) -> list[str]:
    """One line a metric, with its standard error and the number of questions; then what makes it incomparable.

    Args:
        scores: from `score_tasks` or `score_answers`.
        hidden: tasks that are only counted.
    """
    rows = [("task", "metric", "value", "stderr", "n")]
    shown = [task for task in scores if task not in hidden]
    for task in shown:
        rows += _rows(task, scores[task])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if i < 2 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    if unseen := len(set(hidden) & scores.keys()):
        lines.append(f"and {unseen} subjects, each in the file of --output")
    return lines + [f"note: {note}" for task in shown for note in _notes(task, scores[task])]


def _rows(task: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    for key, value in metrics.items():
        name, comma, way = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        error = metrics.get(f"{name}_stderr,{way}")
        yield (
            task,
            name if way == "none" else key,
            f"{value:.4f}" if isinstance(value, float) else str(value),
            f"{error:.4f}" if isinstance(error, float) else "",
            f"{metrics['n']:,}" if "n" in metrics else "",
        )


def _notes(task: str, metrics: Mapping[str, Any]) -> Iterator[str]:
    if "published_n" in metrics and metrics["n"] != metrics["published_n"]:
        yield (
            f"{task} is {metrics['n']:,} questions, the published test {metrics['published_n']:,}: "
            "not comparable with published figures"
        )
    if "truncated" in metrics:
        yield f"{task}: {metrics['truncated']:,} prompts did not fit the model's positions and lost their beginning"
