"""Layers that take a linear's place or share tensors, in every family: files, drawing, types, training, resuming."""

import copy
import warnings

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import nonlinear_lowrank as nlr
from model_helpers import ALL, auto_class, batch, randomised
from nonlinear_lowrank.hub.classes import augmented_layers
from nonlinear_lowrank.methods.base import method_of_layer

IMAGES = ("vit", "convnext")
MODELS = ("llama", "glm", "gpt2", "opt", "eurobert", "vit", "image_tokens")
ROWS = {
    "sine": ((*MODELS, "convnext"), nlr.SineLowRankConfig(rank=2, omega=30), {}),
    "low-rank": (("glm",), nlr.SineLowRankConfig(rank=2, activation="identity"), {"include": r".*mlp\..*"}),
    "sigmoid": (("gpt2",), nlr.SineLowRankConfig(rank=2, activation="sigmoid", gain=9), {"exclude": r".*c_attn"}),
    "query": (MODELS, nlr.NonlinearQueryConfig(), {}),
    "identity-query": (("gpt2",), nlr.NonlinearQueryConfig(kind="identity"), {}),
    "qk-norm": (MODELS, nlr.QKNormConfig(), {}),
    "shared-noble": ([each for each in MODELS if each != "gpt2"], nlr.NobleConfig(rank=3, share_down="qkv"), {}),
    "rational": ((*MODELS, "convnext"), nlr.RationalConfig(groups=4), {}),
    "rational-exact": (("gpt2",), nlr.RationalConfig(anchor="exact", form="sum_of_abs", degrees=(3, 2)), {}),
    "residual-query": (("opt", "gpt2"), nlr.NonlinearQueryConfig(kind="full_rank"), {}),
    "kept-query": (("opt", "gpt2"), nlr.NonlinearQueryConfig(residual="linear"), {}),
    "other-query": (
        ("llama",),
        nlr.NonlinearQueryConfig(activation="silu", in_norm="layer", out_norm="rms"),
        {"include": r".*\.[qkv]_proj"},
    ),
    "linear-query": (("opt",), nlr.NonlinearQueryConfig(kind="linear", rank=5), {}),
}
CASES = [(row, family) for row, (families, *_) in ROWS.items() for family in families]


def replaced(row, family):
    """A model of the family, every tensor random, so that none is at a default."""
    _, config, choice = ROWS[row]
    model = ALL[family]().eval()
    nlr.augment(model, config, **choice, verbose=False)
    return randomised(model, 0.05)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{(row, family): (folder, model)}."""
    root = tmp_path_factory.mktemp("saved")
    models = {}
    for row, family in CASES:
        model, folder = replaced(row, family), root / f"{row}+{family}"
        model.save_pretrained(folder)
        models[row, family] = (folder, model)
    return models


def generate(model, prompt):
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt, **settings)


@pytest.mark.parametrize(("row", "family"), CASES)
def test_files_hold_the_model_and_no_more(saved, row, family):
    folder, model = saved[row, family]
    loaded = auto_class(family).from_pretrained(folder)
    assert type(loaded) is type(model)
    assert loaded.config.nonlinear_lowrank == model.config.nonlinear_lowrank
    state, expected = loaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)
    inputs = batch(model)
    with torch.no_grad():
        backbone = AutoModel.from_pretrained(folder)(**inputs).last_hidden_state
        assert torch.equal(backbone, model.base_model(**inputs).last_hidden_state)
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    if auto_class(family) is AutoModelForCausalLM:
        assert torch.equal(*(generate(each, inputs["input_ids"]) for each in (loaded, model)))


@pytest.mark.parametrize(("row", "family"), CASES)
def test_from_config_draws_every_tensor_by_the_layers_own_init(row, family):
    model = replaced(row, family)
    fresh = auto_class(family).from_config(copy.deepcopy(model.config))
    layers = list(augmented_layers(fresh))
    assert len(layers) == sum(len(entry["modules"]) for entry in model.config.nonlinear_lowrank)
    assert all(torch.isfinite(parameter).all() for parameter in fresh.parameters())
    for layer in layers:
        redrawn = []
        for _ in range(20):
            own = copy.deepcopy(layer)
            own.reset_parameters()
            redrawn.append([each.std().item() for each in own.parameters()])
        for (name, drawn), expected, spreads in zip(
            layer.named_parameters(), own.parameters(), zip(*redrawn, strict=True), strict=True
        ):
            if drawn.numel() > 40 and max(spreads) > 0:
                assert 0.7 * min(spreads) < drawn.std().item() < 1.4 * max(spreads), name
            elif max(spreads) == 0:
                assert torch.equal(drawn, expected), name
    one, two = (dict(layer.named_parameters()) for layer in layers[:2])
    for local in one.keys() & two.keys():
        if row.startswith("rational"):  # the fit is drawn from nothing
            assert torch.equal(one[local], two[local])
        else:
            assert one[local].ndim < 2 or not torch.equal(one[local], two[local])


@pytest.mark.parametrize(("row", "family"), CASES)
def test_init_weights_redraws_nothing(row, family):
    """Neither transformers' own init nor a second call touches what is there."""
    model = replaced(row, family)
    before = copy.deepcopy(model.state_dict())
    model.init_weights()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(("row", "family"), CASES)
def test_bfloat16_loads_and_runs(saved, row, family):
    folder, model = saved[row, family]
    loaded = auto_class(family).from_pretrained(folder, dtype=torch.bfloat16)
    kept = {f"{name}.{each}" for name, module in loaded.named_modules() for each in float32(module)}
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == (torch.float32 if name in kept else torch.bfloat16), name
    inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch(model).items()}
    with torch.no_grad():
        assert loaded(**inputs).logits.isfinite().all()


def float32(module):
    method = method_of_layer(module)
    return method.float32 if method else ()


@pytest.mark.parametrize(("row", "family"), CASES)
def test_every_new_tensor_learns_and_a_resumed_run_is_bit_equal(tmp_path, row, family):
    model = replaced(row, family).train()
    inputs = batch(model)
    labels = torch.zeros(2, dtype=torch.long) if family in IMAGES else inputs["input_ids"]

    def optimizer_of(model):
        groups = nlr.param_groups(model, lr=1e-3, weight_decay=0.1, verbose=False)
        return torch.optim.AdamW(groups, betas=(0.9, 0.98))

    def steps(model, optimizer, count):
        for _ in range(count):
            torch.manual_seed(7)  # dropout
            loss = model(**inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    optimizer = optimizer_of(model)
    before = copy.deepcopy(model.state_dict())
    steps(model, optimizer, 2)
    ours = {id(p) for layer in augmented_layers(model) for p in layer.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in ours:
            assert not torch.equal(parameter, before[name]), name
    model.save_pretrained(tmp_path)
    resumed = auto_class(family).from_pretrained(tmp_path).train()
    again = optimizer_of(resumed)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 2)
    steps(resumed, again, 2)
    for (name, left), right in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right), name


# What QK-norm goes around is the model's own linear, and stays one; a linear with a branch is one too.
@pytest.mark.parametrize(("row", "family"), [case for case in CASES if case[0] not in ("qk-norm", "shared-noble")])
def test_pefts_all_linear_adapts_nothing_inside(row, family):
    from peft import LoraConfig, get_peft_model

    model = replaced(row, family)
    inside = {id(module) for layer in augmented_layers(model) for module in layer.modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tuned = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        except ValueError as error:  # every linear was replaced
            assert "target_modules" in str(error)  # noqa: PT017
            return
    for name, module in tuned.named_modules():
        base = getattr(module, "base_layer", None)
        assert base is None or id(base) not in inside, name
