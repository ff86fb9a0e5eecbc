"""One training step of an arm: forward, loss, backward, AdamW and zero_grad, on one batch again and again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from nonlinear_lowrank.ops.kernels import use_kernels
from nonlinear_lowrank.optim import param_groups

from .methods import BenchArm
from .model import make_model
from .settings import Mode, TrainBenchConfig
from .timing import in_mode


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """One arm, ready to take steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], torch.Tensor]
    """The forward pass on one batch."""
    eager_loss: Callable[[], torch.Tensor]
    """The same without torch.compile."""

    def step(self) -> torch.Tensor:
        """Train on one batch and return the loss, a tensor: reading it would wait for the device."""
        found = self.loss()
        found.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found.detach()

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    def flops(self) -> int:
        """Return the FLOPs of the matrix products of one forward and backward pass, counted as they are called.

        A product that a method computes again for backward counts again. Takes the time of an eager pass.
        """
        with FlopCounterMode(display=False, custom_mapping=_UNKNOWN_TO_TORCH) as counter, use_kernels(False):
            self.eager_loss().backward()
        self.optimizer.zero_grad()
        return counter.get_total_flops()


# Of operators that torch's counter does not know, by the shapes of their arguments. Attention counts whole, as there.
_UNKNOWN_TO_TORCH = {
    torch.ops.aten.addmm_: lambda total, left, right, **_: 2 * left[0] * left[1] * right[1],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(dy, q, k, v)
    ),
}


def make_stepper(
    config: TrainBenchConfig,
    mode: Mode,
    arm: BenchArm,
    *,
    batch: Callable[[], torch.Tensor] | None = None,
    lr: float = 1e-6,
) -> Stepper:
    """Return an arm's stepper; batches and seed are the same in all arms.

    Args:
        config: sizes, device and type.
        mode: as in the settings.
        arm: one of `bench_arms`.
        batch: gives the token ids (batch_size, sequence_length) of each step; None: the same random ids.
        lr: of AdamW. On one batch again and again, a learning rate that trains would end in subnormal numbers, whose
            arithmetic is slow.
    """
    model = make_model(config, arm, config.sequence_length, frozen_dtype=getattr(torch, config.frozen_dtype)).train()
    groups = param_groups(model, lr, weight_decay=0.01, verbose=False)
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch_size, config.sequence_length)
    ids = torch.randint(0, config.vocab_size, shape, generator=generator).to(config.device)
    kind = torch.device(config.device).type

    def loss(run: Callable[..., Any]) -> torch.Tensor:
        tokens = ids if batch is None else batch()
        if mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(kind, torch.bfloat16, enabled=config.bf16):
            return run(input_ids=tokens, labels=tokens).loss

    forward = in_mode(model, mode)
    return Stepper(
        model=model,
        optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True),
        loss=lambda: loss(forward),
        eager_loss=lambda: loss(model),
    )
