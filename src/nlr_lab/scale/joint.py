"""Joint laws over rungs of several sizes and lengths: `loss = E + A (N/N1)^-a + B (D/D1)^-b`, and what equal FLOPs buy.

Approach 3 of Hoffmann et al. 2022 (arXiv 2203.15556, section 3.3): the Huber loss of log residuals is least. N is the
plain model's parameters outside embeddings and head, D a run's tokens, N1 and D1 those of the first rung. An arm's
training FLOPs are C = D f(N), f a power law N^g through its own rungs. C is best spent where a A (N/N1)^-a equals
g b B (D/D1)^-b: there the loss is E + K C^-(ab / (a + gb)). Intervals are those of `fits`: in 100 simulations each of a
cross and of grids of 3 x 2 and 3 x 3 rungs, n = 3, they held constants, best use and speed in 88 to 100 %.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from .fits import Array, Draws, Interval

CONSTANTS = ("E", "A", "B", "a", "b")
LEAST = "it takes five rungs, of three --widths, with two --tokens at each or three at one"
_DELTA = 1e-3  # of the Huber loss, in log loss: Hoffmann et al.'s
_EXPONENTS = (0.1, 0.3, 0.6, 1.2)  # of size and tokens, where descents begin
_LEAST, _STEPS, _CLOSE = 1e-3, 40, 1e-6
_LOGS = (-30.0, 3.0)  # bounds of a constant's log, losses over the rungs' mean
# Condition of the five constants above which rungs do not tell them apart: 75 to 110 for crosses and grids of three
# widths and more, above 6,000 where one other length was run at one width, 1e16 where two widths were.
_WORST = 1e3


class JointLaws(Draws):
    """Joint laws of several arms over the same rungs.

    Args:
        sizes: parameters N of each rung (R,).
        tokens: tokens D of each rung (R,).
        compute: arm -> training FLOPs of each rung (R,).
        losses: arm -> final losses of each rung, by seed, R arrays (n,); seeds in the same order in all arms.
    """

    def __init__(
        self,
        sizes: Array,
        tokens: Array,
        compute: Mapping[str, Array],
        losses: Mapping[str, Sequence[Array]],
    ) -> None:
        super().__init__(compute, losses)
        self.sizes, self.tokens = sizes, tokens
        self._x, self._y = np.log(sizes / sizes[0]), np.log(tokens / tokens[0])
        self._fitted: dict[str, Array] = {}

    @property
    def determined(self) -> bool:
        """Return whether the rungs tell the five constants of every arm apart."""
        for losses in self.losses.values():
            found = _fit(self._x, self._y, np.array([[each.mean() for each in losses]]))
            slopes = _model(found, self._x, self._y)[1][0]
            if np.linalg.cond(slopes / np.linalg.norm(slopes, axis=0)) > _WORST:
                return False
        return True

    def fits(self, arm: str) -> dict[str, Interval]:
        """Return E, A, B, a and b of an arm; A and B are what the first rung's size and tokens cost it above E."""
        return {name: self._interval(each) for name, each in zip(CONSTANTS, self._constants(arm).T, strict=True)}

    def optimum(self, arm: str, compute: float) -> dict[str, Interval]:
        """Return the size of an arm's least loss at so many training FLOPs, its tokens a parameter, and that loss."""
        size, tokens, above = self._best(arm, compute)
        ratio = self.tokens[0] / self.sizes[0] * tokens / size
        found = {
            "size": self.sizes[0] * size,
            "tokens_per_parameter": ratio,
            "loss": self._constants(arm)[:, 0] + above,
        }
        return {name: self._interval(values) for name, values in found.items()}

    def speed(self, arm: str, reference: str, compute: float) -> Interval:
        """Return the reference's FLOPs for the loss that an arm has at so many, over these; both best spent.

        Infinite where the reference never comes down to that loss.
        """
        E, _, _, a, b = self._constants(reference).T
        own, wanted = self._best(reference, compute)[2], self._best(arm, compute)[2] + self._constants(arm)[:, 0] - E
        with np.errstate(all="ignore"):
            power = self._growth(reference)[0] / a + 1 / b
            times = np.where(wanted > 0, (own / np.maximum(wanted, 1e-300)) ** power, np.inf)
        return self._interval(times)

    def _constants(self, arm: str) -> Array:
        """E, A, B, a and b (1 + DRAWS, 5)."""
        if arm not in self._fitted:
            self._fitted[arm] = _fit(self._x, self._y, self._drawn(arm))
        return self._fitted[arm]

    def _growth(self, arm: str) -> tuple[float, float]:
        """Exponent of FLOPs a token in size, and their log at the first rung's."""
        exponent, constant = np.polyfit(self._x, np.log(self.compute[arm] / self.tokens), 1)
        return float(exponent), float(constant)

    def _best(self, arm: str, compute: float) -> tuple[Array, Array, Array]:
        """Size and tokens of the least loss, over the first rung's, and that loss above E (1 + DRAWS,)."""
        growth, constant = self._growth(arm)
        share = compute / np.exp(constant) / self.tokens[0]
        _, A, B, a, b = self._constants(arm).T
        with np.errstate(all="ignore"):
            size = (a * A * share**b / (growth * b * B)) ** (1 / (a + growth * b))
            return size, share * size**-growth, A * size**-a * (1 + a / (growth * b))


def _fit(x: Array, y: Array, losses: Array) -> Array:
    """Return E, A, B, a and b (draws, 5) of losses (draws, R) at log sizes and log tokens (R,).

    The first draw's descent has several starts; the others' begin where it ended.
    """
    scale = losses[0].mean()
    target = np.log(losses / scale)
    starts = []
    for a, b in itertools.product(_EXPONENTS, repeat=2):
        design = np.stack([np.ones_like(x), np.exp(-a * x), np.exp(-b * y)], 1)
        linear = np.linalg.lstsq(design, losses[0] / scale, rcond=None)[0]
        starts.append(np.log([*np.maximum(linear, _LEAST), a, b]))
    ended, errors = _descend(np.stack(starts), x, y, target[:1])
    logs, _ = _descend(np.repeat(ended[errors.argmin()][None], len(losses), 0), x, y, target)
    return np.exp(logs) * [scale, scale, scale, 1, 1]


def _descend(logs: Array, x: Array, y: Array, target: Array) -> tuple[Array, Array]:
    """Return logs of the constants (draws, 5) that have the least Huber loss, and that loss (draws,).

    Levenberg's and Marquardt's steps, residuals beyond delta weighted down.
    """

    def at(logs: Array, target: Array) -> tuple[Array, Array, Array]:
        fitted, slopes = _model(np.exp(logs), x, y)
        apart = np.abs(residuals := fitted - target)
        within = np.minimum(apart, _DELTA)
        return residuals, slopes, np.sum(within * (apart - within / 2), 1)

    logs, target = logs.copy(), np.broadcast_to(target, (len(logs), len(x)))
    damping, diagonal, left = np.full(len(logs), 1e-2), np.arange(5), np.arange(len(logs))
    for _ in range(_STEPS):
        residuals, slopes, errors = at(logs[left], target[left])
        weighted = slopes * (_DELTA / np.maximum(_DELTA, np.abs(residuals)))[..., None]
        normal, gradient = weighted.transpose(0, 2, 1) @ slopes, (weighted * residuals[..., None]).sum(1)
        normal[:, diagonal, diagonal] = normal[:, diagonal, diagonal] * (1 + damping[left, None]) + 1e-12
        moves = np.clip(np.linalg.solve(normal, gradient[..., None])[..., 0], -1, 1)
        tried = np.clip(logs[left] - moves, *_LOGS)
        better = at(tried, target[left])[2] < errors
        logs[left[better]] = tried[better]
        damping[left] *= np.where(better, 1 / 3, 4)
        left = left[np.abs(moves).max(1) > _CLOSE]
    return logs, at(logs, target)[2]


def _model(constants: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Return log losses (draws, R) and their slopes in the constants' logs (draws, R, 5)."""
    E, A, B, a, b = constants.T[..., None]
    size, tokens = A * np.exp(-a * x), B * np.exp(-b * y)
    total = E + size + tokens
    slopes = np.stack([np.broadcast_to(E, size.shape), size, tokens, -a * x * size, -b * y * tokens], 2)
    return np.log(total), slopes / total[..., None]
