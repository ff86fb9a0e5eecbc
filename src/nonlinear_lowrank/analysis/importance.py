"""Scores of linears, and choices of linears for branches by them (noble_notes_zh.md, section 4.2).

    scores = layer_importance(model, batches)
    nlr.augment(model, config, select=select_layers(scores, percentile=70))

Scores are per weight, so that large and small layers can be compared:

    gradient     mean of |w dL/dw|, the loss's first-order change if the weight were zeroed (arXiv 1906.10771)
    activation   mean of |w_ij| rms(x_j), the weight times its input's size (arXiv 2306.11695); needs no labels
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.names import BY_HEAD, FUSED, KEYS, SEPARATE, VALUES
from nonlinear_lowrank.surgery.attention import unfused
from nonlinear_lowrank.surgery.split import split_linears
from nonlinear_lowrank.surgery.targets import dense_parts, output_head_names
from nonlinear_lowrank.validation import check_choice

Score = Literal["gradient", "activation"]

# The last parts of a linear's name, as the architectures of transformers have them.
_PARTS = {
    "query": "|".join(
        (*SEPARATE, *FUSED, BY_HEAD, "in_proj_qkv", "W_pack", "att_proj", "q_[ab]_proj", "q_head", "projection_query")
    ),
    "key": "|".join((*KEYS, "k_head", "projection_key")),
    "value": "|".join((*VALUES, "v_head", "projection_value")),
    "feed_forward": r"(gate|up|down|gate_up)_proj|fc_?\d|fc_(in|out)|c_fc|lin(ear)?[12]|w[123]|wi(_\d)?|pwconv[12]"
    r"|dense_(h_to_4h|4h_to_h)|ffn_output|ffw_layer_[12]",
}
PARTS = (*_PARTS, "other")
"""Results of `part_of`."""
_INSIDE = re.compile(r"(?:^|\.)((shared_)?mlp|ffn?\d?|feed_forward\d?|intermediate|DenseReluDense)(\.|$)")


def part_of(name: str) -> str:
    """Return "query" (also for a fused one), "key", "value", "feed_forward" or "other", by a linear's name."""
    last = name.rpartition(".")[2]
    if _INSIDE.search(name):
        return "feed_forward"
    for part, pattern in _PARTS.items():
        if re.fullmatch(pattern, last):
            return part
    if re.search(r"(?<!attention)\.output\.dense$", name):
        return "feed_forward"  # BERT's second linear; its attention's is attention.output.dense
    return "other"


def layer_importance(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], *, score: Score = "gradient", split_fused: bool = False
) -> dict[str, float]:
    """Score every linear of the model's body; the model, its gradients and its modes do not change.

    Args:
        model: a transformers model, or any module that takes a batch as keyword arguments and, for "gradient",
            gives an output with a `loss`.
        batches: a list, or any iterable, of keyword arguments of the forward pass, on the model's device, with labels
            for "gradient". They reach the model as they are.
        score: see this file's documentation.
        split_fused: score the parts of fused projections, as `augment` of that argument names them.

    Returns:
        {name: score}, in the model's order, averaged over the batches; 0 for what no token reached. Output heads are
        skipped.

    Raises:
        UserError: no linears, no batches, one batch in place of a list, no loss, a score that is not finite, or, by
            gradient, a weight that is computed from others or a model that was made inside torch.inference_mode().
    """
    check_choice("score", score, get_args(Score))
    if isinstance(batches, Mapping):
        raise UserError("batches is a single batch; put it into a list: layer_importance(model, [batch])")
    with unfused(model, True), split_linears(model, split_fused):
        return _scores(model, batches, score)


def _scores(model: nn.Module, batches: Iterable[Mapping[str, Any]], score: Score) -> dict[str, float]:
    heads, inside = output_head_names(model), dense_parts(model)
    linears: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and name not in heads
        and module not in inside
        and module.weight.is_floating_point()
    }
    if not linears:
        raise UserError(f"{type(model).__name__} has no linears to score")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        run = _by_gradient if score == "gradient" else _by_activation
        scores = run(model, linears, _checked(batches))
    finally:
        for module, training in modes:  # train() would thaw what the user has put into evaluation mode alone
            module.training = training
    if wrong := [name for name, value in scores.items() if not np.isfinite(value)]:
        raise UserError(f"the score of {wrong[0]} is not finite; check the batches and the model's weights")
    return scores


def select_layers(scores: Mapping[str, float], percentile: float = 70.0) -> list[str]:
    """Return the names whose score is at or above a percentile of all scores, in the given order.

    A percentile of 0 selects all, 70 about the highest three tenths (noble_notes_zh.md, section 4.2). No scores, or a
    percentile outside 0 to 100, raise UserError.
    """
    if not scores:
        raise UserError("there are no scores to select by")
    if not 0 <= percentile <= 100:
        raise UserError(f"percentile must be between 0 and 100, got {percentile!r}")
    threshold = float(np.percentile(list(scores.values()), percentile))
    return [name for name, value in scores.items() if value >= threshold]


def recommended_layers(scores: Mapping[str, float], percentile: float = 70.0) -> list[str]:
    """Return every query, the keys at or above a percentile of the keys' scores, and every feed-forward linear.

    Source: noble_notes_zh.md, section 4.2. UserError where no linear is a query by its name, or none a feed-forward's.
    """
    parts = {name: part_of(name) for name in scores}
    # If either is missing, `part_of` does not know the names.
    if missing := [part.replace("_", "-") for part in ("query", "feed_forward") if part not in parts.values()]:
        raise UserError(f"no linear is named like a {' or a '.join(missing)}; choose with select_layers")
    keys = {name: scores[name] for name, part in parts.items() if part == "key"}
    kept = set(select_layers(keys, percentile)) if keys else set()
    return [name for name, part in parts.items() if part in ("query", "feed_forward") or name in kept]


Batches = Iterable[Mapping[str, Any]]


def _by_gradient(model: nn.Module, linears: Mapping[str, Any], batches: Batches) -> dict[str, float]:
    for name, module in linears.items():
        if module._parameters.get("weight") is None:  # the tensor read here is not the one that forward computes
            raise UserError(f"the weight of {name} is computed from others; undo that, or use score='activation'")
    if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        raise UserError("the model was made inside torch.inference_mode() and has no gradients; use score='activation'")
    weights = [module.weight for module in linears.values()]
    frozen = [weight for weight in weights if not weight.requires_grad]
    sums, count = dict.fromkeys(linears, 0.0), 0
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        for batch in batches:
            with torch.inference_mode(False), torch.enable_grad():
                # Tensors made inside torch.inference_mode() are copied: autograd refuses them.
                output = model(**tree_map_only(Tensor, lambda x: x.clone() if x.is_inference() else x, dict(batch)))
                loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
                if loss is None:
                    raise UserError("the model's output has no loss; put labels into the batches, or return one")
                gradients = torch.autograd.grad(loss, weights, allow_unused=True)
            for name, weight, gradient in zip(linears, weights, gradients, strict=True):
                if gradient is not None:
                    sums[name] += float((weight.detach().double() * gradient.double()).abs().mean())
            count += 1
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
    return {name: total / count for name, total in sums.items()}


@torch.no_grad()
def _by_activation(model: nn.Module, linears: Mapping[str, Any], batches: Batches) -> dict[str, float]:
    squares: dict[str, Tensor] = {}
    tokens = dict.fromkeys(linears, 0)

    def before(name: str, module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        given = inputs[0] if inputs else next(iter(named.values()))
        x = given.detach().reshape(-1, given.shape[-1]).double()
        squares[name] = squares.get(name, 0.0) + x.square().sum(0)
        tokens[name] += len(x)

    with ExitStack() as stack:
        for name, module in linears.items():
            stack.callback(module.register_forward_pre_hook(partial(before, name), with_kwargs=True).remove)
        for batch in batches:
            model(**batch)
    scores = dict.fromkeys(linears, 0.0)  # linears never called, or on no token, score 0
    for name, square in squares.items():
        if tokens[name]:
            weight = linears[name].weight.detach().abs().double()
            weight = weight if isinstance(linears[name], Conv1D) else weight.t()
            scores[name] = float((weight * (square / tokens[name]).sqrt()[:, None]).mean())
    return scores


def _checked(batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    empty = True
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise UserError(f"a batch must map the model's keyword arguments, got a {type(batch).__name__}")
        yield batch
        empty = False
    if empty:
        raise UserError("there are no batches to score the layers on")
