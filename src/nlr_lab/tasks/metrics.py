"""Scores of classifications and regressions, by name, on logits and labels; higher is better in all of them.

| name     | from               | of                                           |
|----------|--------------------|----------------------------------------------|
| accuracy | scikit-learn       | the largest logit                            |
| f1       | scikit-learn       | the largest logit, class 1 against the rest  |
| matthews | scikit-learn       | the largest logit                            |
| pearson  | scipy              | the only logit                               |
| spearman | scipy              | the only logit                               |

Where a number is not defined, because every prediction is the same, it is 0, as for a guess.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from nonlinear_lowrank.errors import UserError

from .task import Score


def scores(names: Sequence[str]) -> Score:
    """A function (logits (N, C), labels (N,)) -> {name: score}, with the named scores of this file's table."""

    def score(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return {name: _METRICS[name](logits, labels) for name in names}

    return score


def scores_of_examples(logits: torch.Tensor, labels: torch.Tensor, score: Score) -> dict[str, float]:
    """The mean loss, in float64, and the scores.

    Args:
        logits: (N, C).
        labels: (N,); floating for a regression. -100 marks an example that cannot be read, which is left out.
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


def _accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, logits.argmax(-1)))


def _f1(logits: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, logits.argmax(-1), zero_division=0.0))


def _matthews(logits: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, logits.argmax(-1)))


def _pearson(logits: np.ndarray, labels: np.ndarray) -> float:
    from scipy.stats import pearsonr

    return _correlation(pearsonr, logits, labels)


def _spearman(logits: np.ndarray, labels: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return _correlation(spearmanr, logits, labels)


def _correlation(kind: Callable, logits: np.ndarray, labels: np.ndarray) -> float:
    predicted = logits[:, 0].astype(np.float64)
    if len(predicted) < 2 or np.ptp(predicted) == 0 or np.ptp(labels) == 0:
        return 0.0
    value = float(kind(predicted, labels.astype(np.float64)).statistic)
    return value if math.isfinite(value) else 0.0


_METRICS = {"accuracy": _accuracy, "f1": _f1, "matthews": _matthews, "pearson": _pearson, "spearman": _spearman}
