"""Every family of transformers: branches act and train; models are saved, loaded and generate (docs/families.md)."""

import pytest
import torch

import nonlinear_lowrank as nlr
from family_checks import (
    RANK,
    TENSORS_OF_A_BRANCH,
    augmented,
    branch_tensors,
    branches,
    check_cells,
    enlarge_branches,
    generated,
    names_on_disk,
    outputs,
    realigned,
    same,
    skipped,
    train_a_step,
    without_effect,
)
from family_helpers import FAMILIES, REFUSED

TAKEN = [name for name in FAMILIES if name not in REFUSED]
# Their steps from a cache differ from those without one, in plain models too.
CACHES_DIFFER = ("rwkv", "prophetnet")
OTHER_METHODS = {
    "sine": nlr.SineLowRankConfig(rank=RANK),
    "query": nlr.NonlinearQueryConfig(),
    "rational": nlr.RationalConfig(groups=4),
}
OTHER_FAMILIES = (
    *("llama", "glm", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "mpt", "mixtral", "gpt_oss", "deepseek_v3", "mamba"),
    *("rwkv", "bert", "deberta-v2", "modernbert", "albert", "convbert", "t5", "bart", "whisper", "vit", "swin"),
    *("convnext", "clip", "wav2vec2", "wavlm", "wav2vec2-bert"),
)
REFUSALS = {
    ("gpt_neox", "query"): "mixes rows of q, k and v",
    ("deepseek_v3", "query"): "not named like a target",
    ("mamba", "query"): "not named like a target",
    ("rwkv", "query"): "not named like a target",
    ("wavlm", "query"): "without calling it",
    ("convnext", "query"): "not named like a target",
    ("convbert", "query"): "queries of width 16",
    ("gpt_oss", "rational"): "a function cannot be swapped",
    ("rwkv", "rational"): "a function cannot be swapped",
    ("mamba", "rational"): "is bypassed",
}
"""Why one of these methods has no place in a family."""
every_family = pytest.mark.parametrize("name", TAKEN)


@every_family
def test_every_branch_acts_and_trains(name):
    model, report = augmented(name)
    inputs = FAMILIES[name].inputs(model)
    layers = {id(model.get_submodule(each)) for each in report.swapped}
    assert layers == {id(layer) for layer in branches(model).values()}
    assert len(branch_tensors(model)) == TENSORS_OF_A_BRANCH * len(layers)
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-3, verbose=False))
    train_a_step(model, optimizer, inputs)
    train_a_step(model, optimizer, inputs)
    assert without_effect(enlarge_branches(model.eval()), inputs) == []
    share = 100 * report.reached_parameters / report.body_parameters
    cells = {"class": type(FAMILIES[name].build()).__name__, "swapped": str(len(report.swapped))}
    check_cells(name, cells | {"skipped": skipped(report), "reached": f"{share:.0f} %", "step": "yes"})


@every_family
def test_a_saved_model_is_loaded_bit_equal_and_generates(name, tmp_path):
    family = FAMILIES[name]
    family.build().save_pretrained(tmp_path / "plain")
    model, _ = augmented(name)
    inputs = family.inputs(model)
    enlarge_branches(model).save_pretrained(tmp_path / "augmented")
    assert names_on_disk(tmp_path / "plain") - names_on_disk(tmp_path / "augmented") == set()
    loaded = realigned(family.auto_class.from_pretrained(tmp_path / "augmented"))
    assert type(loaded) is type(model)
    assert same(loaded.state_dict().values(), model.state_dict().values())
    equal = same(outputs(loaded, inputs), outputs(model, inputs))
    assert equal
    loaded.save_pretrained(tmp_path / "again")
    assert names_on_disk(tmp_path / "again") == names_on_disk(tmp_path / "augmented")
    if family.generates:
        tokens = generated(model, inputs)
        assert generated(loaded, inputs) == tokens
        assert name in CACHES_DIFFER or generated(loaded, inputs, use_cache=False) == tokens
    check_cells(name, {"save, load": "bit-equal", "generates": "the same" if family.generates else "-"})


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
    before = outputs(model, inputs)
    for layer in {id(model.get_submodule(each)): model.get_submodule(each) for each in report.swapped}.values():
        own = [value for part, value in layer.named_parameters() if not part.endswith("bias")]
        kept = [value.detach().clone() for value in own]
        with torch.no_grad():
            for value in own:
                value.add_(torch.randn_like(value), alpha=0.2)
            assert not same(outputs(model, inputs), before)
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
        nlr.augment(model, nlr.NobleConfig(rank=RANK), verbose=False)
    check_cells(name, {"class": type(model).__name__, "swapped": "0", "skipped": f"refused: {refused.value}"})


def test_the_page_has_every_family():
    for name, family in FAMILIES.items():
        check_cells(name, {"family": name})
        assert family.kind in ("causal", "masked", "seq2seq", "vision", "audio")
    assert len(FAMILIES) >= 45
