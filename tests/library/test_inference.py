"""`nlr.optimize_for_inference`: the same outputs, fewer products, nothing lost."""

import copy
import sys

import pytest
import torch
from peft import get_peft_model
from torch import nn

import model_helpers
import nonlinear_lowrank as nlr
from nonlinear_lowrank import UserError
from nonlinear_lowrank.methods.noble.fused import FusedNoble, FusedNobleLinear

NOBLE = {
    "cosnet": nlr.NobleConfig(rank=4),
    "cosnet of depth 3": nlr.NobleConfig(rank=4, depth=3),
    "no mixing": nlr.NobleConfig(rank=4, depth=1),
    "silu": nlr.NobleConfig(rank=4, activation="silu"),
    "gated": nlr.NobleConfig(rank=4, fusion="gated", up_bias=True, output_scale=1.5),
    "up bias": nlr.NobleConfig(rank=4, up_bias=True),
    "shared down": nlr.NobleConfig(rank=4, share_down="qkv"),
}


def drawn(model):
    """Every tensor of a branch away from where it started."""
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "noble_" in name or "nlr_" in name:
                each.add_(0.3 * torch.randn_like(each))
    return model.eval()


def output(model, inputs):
    with torch.inference_mode():
        found = model(**inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("config", NOBLE.values(), ids=NOBLE)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_noble_gives_the_same_outputs(family, config, shared):
    if family == "gpt2" and config.share_down == "qkv":
        pytest.skip("its projection is fused already")
    model = getattr(model_helpers, family)()
    nlr.augment(model, config, verbose=False)
    drawn(model.double())
    inputs = model_helpers.batch(model)
    expected = output(model, inputs)
    before = sum(each.numel() for each in model.parameters())
    optimized = nlr.optimize_for_inference(model, fuse_shared_inputs=shared)
    assert optimized is model
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-4, atol=1e-6)  # norms are float32
    groups = [each for each in model.modules() if isinstance(each, FusedNoble)]
    members = [each for each in model.modules() if isinstance(each, FusedNobleLinear)]
    assert max(len(each.widths) for each in groups) == (3 if shared and family == "llama" else 1)
    assert sum(len(each.widths) for each in groups) == len(members)
    # every tensor is there once; layers without a bias got one, for the phases
    after = sum(each.numel() for each in (*model.parameters(), *model.buffers()))
    if config.share_down == "none":  # whose one matrix is scaled by three layers' frequencies
        assert after <= before + sum(each.out_features for each in members)
    assert not any(each.requires_grad for each in model.parameters())
    assert not model.training


def test_weights_of_a_member_are_its_own():
    model = model_helpers.llama()
    nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
    wanted = {
        name: each.weight.detach().clone() for name, each in model.named_modules() if isinstance(each, nlr.NobleLinear)
    }
    nlr.optimize_for_inference(model)
    for name, weight in wanted.items():
        member = model.get_submodule(name)
        assert torch.equal(member.weight, weight)
        assert (member.in_features, member.out_features) == (weight.shape[1], weight.shape[0])
        assert "place" in repr(member)


def test_members_that_are_given_other_tensors_compute_their_own():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x, z):
            return self.q_proj(x) + self.k_proj(z) + self.v_proj(z)

    model = Attention().double()
    nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
    drawn(model)
    x, z = torch.randn(2, 3, 5, 16, dtype=torch.float64).unbind()
    expected = model(x, z), model(z, x), model(x, x)
    nlr.optimize_for_inference(model)
    with torch.no_grad():
        for given, want in zip(((x, z), (z, x), (x, x)), expected, strict=True):
            torch.testing.assert_close(model(*given), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sine_weights_become_linears(dtype):
    model = model_helpers.llama()
    nlr.augment(model, nlr.SineLowRankConfig(rank=3), include=r".*mlp.*", verbose=False)
    model.to(dtype).eval()
    inputs = model_helpers.batch(model)
    expected = output(model, inputs)
    nlr.optimize_for_inference(model)
    assert not any(isinstance(each, nlr.SineLowRankLinear) for each in model.modules())
    assert {each.dtype for each in model.parameters()} == {dtype}
    slack = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 1e-2}
    torch.testing.assert_close(output(model, inputs), expected, **slack)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of transformers, for a name of peft
@pytest.mark.parametrize(
    "config",
    [
        nlr.SineLoraConfig(r=2, target_modules="all-linear", init_weights=False),
        nlr.SineLoraConfig(r=2, target_modules="all-linear", init_weights=False, use_dora=True),
        nlr.NoraConfig(groups=4, lora_r=2, init_weights=False),
        nlr.NobleAdapterConfig(r=2, target_modules="all-linear", init_weights=False),
    ],
    ids=["sine-lora", "sine-dora", "nora++", "noble-adapter"],
)
def test_adapters_are_merged_where_they_can_be(config, capsys):
    model = get_peft_model(model_helpers.llama().double(), copy.deepcopy(config)).eval()
    inputs = model_helpers.batch(model.get_base_model())
    expected = output(model, inputs)
    optimized = nlr.optimize_for_inference(model)
    stays = isinstance(config, nlr.NobleAdapterConfig)
    assert (optimized is model) == stays
    assert any("nlr_" in name for name, _ in optimized.named_parameters()) == stays
    torch.testing.assert_close(output(optimized, inputs), expected, rtol=1e-4, atol=1e-6)


def test_it_generates_compiles_copies_and_moves():
    model = model_helpers.llama()
    nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
    drawn(model)
    inputs = model_helpers.batch(model)
    ids = inputs["input_ids"][:1]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    wanted = output(model, inputs)
    nlr.optimize_for_inference(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    other = copy.deepcopy(model)
    torch.testing.assert_close(output(other.double().float(), inputs), wanted, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(output(compiled, inputs), wanted, rtol=1e-4, atol=1e-5)


def test_wrong_inputs_and_saving(tmp_path, monkeypatch):
    queried, model = model_helpers.llama(), model_helpers.llama()
    nlr.augment(queried, nlr.NonlinearQueryConfig(), verbose=False)
    nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
    monkeypatch.setitem(sys.modules, "torchao", None)
    for wrong, options, words in (
        ("model", {}, r"model must be a torch\.nn\.Module, got a str"),
        (model_helpers.llama(), {}, "nothing to optimize in this LlamaForCausalLM"),
        (queried, {}, "no layer that can be made faster, and no adapter"),
        (model, {"dense": "int4"}, "unknown dense 'int4'; choose one of keep, int8, fp8"),
        (model, {"dense": "int8"}, r"pip install 'nonlinear-lowrank\[quantized\]'"),
        (copy.deepcopy(model).to("meta"), {}, r"on meta; optimize the plain model"),
    ):
        with pytest.raises(UserError, match=words):
            nlr.optimize_for_inference(wrong, **options)
    nlr.optimize_for_inference(model)
    with pytest.raises(UserError, match="save it before"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
