"""`nlr.optimize_for_inference`: the same outputs, fewer products, nothing lost."""

import copy
import sys

import pytest
import torch
from peft import get_peft_model
from torch import nn

import model_helpers
import nonlinear_lowrank as nlr
from family_checks import quantized
from nonlinear_lowrank.methods.noble.fused import FusedNoble, FusedNobleLinear
from nonlinear_lowrank.ops.kernels import use_kernels
from refusals import assert_refused

SETTINGS = {
    "cosnet": {},
    "cosnet of depth 3": {"depth": 3},
    "no mixing": {"depth": 1},
    "silu": {"activation": "silu"},
    "gated": {"fusion": "gated", "up_bias": True, "output_scale": 1.5},
    "up bias": {"up_bias": True},
    "bottleneck bias": {"bottleneck_bias": True},
    "shared down": {"share_down": "qkv"},
}


def with_branches(model, **settings):
    """The model with NOBLE branches, no tensor of which is where it started."""
    nlr.augment(model, nlr.NobleConfig(rank=4, **settings), verbose=False)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "noble_" in name:
                each.add_(0.3 * torch.randn_like(each))
    return model.eval()


@torch.inference_mode()
def output(model, inputs):
    return model(**inputs).logits


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_noble_gives_the_same_outputs(family, settings, shared):
    if family == "gpt2" and "share_down" in settings:
        pytest.skip("its projection is fused already")
    model = with_branches(getattr(model_helpers, family)().double(), **settings)
    inputs = model_helpers.batch(model)
    expected = output(model, inputs)
    before = model_helpers.parameters(model)
    optimized = nlr.optimize_for_inference(model, fuse_shared_inputs=shared)
    assert optimized is model
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-4, atol=1e-6)  # norms are float32
    groups = [each for each in model.modules() if isinstance(each, FusedNoble)]
    members = [each for each in model.modules() if isinstance(each, FusedNobleLinear)]
    assert max(len(each.widths) for each in groups) == (3 if shared and family == "llama" else 1)
    assert sum(len(each.widths) for each in groups) == len(members)
    # every tensor is there once; layers without a bias got one, for the phases
    after = sum(each.numel() for each in (*model.parameters(), *model.buffers()))
    if "share_down" not in settings:  # whose one matrix is scaled by three layers' frequencies
        assert after <= before + sum(each.out_features for each in members)
    assert not any(each.requires_grad for each in model.parameters())
    assert not model.training


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_noble_gives_the_same_outputs_in_float32_and_under_autocast(settings):
    model = with_branches(model_helpers.llama(), **settings)
    inputs = model_helpers.batch(model)
    expected = output(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = output(model, inputs)
    nlr.optimize_for_inference(model)
    with use_kernels(False):
        plain = output(model, inputs)
    found = output(model, inputs)
    for each in (plain, found):
        assert (each - expected).norm() <= 1e-5 * expected.norm()
    assert torch.equal(plain, found) == (settings.get("activation", "cosine") != "cosine" or "fusion" in settings)
    with torch.autocast("cpu", torch.bfloat16):
        found = output(model, inputs)
    assert found.dtype == rounded.dtype
    assert (found - rounded).norm() <= 0.03 * rounded.norm()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_inputs_have_the_gradients_that_they_had(settings, kernels):
    model = nn.ModuleDict({each: nn.Linear(16, 8) for each in ("q_proj", "k_proj", "v_proj")})
    with_branches(model, **settings)

    def loss(x):
        return sum(layer(x).sin().sum() for layer in model.values())

    x = torch.randn(3, 16)
    expected = torch.func.grad(loss)(x)
    nlr.optimize_for_inference(model)
    leaf = x.clone().requires_grad_()
    with use_kernels(kernels):
        loss(leaf).backward()
        found = [leaf.grad, torch.func.grad(loss)(x), torch.func.vmap(torch.func.grad(loss))(x)]
        found.append(torch.func.jacrev(loss)(x))
    for gradient in found:
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_weights_of_a_member_are_its_own():
    model = with_branches(model_helpers.llama())
    wanted = {name: each.weight.clone() for name, each in model.named_modules() if isinstance(each, nlr.NobleLinear)}
    nlr.optimize_for_inference(model)
    for name, weight in wanted.items():
        member = model.get_submodule(name)
        assert torch.equal(member.weight, weight)
        assert (member.out_features, member.in_features) == weight.shape
        assert "place" in repr(member)


def test_members_that_are_given_other_tensors_compute_their_own():
    model = with_branches(model_helpers.Attention(16).double())
    x, z = torch.randn(2, 3, 5, 16, dtype=torch.float64).unbind()
    expected = model(x, z), model(z, x), model(x, x)
    nlr.optimize_for_inference(model)
    with torch.no_grad():
        for given, want in zip(((x, z), (z, x), (x, x)), expected, strict=True):
            torch.testing.assert_close(model(*given), want)


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, {}), (torch.bfloat16, {"rtol": 0.02, "atol": 1e-2})])
def test_sine_weights_become_linears(dtype, slack):
    model = model_helpers.llama()
    nlr.augment(model, nlr.SineLowRankConfig(rank=3), include=r".*mlp.*", verbose=False)
    model.to(dtype).eval()
    inputs = model_helpers.batch(model)
    expected = output(model, inputs)
    nlr.optimize_for_inference(model)
    assert not any(isinstance(each, nlr.SineLowRankLinear) for each in model.modules())
    assert {each.dtype for each in model.parameters()} == {dtype}
    torch.testing.assert_close(output(model, inputs), expected, **slack)


@pytest.mark.parametrize(
    "config",
    [
        nlr.SineLoraConfig(r=2, target_modules="all-linear", init_lora_weights=False),
        nlr.SineLoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, use_dora=True),
        nlr.NoraConfig(groups=4, lora_r=2, init_weights=False),
        nlr.NobleAdapterConfig(r=2, target_modules="all-linear", init_weights=False),
    ],
    ids=["sine-lora", "sine-dora", "nora++", "noble-adapter"],
)
def test_adapters_are_merged_where_they_can_be(config):
    model = get_peft_model(model_helpers.llama().double(), copy.deepcopy(config)).eval()
    inputs = model_helpers.batch(model.get_base_model())
    expected = output(model, inputs)
    optimized = nlr.optimize_for_inference(model)
    stays = isinstance(config, nlr.NobleAdapterConfig)
    assert (optimized is model) == stays
    assert any("nlr_" in name for name, _ in optimized.named_parameters()) == stays
    torch.testing.assert_close(output(optimized, inputs), expected, rtol=1e-4, atol=1e-6)


def _add_noise(module, args, y):
    return y + 1


def _adapter(model):
    config = nlr.NobleAdapterConfig(r=2, target_modules=["q_proj.dense"], init_weights=False)
    return get_peft_model(model, config).eval()


def _hook(name):
    def put(model):
        model.get_submodule(name).register_forward_hook(_add_noise)
        return model

    return put


def _switched_off(model):
    model.model.layers[0].self_attn.v_proj.branch_enabled = False
    return model


@pytest.mark.parametrize("share_down", ["none", "qkv"])
@pytest.mark.parametrize(
    "change",
    [
        _adapter,
        _hook("model.layers.0.self_attn.q_proj"),
        _hook("model.layers.0.self_attn.q_proj.dense"),
        _switched_off,
    ],
    ids=["adapter", "hook", "hook inside", "switched off"],
)
def test_layers_with_something_on_them_stay(change, share_down):
    model = change(with_branches(model_helpers.llama().double(), share_down=share_down))
    inputs = model_helpers.batch(getattr(model, "base_model", model))
    expected = output(model, inputs)
    nlr.optimize_for_inference(model)
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-4, atol=1e-6)
    assert any(isinstance(each, FusedNobleLinear) for each in model.modules())


def test_sine_weights_with_hooks_stay():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nlr.augment(model, nlr.SineLowRankConfig(rank=2), include=".*", verbose=False)
    model[0].register_forward_hook(_add_noise)
    x = torch.randn(3, 8)
    expected = model(x)
    nlr.optimize_for_inference(model)
    assert type(model[1]) is nn.Linear
    torch.testing.assert_close(model(x), expected)


def test_it_generates_compiles_copies_and_moves():
    model = with_branches(model_helpers.llama())
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
    queried, model = model_helpers.llama(), with_branches(model_helpers.llama())
    nlr.augment(queried, nlr.NonlinearQueryConfig(), verbose=False)
    monkeypatch.setitem(sys.modules, "torchao", None)
    for wrong, options, words in (
        ("model", {}, r"model must be a torch\.nn\.Module, got a str"),
        (model_helpers.llama(), {}, "nothing to optimize in this LlamaForCausalLM"),
        (queried, {}, "no layer that can be made faster, and no adapter"),
        (model, {"dense": "int4"}, "unknown dense 'int4'; choose one of keep, int8, fp8"),
        (model, {"dense": "int8"}, r"pip install '.*\[quantized\]'"),
        (copy.deepcopy(model).to("meta"), {}, r"on meta; optimize the plain model"),
    ):
        assert_refused(words, nlr.optimize_for_inference, wrong, **options)
    nlr.optimize_for_inference(model)
    assert_refused("save it before", model.save_pretrained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@quantized
@pytest.mark.parametrize(("dense", "error"), [("int8", 0.03), ("fp8", 0.1)])
def test_dense_weights_are_8_bits_and_branches_are_not(dense, error):
    pytest.importorskip("torchao.quantization")
    model = model_helpers.llama().to(torch.bfloat16)
    nlr.augment(model, nlr.NobleConfig(rank=4, up_scale=1.0), verbose=False)
    model.eval()
    inputs = model_helpers.batch(model)
    with torch.inference_mode():
        expected = model(**inputs).logits
        generated = model.generate(inputs["input_ids"][:1], max_new_tokens=4, do_sample=False)
    nlr.optimize_for_inference(model, dense=dense)
    layers = [each for each in model.modules() if isinstance(each, nlr.NobleLinear)]
    assert layers
    for each in layers:
        assert type(each.weight.data) is not torch.Tensor
        assert type(each.noble_down.data) is type(each.noble_up.data) is torch.Tensor
        assert each.noble_up.dtype == torch.bfloat16
    assert type(model.lm_head.weight.data) is torch.Tensor
    with torch.inference_mode():
        found = model(**inputs).logits
        assert model.generate(inputs["input_ids"][:1], max_new_tokens=4, do_sample=False).shape == generated.shape
    assert 0 < (found - expected).abs().max() <= error * expected.abs().max()
    assert_refused("cannot be saved", model.save_pretrained, "out")


@quantized
def test_an_optimized_or_quantized_model_is_not_optimized_again():
    pytest.importorskip("torchao.quantization")
    model = with_branches(model_helpers.llama())
    nlr.optimize_for_inference(model, dense="int8")
    assert_refused("optimize the plain model first", nlr.optimize_for_inference, model)
    assert isinstance(model.lm_head, nn.Linear)
