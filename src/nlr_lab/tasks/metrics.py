"""Scores of classifications and regressions, by name, on logits (N, C) and labels (N,); higher is better in all.

| name     | from               | on                                           |
|----------|--------------------|----------------------------------------------|
| accuracy | scikit-learn       | the largest logit                            |
| f1       | scikit-learn       | the largest logit, class 1 against the rest  |
| matthews | scikit-learn       | the largest logit                            |
| pearson  | scipy              | the only logit                               |
| spearman | scipy              | the only logit                               |

Where a number is not defined, because every prediction is the same, it is 0, as for a guess.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from nonlinear_lowrank.errors import UserError

from .task import Score


def scores(names: Sequence[str]) -> Score:
    """Return a function (logits, labels) -> {name: score}, with the named scores of this file's table."""

    def score(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return {name: _score(name, logits, labels) for name in names}

    return score


def _score(name: str, logits: np.ndarray, labels: np.ndarray) -> float:
    from scipy import stats
    from sklearn import metrics

    if name in ("pearson", "spearman"):
        predicted = logits[:, 0].astype(np.float64)
        if len(predicted) < 2 or np.ptp(predicted) == 0 or np.ptp(labels) == 0:
            return 0.0
        correlation: Any = stats.pearsonr if name == "pearson" else stats.spearmanr
        value = float(correlation(predicted, labels.astype(np.float64)).statistic)
        return value if math.isfinite(value) else 0.0
    guesses = logits.argmax(-1)
    if name == "f1":
        return float(metrics.f1_score(labels, guesses, zero_division=0.0))
    kinds: dict[str, Any] = {"accuracy": metrics.accuracy_score, "matthews": metrics.matthews_corrcoef}
    return float(kinds[name](labels, guesses))


def scores_of_examples(logits: torch.Tensor, labels: torch.Tensor, score: Score) -> dict[str, float]:
    """Return the mean loss, in float64, and the scores.

    Args:
        logits: (N, C).
        labels: (N,); floating for a regression. -100 marks an example that cannot be read, which is skipped.
        score: of `scores`.

    Returns:
        {"loss": ..., ...}; the loss alone, not a number, where a logit is not finite.

    Raises:
        UserError: no example can be read.
    """
    predicted = logits.double()
    if not labels.is_floating_point():
        kept = labels != -100
        if not bool(kept.any()):
            raise UserError(f"none of the {len(labels)} images can be read any more; are their files still there?")
        predicted, labels = predicted[kept], labels[kept]
    if not bool(torch.isfinite(predicted).all()):
        return {"loss": math.nan}
    if labels.is_floating_point():
        loss = F.mse_loss(predicted.squeeze(-1), labels.double())
    else:
        loss = F.cross_entropy(predicted, labels)
    return {"loss": float(loss), **score(predicted.numpy().astype(np.float32), labels.numpy())}
