"""Remarks of a report on itself: how its numbers are made, and what they cannot say."""

from nlr_lab.compare.report import Record, by_loss

TRAINING_TEXT = """\
Nats an image; means over seeds. As trained: on augmented images, over the last tenth of the steps. Without \
augmentation: on some of the training images as they are, after the last step. A delta (paired by seed) below 0 fits \
them better."""

_SEEDS = """\
- Seeds are the sample: the intervals speak of other seeds of this recipe, not of other texts, sizes or \
lengths of training."""

_SCORES = """\
- Delta: paired t-test over seeds on the {metric} after the last step, on examples that nothing was chosen by \
unless a line above says so. Every seed gives all arms the same batches in the same order and the same new head.
- Best step: chosen by the held-out examples, then scored; means over seeds, no test."""

_LOSSES = """\
- Delta: paired t-test over seeds on the loss at the last step. Every seed gives all arms the same batches in \
the same order and the same evaluation text."""

_SPEEDS = """\
- Step speedup: steps of the reference / steps of the arm to the first crossing of the reference's final loss \
on the linearly interpolated evaluation curve; geometric mean over seeds, t-test on logs. It is a number only \
when every seed reached that loss. A curve that rises again at its end flatters it.
- Matched speedup: the step speedup where it exists; where an arm never came down to the reference's final \
loss, the steps the reference took to the arm's final loss / the steps of the arm, which is below 1.
- Wall-clock speedup: speedup in steps / step-time ratio. Its error is bootstrapped and combined with that of \
the seeds on the log scale, so the interval is never narrower than that of the steps."""

_COMMON = """\
- Diverged: the loss was no longer a number, or the training loss rose by more than a quarter of what it had fallen, \
and stayed up for a twentieth of the run or to its end; the step is that of the first logged loss that was up. A \
finite loss is in the averages all the same.
- Step time: the median of paired ratios of interleaved training steps (all arms in turn, same batch) on the \
machine named below, quartiles in brackets; evaluation, loading and checkpoints are not in it.
- p (Holm) is corrected for the number of arms in the table. Speedups are not corrected.
- Learning rates are tuned on a seed of their own, which is not used in the comparison; a single tuning seed \
leaves the best one uncertain by about one step of the grid."""


def limits(results: Record, *, speeds: bool) -> str:
    """The list, with what concerns speed where it was measured."""
    own = _LOSSES if by_loss(results) else _SCORES.format(metric=results["metric"]["name"])
    return "\n".join((_SEEDS, own, *((_SPEEDS,) if speeds else ()), _COMMON))
