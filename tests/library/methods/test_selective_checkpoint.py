"""Selective activation checkpointing, which keeps the outputs of products, around layers whose forward is lean."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import nonlinear_lowrank as nlr

KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default}


def policy(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Attention(nn.Module):
    """Query, key and value of one input."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, width) for width in (16, 8, 8))
        self.down = nn.Linear(16, 12)

    def forward(self, x):
        mixed = self.q_proj(x) * torch.cat([self.k_proj(x), self.v_proj(x)], dim=-1)
        return self.down(mixed)


CONFIGS = {
    "noble": nlr.NobleConfig(rank=4),
    "noble-gated": nlr.NobleConfig(rank=4, fusion="gated", up_bias=True),
    "noble-together": nlr.NobleConfig(rank=4, fuse_shared_inputs=True),
    "sine": nlr.SineLowRankConfig(rank=2),
    "relu": nlr.SineLowRankConfig(rank=2, activation="relu"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_outputs_and_gradients_are_those_without_checkpointing(config):
    model = Attention().double()
    nlr.augment(model, config, verbose=False)
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    outcomes = []
    for contexts in (None, partial(create_selective_checkpoint_contexts, policy)):
        if contexts is None:
            y = model(x)
        else:
            y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        inputs = [x, *model.parameters()]
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for plain, checkpointed in zip(*outcomes, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-12, atol=1e-12)
