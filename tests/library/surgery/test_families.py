"""Every family of transformers: branches act and train; models are saved, loaded and generate (docs/families.md)."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig

import family_checks as checks
import nonlinear_lowrank as nlr
from family_helpers import FAMILIES, REFUSED
from nonlinear_lowrank.methods.experts import projections

TAKEN = [name for name in FAMILIES if name not in REFUSED]
# Their steps from a cache differ from those without one, in plain models too.
CACHES_DIFFER = ("rwkv", "prophetnet")
OTHER_METHODS = {"sine": nlr.SineLowRankConfig(rank=checks.RANK), "query": nlr.NonlinearQueryConfig()}
OTHER_METHODS["rational"] = nlr.RationalConfig(groups=4)
OTHER_FAMILIES = (
    *("llama", "glm", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "mpt", "mixtral", "gpt_oss", "deepseek_v3", "mamba"),
    *("rwkv", "bert", "deberta-v2", "modernbert", "albert", "convbert", "t5", "bart", "whisper", "vit", "swin"),
    *("convnext", "clip", "wav2vec2", "wavlm", "wav2vec2-bert"),
)
REFUSALS = {
    ("mamba", "query"): "not named like a target",
    ("rwkv", "query"): "not named like a target",
    ("wavlm", "query"): "without calling it",
    ("convnext", "query"): "not named like a target",
    ("gpt_oss", "rational"): "a function cannot be swapped",
    ("rwkv", "rational"): "a function cannot be swapped",
    ("mamba", "rational"): "is bypassed",
}
"""Reason for which one of these methods has no place in a family."""
every_family = pytest.mark.parametrize("name", TAKEN)


@every_family
def test_every_branch_acts_and_trains(name):
    model, report = checks.augmented(name)
    assert report.config.init == "scratch"
    inputs = FAMILIES[name].inputs(model)
    layers = {id(model.get_submodule(each)) for each in report.swapped}
    assert layers == {id(layer) for layer in checks.branches(model).values()}
    linears = sum(len(projections(layer)) or 1 for layer in checks.branches(model).values())
    assert len(checks.branch_tensors(model)) == checks.TENSORS_OF_A_BRANCH * linears
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-3, verbose=False))
    checks.train_a_step(model, optimizer, inputs)
    checks.train_a_step(model, optimizer, inputs)
    assert checks.without_effect(checks.enlarge_branches(model.eval()), inputs) == []
    share = 100 * report.reached_parameters / report.body_parameters
    cells = {"class": type(FAMILIES[name].build()).__name__, "swapped": str(len(report.swapped))}
    checks.check_cells(name, cells | {"skipped": checks.skipped(report), "reached": f"{share:.0f} %", "step": "yes"})


@every_family
def test_a_saved_model_is_loaded_bit_equal_and_generates(name, tmp_path):
    family = FAMILIES[name]
    family.build().save_pretrained(tmp_path / "plain")
    model, _ = checks.augmented(name)
    inputs = family.inputs(model)
    checks.enlarge_branches(model).save_pretrained(tmp_path / "augmented")
    assert checks.names_on_disk(tmp_path / "plain") - checks.names_on_disk(tmp_path / "augmented") == set()
    loaded = checks.realigned(family.auto_class.from_pretrained(tmp_path / "augmented"))
    assert type(loaded) is type(model)
    assert checks.same(loaded.state_dict().values(), model.state_dict().values())
    equal = checks.same(checks.outputs(loaded, inputs), checks.outputs(model, inputs))
    assert equal
    loaded.save_pretrained(tmp_path / "again")
    assert checks.names_on_disk(tmp_path / "again") == checks.names_on_disk(tmp_path / "augmented")
    if family.generates:
        tokens = checks.generated(model, inputs)
        assert checks.generated(loaded, inputs) == tokens
        assert name in CACHES_DIFFER or checks.generated(loaded, inputs, use_cache=False) == tokens
    checks.check_cells(name, {"save, load": "bit-equal", "generates": "the same" if family.generates else "-"})


@pytest.mark.parametrize("method", OTHER_METHODS)
@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_other_methods_act_or_are_refused_by_name(name, method):
    model = FAMILIES[name].build()
    if (name, method) in REFUSALS:
        with pytest.raises(nlr.UserError, match=REFUSALS[name, method]):
            nlr.augment(model, OTHER_METHODS[method], verbose=False)
        return
    report = nlr.augment(model, OTHER_METHODS[method], verbose=False)
    torch.manual_seed(2)
    inputs = FAMILIES[name].inputs(model)
    before = checks.outputs(model, inputs)
    for layer in {id(model.get_submodule(each)): model.get_submodule(each) for each in report.swapped}.values():
        own = [value for part, value in layer.named_parameters() if not part.endswith("bias")]
        kept = [value.detach().clone() for value in own]
        with torch.no_grad():
            for value in own:
                value.add_(torch.randn_like(value), alpha=0.2)
            assert not checks.same(checks.outputs(model, inputs), before)
            for value, old in zip(own, kept, strict=True):
                value.copy_(old)
    model.train()(**inputs).loss.backward()
    for each in report.swapped:
        for part, value in model.get_submodule(each).named_parameters():
            assert value.grad.isfinite().all(), f"{each}.{part}"
            assert value.grad.any(), f"{each}.{part}"


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_linears_are_refused_by_name(name):
    model = FAMILIES[name].build()
    with pytest.raises(nlr.UserError, match=f"nothing to swap in this {type(model).__name__}") as refused:
        nlr.augment(model, nlr.NobleConfig(rank=checks.RANK), verbose=False)
    checks.check_cells(name, {"class": type(model).__name__, "swapped": "0", "skipped": f"refused: {refused.value}"})


def test_the_record_has_every_family():
    for name, family in FAMILIES.items():
        checks.check_cells(name, {"family": name})
        assert family.kind in ("causal", "masked", "seq2seq", "vision", "audio")
    assert len(FAMILIES) >= 45


def test_the_page_says_of_every_family_what_the_record_does():
    """Families of which only heads are left out stand in lines by kind, with the range of what is reached."""
    _, rows = checks.record()
    shares = {name: row["reached"].removesuffix(" %") for name, row in rows.items()}
    expected = []
    for name, row in rows.items():
        if left := re.sub(r"(, )?\d+ output head$", "", row["skipped"]):
            expected.append([name, shares[name], re.sub(" in this .*", "", left)])
    partly = [cells[0] for cells in expected]
    for kind in ("causal", "masked", "seq2seq", "vision", "audio"):
        whole = [name for name in rows if FAMILIES[name].kind == kind and name not in partly]
        reached = [int(shares[name]) for name in whole]
        expected.append([f"{min(reached)} to {max(reached)}", ", ".join(whole)])
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    found = [cells if cells[0] in rows else cells[1:] for cells in lines if cells[1] != "reached"]
    assert sorted(found) == sorted(expected)


WIDE = {"hidden_size": 64, "intermediate_size": 128}  # a 4-bit block is 64 numbers long
BITSANDBYTES = {
    "llama": {**WIDE, "head_dim": 32, "num_key_value_heads": 2},
    "opt": {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": 64},
    "bert": WIDE,
    "t5": {"d_model": 64, "d_kv": 32, "d_ff": 128},
    "vit": {**WIDE, "num_labels": 64},
}
BITS = {
    "8-bit": ("Linear8bitLt", {"load_in_8bit": True}, 0.1),
    "4-bit": ("Linear4bit", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 0.5),
}
"""Class of bitsandbytes, settings, and the largest error of the outputs by norm."""


def to_float8(model):
    float8 = pytest.importorskip("torchao.float8")

    def divisible(module, name):
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True), module_filter_fn=divisible)
    return "Float8Linear"


def to_fake_quantized(model):
    quantization = pytest.importorskip("torchao.quantization")
    qat = pytest.importorskip("torchao.quantization.qat")
    activations = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = qat.IntxFakeQuantizeConfig(torch.int4, "per_channel")
    config = qat.QATConfig(activation_config=activations, weight_config=weights, step="prepare")
    # Routers are linears that return more than a product, in plain models too.
    taken = lambda module, name: isinstance(module, nn.Linear) and not name.endswith("router")  # noqa: E731
    quantization.quantize_(model, config, filter_fn=taken)
    return "FakeQuantizedLinear"


@checks.quantized
@pytest.mark.parametrize("column", ["float8", "QAT"])
@every_family
def test_converted_models_train_and_keep_their_branches(name, column, tmp_path):
    model, _ = checks.augmented(name)
    inputs = FAMILIES[name].inputs(model)
    before = {name: value.detach().clone() for name, value in checks.branch_tensors(model).items()}
    kind = {"float8": to_float8, "QAT": to_fake_quantized}[column](model)
    assert checks.branch_tensors(model).keys() == before.keys()
    assert checks.same(checks.branch_tensors(model).values(), before.values())
    layers = [each for each in checks.branches(model).values() if hasattr(each, "dense")]  # experts have none
    converted = sum(type(each.dense).__name__ == kind for each in layers)
    linears = [each for each in layers if isinstance(each, nlr.NobleLinear)]
    assert converted == sum(column == "QAT" or all(size % 16 == 0 for size in each.weight.shape) for each in linears)
    checks.train_a_step(model, torch.optim.AdamW(nlr.param_groups(model, lr=1e-3, verbose=False)), inputs)
    model.save_pretrained(tmp_path)
    loaded = FAMILIES[name].auto_class.from_pretrained(tmp_path)
    assert checks.same(loaded.state_dict().values(), model.state_dict().values())
    checks.check_cells(name, {column: f"{converted} of {len(layers)}"})


@checks.quantized
@pytest.mark.parametrize("name", BITSANDBYTES)
def test_bitsandbytes_quantizes_the_dense_parts_only(name, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, _ = checks.augmented(name, **BITSANDBYTES[name])
    checks.enlarge_branches(model).save_pretrained(tmp_path)
    inputs = FAMILIES[name].inputs(model)
    for layer, settings, error in BITS.values():
        config = BitsAndBytesConfig(**settings)
        loaded = FAMILIES[name].auto_class.from_pretrained(tmp_path, quantization_config=config)
        assert checks.same(checks.branch_tensors(loaded).values(), checks.branch_tensors(model).values())
        taken = [isinstance(each.dense, getattr(bitsandbytes.nn, layer)) for each in checks.branches(loaded).values()]
        assert sum(taken) == len(taken) - (2 * 2 if name == "t5" else 0), "T5 keeps its wo in float"
        assert checks.without_effect(loaded, inputs) == []
        for found, expected in zip(checks.outputs(loaded, inputs), checks.outputs(model, inputs), strict=True):
            assert (found - expected).norm() < error * expected.norm()


@checks.quantized
def test_modules_that_bitsandbytes_is_told_to_skip_stay(tmp_path):
    model, _ = checks.augmented("llama")
    model.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["q_proj", "lm_head"])
    loaded = FAMILIES["llama"].auto_class.from_pretrained(tmp_path, quantization_config=config)
    kinds = {name.rpartition(".")[2]: type(layer.dense).__name__ for name, layer in checks.branches(loaded).items()}
    assert {name for name, kind in kinds.items() if kind == "Linear"} == {"q_proj"}
    assert config.llm_int8_skip_modules == ["q_proj", "lm_head"], "the user's own is not changed"


def in_8_bits(name, folder):
    return FAMILIES[name].auto_class.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


@checks.quantized
@every_family
def test_every_family_loads_in_8_bits_with_its_branches(name, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, _ = checks.augmented(name)
    model.save_pretrained(tmp_path / "augmented")
    loaded = in_8_bits(name, tmp_path / "augmented")
    assert checks.same(checks.branch_tensors(loaded).values(), checks.branch_tensors(model).values())
    dense = [each.dense for each in checks.branches(loaded).values() if hasattr(each, "dense")]  # experts have none
    taken = [isinstance(each, bitsandbytes.nn.Linear8bitLt) for each in dense]
    cell = f"{sum(taken)} of {len(taken)}"
    plain = FAMILIES[name].build()
    plain.save_pretrained(tmp_path / "plain")
    try:  # not where code reads weights or reshapes outputs
        checks.outputs(in_8_bits(name, tmp_path / "plain"), FAMILIES[name].inputs(plain))
    except (RuntimeError, IndexError):
        cell += ", not run: nor is the plain model"
    else:
        assert all(each.isfinite().all() for each in checks.outputs(loaded, FAMILIES[name].inputs(model)))
    checks.check_cells(name, {"bitsandbytes": cell})
