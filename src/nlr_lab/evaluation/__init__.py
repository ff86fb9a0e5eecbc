"""Evaluation of trained models: losses of texts and held-out data, scores of tasks by lm-eval or in generated text."""

from .harness import score_answers, score_tasks
from .local_tasks import LocalTasks, find_local_tasks
from .losses import TextScore, score_documents, score_sequences

__all__ = [
    "LocalTasks",
    "TextScore",
    "find_local_tasks",
    "score_answers",
    "score_documents",
    "score_sequences",
    "score_tasks",
]
