"""Costs of an arm before it is trained: parameters, FLOPs, and the time of interleaved training steps."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nlr_lab.bench.timing import interleaved_step_times
from nlr_lab.compare.trial import Measurement
from nlr_lab.runtime.environment import cpu_threads, many_compiled
from nlr_lab.runtime.processes import world_size
from nlr_lab.training.arms import Arm
from nlr_lab.training.recipe import Recipe
from nlr_lab.training.run import apply_arm, build_model, count_parameters, optimizer_settings

_WARMUP = 3
# Time does not depend on the learning rate, but at the recipe's own a model that sees one batch again and again
# may blow up, and arithmetic on subnormal or infinite numbers has other speeds.
_RATE = 1e-6


def measure_arms(
    recipe: Recipe,
    arms: Sequence[Arm],
    prepared: Any,
    *,
    rounds: int,
    max_seconds: float | None = None,
    quiet: bool = True,
) -> Measurement:
    """Build every arm, count it, and time whole training steps (wall clock) of all arms in turn.

    The models live side by side while they are timed. A step is forward, backward, clipping and optimizer
    on one batch of the recipe's size, in the recipe's precision, compiled if the recipe says so.

    Args:
        recipe: task and training settings.
        arms: what is measured.
        prepared: the task's prepared data.
        rounds: timed steps of each arm; 0 leaves times out.
        max_seconds: no further round is begun after so many; there are fewer then.
        quiet: print no line on stderr when every arm has been built and the timing begins.

    Raises:
        UserError: an arm that cannot be built.
    """
    parameters: dict[str, int] = {}
    trainable: dict[str, int] = {}
    flops: dict[str, float | None] = {}
    notes = []
    tuned = recipe.task.pretrained  # what is trained then says more than a forward pass
    for arm in arms:
        model = _build(recipe, arm, prepared)
        parameters[arm.name] = count_parameters(model)
        trainable[arm.name] = count_parameters(model, trainable=True)
        flops[arm.name] = None if tuned else _flops_of_task(model, recipe, prepared)
        if flops[arm.name] is None and not tuned:
            notes.append(f"`{arm.name}`: its FLOPs could not be counted.")
    del model
    times = None
    if rounds:
        if not quiet:
            print(f"timing steps of {len(arms)} arms", file=sys.stderr)
        try:
            train = recipe.train
            with cpu_threads(train.threads), many_compiled(train.compile, lengths_vary=prepared.lengths_vary):
                steppers = {arm.name: training_step(recipe, arm, prepared) for arm in arms}
                times = interleaved_step_times(steppers, rounds, _WARMUP, clock="wall", max_seconds=max_seconds)
        except torch.OutOfMemoryError:
            notes.append("Step times were not measured: the models of all arms do not fit on the device together.")
        finally:
            steppers = {}
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return Measurement(parameters=parameters, trainable=trainable, flops=flops, times=times, notes=notes)


def _flops_of_task(model: nn.Module, recipe: Recipe, prepared: Any) -> float | None:
    batch = prepared.collate([prepared.train[0]])
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return forward_flops(model, inputs, recipe.task.sequence_length)


def forward_flops(model: nn.Module, inputs: Mapping[str, torch.Tensor], tokens: int) -> float | None:
    """FLOPs per token of the matrix products of one forward pass, attention included.

    Counted as the operators run, so that a user's own change is counted as well.

    Args:
        model: on the CPU.
        inputs: of one example, by the names of the model's arguments.
        tokens: (or patches) that the example has.

    Returns:
        None when the model cannot run under the counter.
    """

    # The branch adds its last product in place, which torch's table of operators does not have.
    def in_place(into: torch.Size, left: torch.Size, right: torch.Size, **_: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place})
    was_training = model.training
    model.eval()
    try:
        # The fused attention of the CPU is unknown to the counter; its plain formula is two products.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            model(**inputs)
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        model.train(was_training)
    return counter.get_total_flops() / tokens


def training_step(recipe: Recipe, arm: Arm, prepared: Any) -> Callable[[], None]:
    """Return a function that takes one training step of an arm, as the Trainer would."""
    train = recipe.train
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = _build(recipe, arm, prepared).to(device).train()
    if train.gradient_checkpointing:
        recompute(model)
    kind, settings = optimizer_settings(model, recipe, arm, _RATE, device)
    optimizer = kind(**settings)
    forward: Any = torch.compile(model) if train.compile else model
    size = max(1, train.batch_size // (world_size() * train.gradient_accumulation))
    items = [prepared.train[index % len(prepared.train)] for index in range(size)]
    batch = {name: value.to(device) for name, value in prepared.collate_training(items).items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        for _ in range(train.gradient_accumulation):
            with torch.autocast(device.type, torch.bfloat16, enabled=train.bf16):
                loss = forward(**batch)["loss"] / train.gradient_accumulation
            loss.backward()
        if train.max_grad_norm:
            nn.utils.clip_grad_norm_(trained, train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def recompute(model: Any) -> None:
    """Switch activation checkpointing on as the Trainer does, under the name that this transformers version has."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _build(recipe: Recipe, arm: Arm, prepared: Any) -> nn.Module:
    return apply_arm(recipe, arm, build_model(recipe, prepared, arm))
