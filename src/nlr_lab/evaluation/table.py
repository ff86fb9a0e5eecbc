"""Scores of tasks as lines of text."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def task_table(scores: Mapping[str, Mapping[str, Any]], hidden: Collection[str] = ()) -> list[str]:
    """One line a metric, with its standard error and the number of questions; then what makes it incomparable.

    Args:
        scores: from `score_tasks` or `score_answers`.
        hidden: tasks that are only counted.
    """
    shown = {task: metrics for task, metrics in scores.items() if task not in hidden}
    rows = [("task", "metric", "value", "stderr", "n")]
    rows += [row for task, metrics in shown.items() for row in _rows(task, metrics)]
    wide, wider, *numbers = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for row in rows:
        right = [text.rjust(width) for text, width in zip(row[2:], numbers, strict=True)]
        lines.append("  ".join([row[0].ljust(wide), row[1].ljust(wider), *right]).rstrip())
    if unseen := len(scores) - len(shown):
        lines.append(f"and {unseen} subjects, each in the file of --output")
    return lines + [f"note: {note}" for task, metrics in shown.items() for note in _notes(task, metrics)]


def _rows(task: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    for key, value in metrics.items():
        name, comma, way = key.partition(",")
        if comma and not name.endswith("_stderr"):
            error = metrics.get(f"{name}_stderr,{way}")
            yield (
                task,
                name if way == "none" else key,
                f"{value:.4f}" if isinstance(value, float) else str(value),
                f"{error:.4f}" if isinstance(error, float) else "",
                f"{metrics['n']:,}" if "n" in metrics else "",
            )


def _notes(task: str, metrics: Mapping[str, Any]) -> Iterator[str]:
    if metrics.get("published_n", metrics.get("n")) != metrics.get("n"):
        yield (
            f"{task} is {metrics['n']:,} questions, the published test {metrics['published_n']:,}: "
            "not comparable with published figures"
        )
    if "truncated" in metrics:
        yield f"{task}: {metrics['truncated']:,} prompts did not fit the model's positions and lost their beginning"
