"""Evaluation of trained models.

losses       perplexity and bits per byte of texts, the scores of held-out data
harness      tasks of EleutherAI's lm-evaluation-harness, by name or over files of one's own
mmlu         MMLU's 57 subjects as task files over local rows
commonsense  the eight commonsense tests of LLM-Adapters as task files over local rows
answers      the same eight, answered in generated text, as the papers report them
"""

from .answers import score_answers
from .harness import score_tasks
from .local import find_local_tasks
from .losses import TextScore, score_documents, score_sequences
from .task_file import LocalTasks

__all__ = [
    "LocalTasks",
    "TextScore",
    "find_local_tasks",
    "score_answers",
    "score_documents",
    "score_sequences",
    "score_tasks",
]
