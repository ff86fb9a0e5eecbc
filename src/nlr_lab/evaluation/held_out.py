"""The numbers of a task's own held-out data, as its training took them, for a model that was loaded since."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from nlr_lab.tasks.task import Score, scores_of_examples
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model
from nonlinear_lowrank.hub.loading import check_weights, is_adapter, put_adapter

from .batches import check_batch


def score_saved(
    task: Any,
    folder: Path,
    *,
    base: str | None = None,
    split: str | None = None,
    device: str = "cpu",
    batch_size: int = 16,
) -> dict[str, float]:
    """Loss and scores of a saved model or adapter on the held-out data of the task that it was made for.

    Args:
        task: of the recipe; an adapter goes on the pretrained model that it names, with its new head.
        folder: as the run saved it.
        base: folder or name of the pretrained model, where it is not what the task names.
        split: "dev" or "test" of GLUE's tasks; None: what the run was scored on.
        device: where the model runs.
        batch_size: examples per forward pass.

    Raises:
        UserError: data or model cannot be used, or there is no such split.
    """
    if base is not None:
        if not is_adapter(folder):
            raise UserError(f"--base is for adapters; {folder} holds a whole model")
        task = replace(task, model=replace(task.model, checkpoint=base))
    if split is not None:
        task = task.on_split(split)
    if is_adapter(folder):
        check_weights(folder)
    prepared = task.prepare()
    if is_adapter(folder):
        model = put_adapter(task.build_model(prepared), folder, base=task.model.checkpoint)
    else:
        model = load_model(folder)
    return score_held_out(model.to(device), prepared, batch_size=batch_size)


@torch.no_grad()
def score_held_out(model: Any, prepared: Any, *, batch_size: int = 16) -> dict[str, float]:
    """Loss and scores on the examples that the runs of a task are judged by.

    Args:
        model: of the task, on its device; left in evaluation mode.
        prepared: the task's data (see `tasks.task`).
        batch_size: examples per forward pass; the numbers do not depend on it, but for rounding.

    Raises:
        UserError: the loss is not finite, or a batch takes more memory than is free.
    """
    model.eval()
    examples = prepared.test or prepared.valid
    check_batch(model, min(batch_size, len(examples)), _tokens(model, examples))
    outputs = _outputs(model, prepared, examples, batch_size)
    if prepared.score is None:
        numbers = _of_tokens(outputs, prepared.predicts_next)
    else:
        numbers = _of_examples(outputs, prepared.score)
    if not math.isfinite(numbers["loss"]):
        raise UserError("the loss on the held-out data is not a finite number: the model is broken")
    return numbers


def _tokens(model: Any, examples: Any) -> int:
    """Tokens of the longest example, or patches of an image where the model's layers see all of them."""
    if examples.lengths is not None:
        return int(max(examples.lengths))
    if "input_ids" in (first := examples[0]):
        return len(first["input_ids"])
    if not isinstance(getattr(model.config, "patch_size", None), int) or not hasattr(
        model.config, "num_attention_heads"
    ):
        return 0
    return int(first["pixel_values"].shape[-1] // model.config.patch_size) ** 2


def _outputs(model: Any, prepared: Any, examples: Any, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits in float32 and labels, batch by batch."""
    for start in range(0, len(examples), size):
        items = [examples[index] for index in range(start, min(start + size, len(examples)))]
        batch = {name: value.to(model.device) for name, value in prepared.collate(items).items()}
        labels = batch.pop("labels")
        yield model(**batch).logits.float(), labels


def _of_tokens(outputs: Iterator[tuple[torch.Tensor, torch.Tensor]], shifted: bool) -> dict[str, float]:
    total, count = 0.0, 0
    for logits, labels in outputs:
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        count += int((labels != -100).sum())
    return {"loss": total / max(1, count)}


def _of_examples(outputs: Iterator[tuple[torch.Tensor, torch.Tensor]], score: Score) -> dict[str, float]:
    logits, labels = (torch.cat(each).cpu() for each in zip(*outputs, strict=True))
    return scores_of_examples(logits, labels, score)
