"""Tensor parallelism of NOBLE layers, as two more styles of transformers' plans.

P devices hold the parts of each dense weight that the model's own plan gives them; the branch follows:

| tensor                             | "colwise" layer (d_out split) | "rowwise" layer (d_in split) |
|------------------------------------|-------------------------------|------------------------------|
| noble_down (r, d_in)               | whole                         | by columns                   |
| noble_up (d_out, r)                | by rows                       | by columns (r split)         |
| last mix (r, r), frequency, phase  | whole                         | by rows (r split)            |
| other mixes, frequencies, phases   | whole                         | whole                        |
| noble_up_bias (d_out)              | split                         | whole                        |

In a colwise layer every device has all of x, so h needs no exchange; gradients of what it holds whole are sums over
the devices. In a rowwise layer each device's x down^T is a part of h only, and the cosine of a sum is not the sum of
cosines: h, r numbers a token, is summed over the devices before the bottleneck, whose last step each then does for its
own share of r. The output's sum, which the dense layer needs anyhow, adds the shares up.

The forms are those of one device in exact arithmetic; sums over devices round in another order.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble import NobleConfig, NobleConv1D, NobleLinear


def with_branches(model: nn.Module, plan: dict[str, str], devices: int) -> dict[str, str]:
    """Return a plan, {module or parameter: style}, in which layers with a branch, and their tensors, have our styles.

    Raises:
        UserError: a layer of the plan cannot be split over these devices; the message names it and why.
    """
    changed = dict(plan)
    for name, layer in model.named_modules():
        if name in plan and isinstance(layer, NobleLinear | NobleConv1D):
            if why := _why_not(layer, plan[name], devices):
                raise UserError(f"{name} cannot be split by tensor parallelism: {why}")
            style = f"nlr_noble_{plan[name]}"
            changed |= dict.fromkeys([name, *(f"{name}.{own}" for own, _ in layer.named_parameters())], style)
    return changed


def _why_not(layer: Any, style: str, devices: int) -> str:
    config: NobleConfig = layer.noble_config
    if f"nlr_noble_{style}" not in _OURS:
        return f"the model's plan has style {style!r}, which NOBLE does not support; use data parallelism"
    if not hasattr(layer, "in_features"):
        return "it is a Conv1D; use data parallelism"
    if config.fusion != "add" or config.dropout:
        return "fusion='gated' and dropout work on one device; use data parallelism"
    if layer.noble_shared is not None or layer.noble_group is not None:
        return "it shares its input's work with its neighbours (share_down, fuse_shared_inputs); augment without that"
    if layer.noble_rank < devices:
        return f"its rank {layer.noble_rank} is below the {devices} devices; raise the rank"
    return ""


class NobleParallel(TensorParallelLayer):
    """Both styles: x whole -> this device's columns of y, and, rowwise, this device's columns of x -> y whole."""

    def __init__(self, *, rowwise: bool) -> None:
        self.rowwise = rowwise

    def split(self, module: Any, name: str) -> int | None:
        """Return the dimension in which a tensor is split; None: it is replicated."""
        if not self.rowwise:
            return 0 if name in ("weight", "bias", "noble_up", "noble_up_bias") else None
        if name in ("weight", "noble_down", "noble_up"):
            return 1
        if name == "bias":  # added once, to the sum
            return None
        depth = module.noble_config.depth  # of the bottleneck's last step the rows are u's columns
        last = {f"noble_{each}{depth}" for each in ("frequency", "phase", "bias")} | {f"noble_mix{depth - 1}"}
        return 0 if name in last else None

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """Replace a parameter by its distributed form."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        if (whole := module._parameters.get(param)) is not None:
            dim = self.split(module, param)
            placement = Replicate() if dim is None else Shard(dim)
            local = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
            module._parameters[param] = nn.Parameter(local, requires_grad=whole.requires_grad)

    def install_forward(self, module: Any, mesh: Any) -> Any:
        """Replace the layer's forward."""
        plain, group, rank = module.forward, mesh.get_group(), mesh.get_local_rank()
        share = math.ceil(module.noble_rank / mesh.size())  # as distribute_tensor splits

        def whole_h(h: Tensor) -> Tensor:
            h = _SumGradient.apply(_Sum.apply(h, group), group)
            # Without a mix the last step is the first, and uses its own columns.
            return h if module.noble_config.depth > 1 else h[..., rank * share : (rank + 1) * share]

        def colwise(x: Tensor) -> Tensor:
            with _local(module, group, self):
                return plain(_SumGradient.apply(_plain(x), group))

        def rowwise(x: Tensor) -> Tensor:
            with _local(module, group, self) as biases:
                y = _Sum.apply(plain(_plain(x)), group)
            scale = module.noble_config.scale if module.branch_enabled else 1.0
            return y + scale * sum(biases[1:], biases[0]).to(y.dtype) if biases else y

        module.forward = rowwise if self.rowwise else colwise
        if self.rowwise:
            module.noble_reduce = whole_h
        return module


@contextlib.contextmanager
def _local(module: Any, group: Any, style: NobleParallel) -> Iterator[list[Tensor]]:
    """Put this device's parts in place of the layer's tensors; take out and yield the biases of a rowwise layer."""
    kept = [(each, dict(each._parameters)) for each in (module, module.dense)]
    biases: list[Tensor] = []
    try:
        for holder, parameters in kept:
            for name, parameter in parameters.items():
                if parameter is None:
                    continue
                local: Any = _plain(parameter)
                if style.rowwise and name in ("bias", "noble_up_bias"):
                    if name == "bias" or module.branch_enabled:
                        biases.append(local)
                    local = None
                elif style.split(module, name) is None:
                    local = _SumGradient.apply(local, group)
                holder._parameters[name] = local
        yield biases
    finally:
        for holder, parameters in kept:
            holder._parameters.update(parameters)


def _plain(tensor: Tensor) -> Tensor:
    """Return this device's part, a plain tensor: kernels read no others."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return wait_tensor(local) if isinstance(local, AsyncCollectiveTensor) else local


def _summed(tensor: Tensor, group: Any) -> Tensor:
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor, group=group)
    return tensor


class _SumGradient(torch.autograd.Function):
    """Identity whose gradients are summed over the devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _summed(dy, ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum over the devices; the gradient of the sum is every part's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


_OURS: dict[str, Any] = {
    "nlr_noble_colwise": NobleParallel(rowwise=False),
    "nlr_noble_rowwise": NobleParallel(rowwise=True),
}
for _name, _style in _OURS.items():
    ALL_PARALLEL_STYLES.register(_name, _style)
