"""`fuse_shared_inputs`: NOBLE layers that read one input, computed together, are what they are alone."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import model_helpers
import nonlinear_lowrank as nlr
from nonlinear_lowrank import UserError
from nonlinear_lowrank.analysis.saved import saved_bytes


def pair(config=None, dtype=torch.float64):
    """The same numbers with and without grouping."""
    config = config or nlr.NobleConfig(rank=4, up_scale=1.0)
    torch.manual_seed(0)
    alone = model_helpers.llama()
    nlr.augment(alone, config, verbose=False)
    torch.manual_seed(0)
    together = model_helpers.llama()
    report = nlr.augment(together, config, fuse_shared_inputs=True, verbose=False)
    assert "layers of one input together" in str(report)
    together.load_state_dict(alone.state_dict())
    return alone.to(dtype), together.to(dtype)


@pytest.mark.parametrize(
    "config",
    [
        nlr.NobleConfig(rank=4, up_scale=1.0),
        nlr.NobleConfig(rank=4, up_scale=1.0, share_down="qkv"),
        nlr.NobleConfig(rank=4, up_scale=1.0, up_bias=True, output_scale=1.5, activation="silu", depth=1),
    ],
    ids=["cosnet", "shared down", "silu"],
)
def test_losses_and_gradients_are_the_same(config):
    alone, together = pair(config)
    inputs = model_helpers.batch(alone)
    losses = [model(**inputs, labels=inputs["input_ids"]).loss for model in (alone, together)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-8)  # norms are float32
    wanted = dict(alone.named_parameters())
    for name, each in together.named_parameters():
        torch.testing.assert_close(each.grad, wanted[name].grad, rtol=1e-4, atol=1e-7, msg=name)
    groups = [each.noble_group for each in together.modules() if isinstance(each, nlr.NobleLinear)]
    sizes = sorted(len(group.layers) for group in groups if group is not None)
    layers = len(together.model.layers)
    assert sizes == sorted([3, 3, 3, 2, 2] * layers)
    assert "computed with its neighbours" in repr(together)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_it_trains_checkpoints_copies_and_compiles():
    alone, together = pair(dtype=torch.float32)
    inputs = model_helpers.batch(alone)
    other = copy.deepcopy(together)
    other.gradient_checkpointing_enable({"use_reentrant": False})
    other.train()
    found = []
    for model in (together, other):
        optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-3, verbose=False))
        for _ in range(3):
            loss = model(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    with nlr.branches_disabled(together):
        assert torch.isfinite(together(**inputs).logits).all()
    torch.compiler.reset()
    compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).logits, together(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_saved_models_stay_grouped(tmp_path):
    _, model = pair(dtype=torch.float32)
    inputs = model_helpers.batch(model)
    model.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.model.layers[0].self_attn.q_proj.noble_group is not None
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
        ids = inputs["input_ids"][:1]
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(again.generate(ids, max_new_tokens=4, do_sample=False), expected)
    nlr.optimize_for_inference(again)
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_other_inputs_and_orders():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x, z):
            return self.k_proj(z) * self.q_proj(x) + self.v_proj(z)

    torch.manual_seed(1)
    alone = Attention().double()
    together = copy.deepcopy(alone)
    for model, fused in ((alone, False), (together, True)):
        nlr.augment(model, nlr.NobleConfig(rank=4, up_scale=1.0), fuse_shared_inputs=fused, verbose=False)
    together.load_state_dict(alone.state_dict())
    x, z = torch.randn(2, 3, 16, dtype=torch.float64).unbind()
    for given in ((x, x), (x, z), (z, x), (z, z)):
        torch.testing.assert_close(together(*given), alone(*given))
    with torch.no_grad():  # in place, between two calls
        x.add_(1)
    torch.testing.assert_close(together(x, x), alone(x, x))


def test_keeps_no_more_than_alone():
    alone, together = pair(dtype=torch.float32)
    inputs = model_helpers.batch(alone)
    kept = [saved_bytes(model, **inputs, labels=inputs["input_ids"]) for model in (alone, together)]
    assert kept[1] <= kept[0]


def test_wrong_inputs():
    with pytest.raises(UserError, match="needs fusion='add' and dropout=0"):
        nlr.NobleConfig(rank=4, fusion="gated", fuse_shared_inputs=True)
    with pytest.raises(UserError, match="has no layers to compute together"):
        nlr.augment(model_helpers.llama(), nlr.NonlinearQueryConfig(), fuse_shared_inputs=True)
    with pytest.raises(UserError, match="needs separate query, key and value"):
        nlr.augment(model_helpers.gpt2(), nlr.NobleConfig(rank=4), fuse_shared_inputs=True)
