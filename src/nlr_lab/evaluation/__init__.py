"""Evaluation of trained models.

losses       perplexity and bits per byte of texts, the scores of held-out data
harness      tasks of EleutherAI's lm-evaluation-harness, by name or over files of one's own
local_tasks  MMLU's 57 subjects, and the eight commonsense tests of LLM-Adapters, over local rows
answers      the same eight, answered in generated text, as the papers report them
"""

from .answers import score_answers
from .harness import score_tasks
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
