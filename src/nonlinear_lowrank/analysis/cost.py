"""Parameters and forward FLOPs of a model, layer by layer, from its modules alone.

Nothing is run and nothing is read but shapes, so a model on the meta device will do: 1.5B on a laptop.

| part                        | forward FLOPs per token (a multiply-add is 2)                            |
|-----------------------------|--------------------------------------------------------------------------|
| linear, output head         | 2 x d_in x d_out                                                         |
| NOBLE branch                | 2 x r x (d_in + d_out) + 2 x r x r for each mixing matrix                |
| sine low-rank weight        | as the plain linear; forming it, 2 x r x d_in x d_out a batch, is not in |
| plain low-rank weight       | 2 x r x (d_in + d_out)                                                   |
| attention scores and values | 4 x sequence length x heads x head width (the full square; a causal      |
|                             | kernel that skips its upper half computes half of it)                    |
| experts held as 3-D tensors | 2 x the weights of those that a token goes through; LongCat-Flash's that |
|                             | are the identity have none: of k, k x share of those with weights count  |
| their router                | 2 x its weights                                                          |
| patch embedding             | 2 x its weights                                                          |
| everything else             | 0: embeddings look up, norms and activations (rational ones too) are     |
|                             | elementwise                                                              |

Every linear counts for every token. So a classifier that sees one position of the sequence is overstated.
The backward pass costs twice the forward.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from nonlinear_lowrank.methods.attention import attention_heads
from nonlinear_lowrank.methods.base import dense_part, method_of_layer
from nonlinear_lowrank.methods.experts import active_experts, expert_count, first_integer, projections
from nonlinear_lowrank.surgery.report import own_flops
from nonlinear_lowrank.surgery.targets import dense_parts, expert_tensors, output_head_names
from nonlinear_lowrank.validation import check_integer

NUMBERS = ("parameters", "branch_parameters", "flops", "branch_flops", "kept_bytes")


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One module. `parameters` and `flops` include the branch's share, which is negative where a method saves some."""

    name: str
    """Name in the model; "" is the model itself."""
    kind: str
    """Class of the module, or "head"."""
    parameters: int
    """Own parameters, not those of modules inside; tied ones count where they come first."""
    branch_parameters: int = 0
    flops: int
    """Forward, per token."""
    branch_flops: int = 0
    kept_bytes: int | None = None
    """Bytes saved for backward over the whole batch; None where no forward pass was traced."""


def _total(name: str) -> Any:
    def total(cost: "ModelCost") -> int | None:
        return sum(getattr(row, name) or 0 for row in cost.rows) if name != "kept_bytes" or cost.batch_size else None

    return property(total)


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Cost of a model: rows in the model's order, and totals."""

    rows: list[LayerCost]
    sequence_length: int
    batch_size: int | None = None
    """Batch size behind `kept_bytes`."""
    kept_dtype: str | None = None
    """Type of the activations behind `kept_bytes`."""
    notes: list[str] = field(default_factory=list)
    """Modules that could not be counted."""
    active_parameters: int | None = None
    """See `active_parameters`."""

    # Totals of LayerCost's fields over the rows.
    parameters = _total("parameters")
    branch_parameters = _total("branch_parameters")
    flops = _total("flops")
    branch_flops = _total("branch_flops")
    kept_bytes = _total("kept_bytes")

    @property
    def parameter_ratio(self) -> float:
        """Parameters over those of the plain model."""
        return self.parameters / (self.parameters - self.branch_parameters)

    @property
    def flop_ratio(self) -> float:
        """FLOPs over those of the plain model."""
        return self.flops / (self.flops - self.branch_flops)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: every row, and the totals."""
        values = asdict(self)
        layers = values.pop("rows")
        return {**values, **{name: getattr(self, name) for name in NUMBERS}, "layers": layers}

    def to_json(self) -> str:
        """Return `to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)


def count_parameters(model: nn.Module, *, trainable: bool = False) -> int:
    """Return the number of parameters, all or the trained ones; tied ones count once, 4-bit ones as the wide ones."""
    counted = [each for each in model.parameters() if each.requires_grad or not trainable]
    # Two numbers of a 4-bit weight of bitsandbytes are in one byte; its shape is beside it.
    return sum((getattr(each, "quant_state", None) or each).shape.numel() for each in counted)


def active_parameters(model: nn.Module) -> int | None:
    """Return the number of parameters that one token meets: all except those of experts it skips.

    None where nothing says how many experts a token goes through. Embeddings count whole, tied parameters once, experts
    that are the identity not at all (see the table of this file).
    """
    idle: dict[int, int] = {}
    for module in model.modules():
        if not projections(module):
            continue
        if (active := active_experts(module, model)) is None:
            return None
        plain = {name for each in projections(module) for name in each.parameters}
        for name, each in module.named_parameters():
            count = each.shape[0] if each.ndim == 3 else expert_count(module)
            # NOBLE's shared down projection, (r, d_in), may have as many rows as there are experts.
            own = each.ndim > 1 and each.shape[0] == count and not (each.ndim == 2 and name.endswith("_down"))
            if own or name in plain:
                idle[id(each)] = each.numel() - round(each.numel() // count * min(active, count))
    return count_parameters(model) - sum(idle.values())


def model_cost(model: nn.Module, sequence_length: int) -> ModelCost:
    """Return parameters and forward FLOPs per token of every module; see this file's docstring.

    Args:
        model: augmented or plain, on any device (meta too); not run.
        sequence_length: tokens that each token attends to.

    Returns:
        A row for every module that has parameters of its own, costs FLOPs, or both.

    Raises:
        UserError: the sequence length is below 1.
    """
    check_integer("sequence_length", sequence_length, minimum=1)
    heads = output_head_names(model)
    attention = {id(module) for module in _innermost_attention(model)}
    counted, known = set[int](), set[int]()
    rows, notes = [], []
    inside = dense_parts(model)
    for name, module in model.named_modules():
        if module in inside:
            continue  # counted with the layer that it stands in
        method = method_of_layer(module)
        dense = dense_part(module) or module
        added = set(method.roles(module)) if method else set()
        parameters = branch_parameters = 0
        for local, parameter in module.named_parameters(recurse=dense is not module):
            if id(parameter) in counted:
                continue
            counted.add(id(parameter))
            parameters += parameter.numel()
            branch_parameters += parameter.numel() if local in added else 0
        flops = own_flops(module, model) + (own_flops(dense, model) if dense is not module else 0)
        if method is not None and parameters and (plain := method.plain(module)) is not None:
            branch_parameters = parameters - plain.parameters
        if id(module) in attention:
            own = _attention_flops(module, getattr(model, "config", None), sequence_length)
            if own is None:
                notes.append(f"attention of {name} ({type(module).__name__}) is not counted: no head sizes found")
            else:
                flops += own
        known |= {id(each) for each in expert_tensors(module).values() if flops}  # DBRX's are in a child
        known |= {id(each) for local, each in module.named_parameters(recurse=False) if local in added}
        if not flops and not isinstance(module, nn.Embedding) and _has_matrix(module, known):
            notes.append(f"FLOPs of {name or 'the model'} ({type(module).__name__}) are not counted")
        if parameters or flops:
            kind, extra = "head" if name in heads else type(module).__name__, method.flops(module) if method else 0
            counts = {"parameters": parameters, "branch_parameters": branch_parameters, "flops": flops}
            rows.append(LayerCost(name=name, kind=kind, branch_flops=extra, **counts))
    active = active_parameters(model)
    return ModelCost(rows=rows, sequence_length=sequence_length, notes=notes, active_parameters=active)


def _has_matrix(module: nn.Module, known: Collection[int]) -> bool:
    """Return whether a module has parameters, other than those of `known` ids, that surely take part in products.

    A leading 1 marks a token, a position table or the like, which is added.
    """
    return any(
        parameter.ndim >= 2 and parameter.shape[0] > 1 and "position" not in name and "embed" not in name
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) not in known
    )


def _innermost_attention(model: nn.Module) -> Iterable[nn.Module]:
    """Yield the modules called ...Attention that hold no other such module: those that compute the scores."""
    for module in model.modules():
        named = [each for each in module.modules() if "Attention" in type(each).__name__]
        if named == [module] and any(True for _ in module.parameters()):
            yield module


def _attention_flops(module: nn.Module, config: Any, length: int) -> int | None:
    """Return the FLOPs per token of an attention's scores and sums; None where nothing says how wide its heads are."""
    heads, width = attention_heads(module, config)
    sources = (module, getattr(module, "config", None), config)
    # Latent attention has heads of one width for scores and of another for values.
    latent = [first_integer(sources, (name,)) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    widths = [2 * width if width else None] if None in latent else latent
    return 2 * length * heads * sum(widths) if heads and None not in widths else None  # type: ignore[arg-type]
