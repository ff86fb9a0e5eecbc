"""The commands of `nlr`, one a file with a `run(arguments)`; this table is all that `nlr --help` reads."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Command:
    """What `nlr --help` says of a command."""

    usage: str
    summary: str


COMMANDS: dict[str, Command] = {
    "train": Command(usage="train RECIPE", summary="train one model: baseline, or with a method"),
    "finetune": Command(usage="finetune RECIPE", summary="tune a pretrained model: an adapter, its head, or all of it"),
    "fit": Command(usage="fit RECIPE", summary="fit a coordinate network: an image, a shape, a scene"),
    "compare": Command(
        usage="compare RECIPE", summary="train baselines and methods on the same batches; table, picture, report"
    ),
    "evaluate": Command(
        usage="evaluate CHECKPOINT", summary="perplexity, bits per byte, lm-eval tasks, MMLU, commonsense"
    ),
    "generate": Command(usage="generate CHECKPOINT", summary="continue a prompt, or draw images"),
    "inspect": Command(
        usage="inspect MODEL", summary="parameters, FLOPs and kept bytes by layer, without building the model"
    ),
    "plan": Command(usage="plan RECIPE", summary="memory, traffic and hours of training on given GPUs, arm by arm"),
    "convert": Command(usage="convert IN OUT", summary="add branches to a trained checkpoint, outputs unchanged"),
    "merge": Command(usage="merge ADAPTER OUT", summary="put an adapter into its base's weights: a plain model"),
    "verify": Command(usage="verify CHECKPOINT", summary="is it whole: hashes, headers, NaN, JSON of every file"),
    "bench": Command(
        usage="bench step|decode|kernels", summary="time of a step or a token over the baseline's; compiled GPU kernels"
    ),
}
