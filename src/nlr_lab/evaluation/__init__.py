"""Evaluation of trained models.

losses       perplexity and bits per byte of texts, the scores of held-out data
harness      scores of such tasks and of lm-eval's own, by likelihood or in generated text, and their table
local_tasks  MMLU's 57 subjects, and the eight commonsense tests of LLM-Adapters, over local rows
"""

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
