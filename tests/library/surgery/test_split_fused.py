"""`augment(..., split_fused=True)`: a branch for each part of a fused projection."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, BitsAndBytesConfig, TorchAoConfig
from transformers.distributed import DistributedConfig

import nonlinear_lowrank as nlr
from family_checks import branch_tensors, branches, enlarge_branches, outputs, quantized, realigned, same, train_a_step
from family_helpers import FAMILIES
from nonlinear_lowrank.analysis import layer_importance
from nonlinear_lowrank.hub import convert
from nonlinear_lowrank.methods.base import method_of_layer
from nonlinear_lowrank.surgery.split import SplitLinear
from refusals import assert_refused

RANK = 4
PROJECTIONS = {
    "phi3": {"qkv_proj": ((32, 16, 16), 1), "gate_up_proj": ((48, 48), 1)},
    "glm": {"gate_up_proj": ((48, 48), 1)},
    "gpt2": {"c_attn": ((32, 32, 32), 1)},
    "openai-gpt": {"c_attn": ((32, 32, 32), 1)},
    "gpt_bigcode": {"c_attn": ((32, 16, 16), 1)},
    "gpt_neox": {"query_key_value": ((32, 32, 32), 2)},
    "persimmon": {"query_key_value": ((32, 32, 32), 2)},
    "bloom": {"query_key_value": ((32, 32, 32), 2)},
    "falcon-7b": {"query_key_value": ((32, 16, 16), 1)},
    "falcon-40b": {"query_key_value": ((32, 16, 16), 1)},
    "codegen": {"qkv_proj": ((32, 32, 32), 4)},
    "mpt": {"Wqkv": ((32, 32, 32), 1)},
    "minimax": {"qkv_proj": ((32, 32, 32), 2)},
    "granitemoehybrid": {"input_linear": ((48, 48), 1)},
    "zamba2": {"gate_up_proj": ((48, 48), 1)},
    "modernbert": {"Wqkv": ((32, 32, 32), 1), "Wi": ((48, 48), 1)},
}
"""Widths of the parts of each family's fused projections, and in how many groups they take turns."""
ONE_LAYER = {"phi3": "num_hidden_layers", "gpt2": "n_layer", "gpt_bigcode": "n_layer", "gpt_neox": "num_hidden_layers"}
ONE_LAYER |= {"persimmon": "num_hidden_layers", "bloom": "n_layer", "falcon-7b": "num_hidden_layers"}
ONE_LAYER |= {"falcon-40b": "num_hidden_layers", "codegen": "n_layer", "mpt": "n_layers", "openai-gpt": "n_layer"}
families = pytest.mark.parametrize("family", PROJECTIONS)


def _split(family, *, init="pretrained", **options):
    """The plain model, one with branches beside parts, large where there is an init, and the report."""
    plain = FAMILIES[family].build()
    model = copy.deepcopy(plain)
    report = nlr.augment(model, nlr.NobleConfig(rank=RANK, init=init), split_fused=True, verbose=False, **options)
    return plain, model, report


def _splits(model):
    return {name: each for name, each in model.named_modules() if isinstance(each, SplitLinear)}


@families
def test_each_part_has_a_branch_and_outputs_stay(family):
    plain, model, report = _split(family)
    found = {name.rpartition(".")[2]: (each.parts.widths, each.parts.groups) for name, each in _splits(model).items()}
    assert found == PROJECTIONS[family]
    assert report.details == {}
    parts = [f"{name}.{part}" for name, each in _splits(model).items() for part in each.parts.names]
    assert parts
    assert set(parts) <= set(report.swapped)
    assert "split" not in str(report)
    torch.testing.assert_close(outputs(model, inputs := FAMILIES[family].inputs(model)), outputs(plain, inputs))


@families
def test_parameters_and_flops_are_the_closed_form(family):
    plain, model, report = _split(family, include=rf".*\.({'|'.join(PROJECTIONS[family])})\..*")
    shapes = [each.noble_shape for each in branches(model).values()]
    assert len(shapes) == sum(len(each.parts.names) for each in _splits(model).values())
    products = sum(RANK * (d_in + d_out) + RANK**2 for d_in, d_out in shapes)
    assert report.parameters_added == products + 4 * RANK * len(shapes)
    assert report.flops_added == 2 * products
    assert report.parameters_before == sum(each.numel() for each in plain.parameters())
    for layer in branches(model).values():  # the paper's, by the part's own width
        lr = method_of_layer(layer).roles(layer)["noble_up"].lr
        assert lr == pytest.approx((min(layer.noble_shape) / RANK) ** 0.6)


@families
def test_every_part_trains(family):
    _, model, _ = _split(family, init="scratch")
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-3))
    train_a_step(enlarge_branches(model), optimizer, FAMILIES[family].inputs(model))


@families
def test_saved_and_loaded(family, tmp_path):
    _, model, _ = _split(family, init="scratch")
    enlarge_branches(model).save_pretrained(tmp_path)
    loaded = FAMILIES[family].auto_class.from_pretrained(tmp_path)
    assert {name: each.parts for name, each in _splits(loaded).items()} == {
        name: each.parts for name, each in _splits(model).items()
    }
    inputs = FAMILIES[family].inputs(model)
    assert same(outputs(realigned(loaded), inputs), outputs(realigned(model), inputs))


# transformers draws no weights in openai-gpt anew, and those of a FalconLinear unlike an nn.Linear's.
@pytest.mark.parametrize("family", [each for each in PROJECTIONS if not each.startswith(("falcon", "openai"))])
def test_drawn_anew_are_plain_parts_as_the_plain_model_draws_them(family):
    plain, model, _ = _split(family, exclude=r".*\.(k_proj|up_proj)")
    found = []
    for each in (plain, model):
        torch.manual_seed(3)
        found.append(type(each).from_pretrained(None, config=each.config, state_dict={}))
    expected, fresh = found[0].state_dict(), found[1]
    assert all(each.isfinite().all() for each in fresh.parameters())
    for name, each in _splits(fresh).items():
        for part, rows in zip(each.parts.names, each.rows("weight", expected[f"{name}.weight"]), strict=True):
            assert torch.equal(each.get_submodule(part).weight, rows), part


@families
def test_a_plain_checkpoint_loads(family):
    plain, model, _ = _split(family)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    missing, extra = model.load_state_dict(plain.state_dict(), strict=False)
    assert extra == []
    assert all(".noble_" in name for name in missing)
    torch.testing.assert_close(outputs(model, inputs := FAMILIES[family].inputs(model)), outputs(plain, inputs))


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("fused", ["phi3", "glm"])
def test_results_are_those_of_separate_linears(fused, together):
    """Phi-3 is Llama with fused projections, and so is GLM but for its rotary embedding."""
    _, model, _ = _split(fused, fuse_shared_inputs=together)
    model = enlarge_branches(model).double()
    if fused == "glm":
        mlp = next(each for name, each in model.named_modules() if name.endswith("mlp"))
        gate_up, x = mlp.gate_up_proj, torch.randn(3, 32, dtype=torch.float64)
        expected = mlp.down_proj(gate_up.up_proj(x) * mlp.activation_fn(gate_up.gate_proj(x)))
        torch.testing.assert_close(mlp(x), expected, rtol=0, atol=1e-12)
        return
    separate = FAMILIES["llama"].build(rms_norm_eps=model.config.rms_norm_eps)
    nlr.augment(separate, nlr.NobleConfig(rank=RANK), verbose=False)
    separate.double()
    tensors = model.state_dict()
    renamed = {re.sub(r"(qkv|gate_up)_proj\.", "", name): each for name, each in tensors.items()}
    # Both classes keep the dense part's tensors under names of their own in memory.
    separate.load_state_dict(renamed)
    inputs = FAMILIES["llama"].inputs(model)
    torch.testing.assert_close(outputs(model, inputs), outputs(separate, inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ONE_LAYER)
def test_parts_are_what_their_names_say(family):
    """A query acts on its own position, keys and values on later ones too, and values alone linearly."""
    model = FAMILIES[family].build(**{ONE_LAYER[family]: 1})
    nlr.augment(model, nlr.NobleConfig(rank=RANK), split_fused=True, verbose=False)
    model.double()
    split = next(each for each in _splits(model).values() if "q_proj" in each.parts.names)
    inputs = {"input_ids": FAMILIES[family].inputs(model)["input_ids"]}
    before = outputs(model, inputs)[0]

    def changed(name, change):
        """Positions at which the output is another when a part's output is."""
        handle = split.get_submodule(name).register_forward_hook(lambda module, args, output: change(output.clone()))
        after = outputs(model, inputs)[0]
        handle.remove()
        return (after - before).abs().amax((0, 2)) > 1e-9

    def at_five(output):
        output[:, 5] += torch.linspace(-2, 2, output.shape[-1], dtype=output.dtype)
        return output

    places = torch.arange(before.shape[1])
    assert torch.equal(changed("q_proj", at_five), places == 5)
    assert torch.equal(changed("k_proj", at_five), places >= 5)
    assert torch.equal(changed("v_proj", at_five), places >= 5)
    # The first position sees itself alone: only its value counts.
    assert not changed("k_proj", lambda y: 3 * y)[0]
    assert changed("v_proj", lambda y: 3 * y)[0]


class Attention(nn.Module):
    """Queries of 2 heads of 16, and as many keys and values as `rows` leaves."""

    def __init__(self, rows=64, name="qkv_proj"):
        super().__init__()
        self.num_heads, self.head_dim, self.num_key_value_heads = 2, 16, 1
        setattr(self, name, nn.Linear(32, rows))
        self.out = nn.Linear(32, 32)
        self.name = name

    def forward(self, x):
        return self.out(getattr(self, self.name)(x)[..., :32])


class Gated(nn.Module):
    """Gate and up in turns, which no code cuts into halves."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(32, 96), nn.Linear(48, 32)

    def forward(self, x):
        gate_up = self.gate_up_proj(x)
        return self.down_proj(gate_up[..., ::2] * gate_up[..., 1::2])


class Cross(Attention):
    is_cross_attention = True


UNTOLD = {
    "wider": (Attention(96), "qkv_proj", "its 32 -> 96 are not the 32 queries and twice 16 keys and values"),
    "by head": (Attention(name="query_key_value"), "query_key_value", "does not say how its rows of q, k and v take"),
    "cross": (Cross(), "qkv_proj", "Cross does not say how its rows of q, k and v take turns"),
    "in turns": (Gated(), "gate_up_proj", "Gated does not say that its 32 -> 96 are gate and up, a half each"),
}


@pytest.mark.parametrize(("untold", "name", "why"), UNTOLD.values(), ids=UNTOLD)
def test_a_projection_of_untold_parts_stays_whole_and_is_reported(untold, name, why):
    model = nn.ModuleDict({"told": Attention(), "untold": copy.deepcopy(untold)})
    report = nlr.augment(model, nlr.NobleConfig(rank=RANK), split_fused=True, verbose=False)
    assert list(_splits(model)) == ["told.qkv_proj"]
    assert f"untold.{name}" in report.swapped
    assert report.details.keys() == {f"untold.{name}"}
    assert f"swapped untold.{name}: stays whole: " in str(report)
    assert why in str(report)


def test_a_projection_without_a_swapped_part_is_whole_again():
    model = nn.ModuleDict({"one": Attention(), "two": Attention()})
    before = model["two"].qkv_proj
    nlr.augment(model, nlr.NobleConfig(rank=RANK), split_fused=True, exclude=r"two\..*", verbose=False)
    assert list(_splits(model)) == ["one.qkv_proj"]
    assert model["two"].qkv_proj is before


def test_tensors_have_storages_of_their_own():
    """Views would keep the fused storage alive, and be saved with all of it."""
    _, model, _ = _split("gpt2")
    _, by_head, _ = _split("gpt_neox", exclude=".*k_proj")
    for each in (*model.parameters(), *by_head.parameters()):
        assert each.is_contiguous()
        assert each.untyped_storage().nbytes() == each.nbytes


REFUSED = {
    "none": ("llama", RANK, {}, "needs a fused projection.* there is none; omit it"),
    "not chosen": ("glm", RANK, {"include": ".*down_proj"}, "needs a fused projection.* there is none; omit it"),
    "rank": ("phi3", 16, {"include": ".*qkv_proj.*"}, r"qkv_proj\.k_proj: rank 16 is too high"),
    "fused name": ("phi3", RANK, {"include": ".*qkv_proj"}, "matches no linear's whole name"),
}


@pytest.mark.parametrize(("family", "rank", "options", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_and_the_model_is_as_it_was(family, rank, options, words):
    model = FAMILIES[family].build()
    before = list(model.named_modules())
    assert_refused(words, nlr.augment, model, nlr.NobleConfig(rank=rank), split_fused=True, verbose=False, **options)
    assert list(model.named_modules()) == before


def test_refused_for_activations_hooks_and_tensor_parallelism():
    model = FAMILIES["gpt2"].build()
    words = "replaces activations, and split_fused= is for linears"
    assert_refused(words, nlr.augment, model, nlr.RationalConfig(groups=4), split_fused=True)
    handle = model.transformer.h[1].attn.c_attn.register_forward_hook(lambda *_: None)
    words = r"h\.1\.attn\.c_attn has hooks"
    assert_refused(words, nlr.augment, model, nlr.NobleConfig(rank=RANK), split_fused=True)
    handle.remove()
    nlr.augment(model, nlr.NobleConfig(rank=RANK), split_fused=True, verbose=False)
    words = "layers of split projections cannot be split by tensor parallelism"
    assert_refused(words, type(model).maybe_distribute_model, model, DistributedConfig(tp_size=2), None)


def _quantizers():
    pytest.importorskip("bitsandbytes")
    torchao = pytest.importorskip("torchao.quantization")
    return {
        "8 bit": BitsAndBytesConfig(load_in_8bit=True),
        "4 bit": BitsAndBytesConfig(load_in_4bit=True),
        "torchao": TorchAoConfig(torchao.Int8WeightOnlyConfig()),
    }


QUANTIZED = [("phi3", "8 bit"), ("gpt2", "8 bit"), ("gpt_neox", "8 bit"), ("phi3", "torchao"), ("gpt_neox", "torchao")]


@quantized
@pytest.mark.parametrize(("family", "kind"), QUANTIZED)
def test_parts_are_quantized_as_they_are_loaded(family, kind, tmp_path):
    """Without branches they give what the fused projection in 8 bits gives: each row has a scale of its own."""
    plain, model, _ = _split(family)
    plain.save_pretrained(tmp_path / "plain")
    enlarge_branches(model).save_pretrained(tmp_path / "split")
    config = _quantizers()[kind]
    whole = type(plain).from_pretrained(tmp_path / "plain", quantization_config=config).eval()
    loaded = type(model).from_pretrained(tmp_path / "split", quantization_config=config).eval()
    assert same(branch_tensors(loaded).values(), branch_tensors(model).values())
    weights = [part.dense.weight.data for split in _splits(loaded).values() for part in split.children()]
    assert len(weights) == sum(len(each.parts.names) for each in _splits(model).values())
    assert not [each for each in weights if type(each) is torch.Tensor and each.is_floating_point()]
    inputs = FAMILIES[family].inputs(model)
    with nlr.branches_disabled(loaded):
        torch.testing.assert_close(outputs(loaded, inputs)[0], outputs(whole, inputs)[0], rtol=0, atol=1e-5)
    found, expected = outputs(loaded, inputs)[0], outputs(model, inputs)[0]
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
    optimizer = torch.optim.AdamW(nlr.param_groups(loaded, lr=1e-3, verbose=False))
    loaded(**inputs).logits.square().mean().backward()
    assert all(each.grad.count_nonzero() for each in branch_tensors(loaded).values())
    optimizer.step()
    assert not [name for name, each in branch_tensors(loaded).items() if each.equal(branch_tensors(model)[name])]


@quantized
@pytest.mark.parametrize("kind", ["8 bit", "4 bit", "torchao"])
def test_a_quantized_projection_is_refused_and_the_model_is_as_it_was(kind, tmp_path):
    FAMILIES["phi3"].build().save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, quantization_config=_quantizers()[kind])
    before = list(model.named_modules())
    words = r"layers\.0\.self_attn\.qkv_proj is quantized .* split_fused cannot split it; augment the unquantized model"
    assert_refused(words, nlr.augment, model, nlr.NobleConfig(rank=RANK), split_fused=True, verbose=False)
    assert list(model.named_modules()) == before


@pytest.mark.parametrize("family", ["phi3", "gpt2", "gpt_neox", "falcon-40b"])
@pytest.mark.parametrize("config", [nlr.SineLowRankConfig(rank=4, omega=100.0), nlr.NonlinearQueryConfig()])
def test_other_methods_take_parts(family, config, tmp_path):
    model = FAMILIES[family].build()
    report = nlr.augment(model, config, split_fused=True, verbose=False)
    parts = {name.rpartition(".")[2] for name in report.swapped if "q_proj" in name or "v_proj" in name}
    assert parts >= {"q_proj"}
    assert ("v_proj" in parts) == isinstance(config, nlr.SineLowRankConfig)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    inputs = FAMILIES[family].inputs(model)
    assert same(outputs(realigned(loaded), inputs), outputs(realigned(model), inputs))


@pytest.mark.parametrize("shared", [{"fuse_shared_inputs": True}, {"share_down": "qkv"}, {}])
@pytest.mark.parametrize("family", ["phi3", "gpt2", "gpt_neox", "falcon-40b"])
def test_optimized_for_inference(family, shared):
    model = FAMILIES[family].build()
    nlr.augment(model, nlr.NobleConfig(rank=RANK, **shared), split_fused=True, verbose=False)
    model = enlarge_branches(model).double()
    grouped = [each for each in branches(model).values() if each.noble_group or each.noble_shared]
    assert bool(grouped) == bool(shared)
    inputs = FAMILIES[family].inputs(model)
    expected = outputs(model, inputs)
    found = outputs(nlr.optimize_for_inference(model), inputs)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)  # norms compute in float32


def test_another_head_and_the_backbone_load(tmp_path):
    _, model, _ = _split("phi3", init="scratch")
    model.save_pretrained(tmp_path)
    for auto in (AutoModel, AutoModelForSequenceClassification):
        loaded = auto.from_pretrained(tmp_path)
        assert len(_splits(loaded)) == len(_splits(model))
        assert len(branches(loaded)) == len(branches(model))


def test_a_second_method_goes_on_with_the_parts(tmp_path):
    model = FAMILIES["gpt2"].build()
    nlr.augment(model, nlr.NonlinearQueryConfig(), split_fused=True, verbose=False)
    report = nlr.augment(model, nlr.NobleConfig(rank=RANK), verbose=False)
    assert "transformer.h.0.attn.c_attn.v_proj" in report.swapped
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    inputs = FAMILIES["gpt2"].inputs(model)
    assert same(outputs(realigned(loaded), inputs), outputs(realigned(model), inputs))


def test_a_config_that_does_not_fit_is_refused(tmp_path):
    _, model, _ = _split("gpt2")
    entry = model.config.nonlinear_lowrank[0]
    entry["split"][0]["widths"] = [32, 32, 16]
    assert_refused("the config splits 'transformer.h.0.attn.c_attn'", type(model), model.config)


def test_converted_outputs_stay(tmp_path):
    plain = FAMILIES["gpt2"].build()
    plain.save_pretrained(tmp_path / "plain")
    report = convert(tmp_path / "plain", tmp_path / "out", nlr.NobleConfig(rank=RANK), split_fused=True)
    assert report.difference < 1e-6
    assert "transformer.h.0.attn.c_attn.q_proj" in report.augmented.swapped
    assert len(_splits(AutoModel.from_pretrained(tmp_path / "out"))) == 2


@pytest.mark.parametrize("score", ["gradient", "activation"])
@pytest.mark.parametrize("family", ["phi3", "gpt2", "gpt_neox"])
def test_parts_are_scored_for_a_choice(family, score):
    """A part's score is that of its rows: by gradient the parts' sum, weighted by size, is the whole's."""
    model = FAMILIES[family].build()
    before, batches = list(model.named_modules()), [FAMILIES[family].inputs(model)]
    whole = layer_importance(model, batches, score=score)
    parts = layer_importance(model, batches, score=score, split_fused=True)
    assert list(model.named_modules()) == before
    report = nlr.augment(model, nlr.NobleConfig(rank=RANK), split_fused=True, select=parts, verbose=False)
    assert report.swapped == list(parts)
    for name, each in _splits(model).items():
        widths = torch.tensor(each.parts.widths, dtype=torch.float64)
        of_parts = torch.tensor([parts[f"{name}.{part}"] for part in each.parts.names], dtype=torch.float64)
        assert of_parts.std() > 0
        assert (of_parts * widths).sum() / widths.sum() == pytest.approx(whole[name], rel=1e-4)


def test_a_plain_folder_is_refused_by_a_split_model(tmp_path):
    plain, model, _ = _split("gpt2")
    plain.save_pretrained(tmp_path)
    words = r"does not fit .*missing \(transformer\.h\.0\.attn\.c_attn\.k_proj"
    assert_refused(words, type(model).from_pretrained, tmp_path, config=model.config)


def test_qk_norm_reads_the_heads_around_a_split_projection():
    report = nlr.augment(FAMILIES["phi3"].build(), nlr.QKNormConfig(), split_fused=True, verbose=False)
    assert {name.rpartition(".")[2] for name in report.swapped} == {"q_proj", "k_proj"}
