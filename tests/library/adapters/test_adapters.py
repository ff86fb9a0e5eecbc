"""The fine-tuning matrix: what peft's users expect of a method, for every row of `adapter_helpers`."""

import copy

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

import model_helpers
import nonlinear_lowrank as nlr
from adapter_helpers import FAMILIES, ROWS, batch, labels
from nonlinear_lowrank import UserError
from nonlinear_lowrank.adapters.weights import AdapterLayer
from rounding_helpers import assert_close_by_norm

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
merging_rows = pytest.mark.parametrize("row", [row for row in ROWS if row.merges], ids=lambda row: row.name)
# One row a method where the model adds nothing, so that the matrix stays fast.
one_a_method = [
    next(row for row in ROWS if row.name.startswith(f"{kind}-"))
    for kind in dict.fromkeys(row.name.partition("-")[0] for row in ROWS)
]
every_method = pytest.mark.parametrize("row", one_a_method, ids=lambda row: row.name)


def wrapped(row, dtype=torch.float32, **overrides):
    """A base model's outputs on a batch, and the model with an adapter."""
    base = row.base().to(dtype)
    inputs = batch(base)
    with torch.no_grad():
        before = base(**inputs).logits
    return before, get_peft_model(base, row.config(**overrides)).eval(), inputs


def two_adapters(row, dtype=torch.float32):
    before, model, inputs = wrapped(row, dtype)
    model.add_adapter("other", row.config(second=True))
    return before, model.eval(), inputs


@torch.no_grad()
def logits(model, inputs, **options):
    return model(**inputs, **options).logits


def adapter_parameters(model, name="default"):
    return {
        key: value
        for key, value in model.named_parameters()
        if f".{name}" in key and (".nlr_" in key or ".lora_" in key)
    }


def layers(model):
    return [module for module in model.modules() if isinstance(module, AdapterLayer)]


@every_row
def test_adding_an_adapter_starts_where_the_base_stands(row):
    before, model, inputs = wrapped(row, init_weights=True)
    if row.starts_equal:
        assert torch.equal(logits(model, inputs), before)
    else:
        assert_close_by_norm(logits(model, inputs), before, 0.08)  # NoRA's fit on gpt2: 0.033, standard deviation 0.005
    _, changed, _ = wrapped(row)
    assert not torch.equal(logits(changed, inputs), before)


@every_row
def test_training_changes_the_adapter_and_nothing_else(row):
    _, model, inputs = wrapped(row)
    before = {name: value.clone() for name, value in model.named_parameters()}
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    saved_whole = {name for name in trained if "modules_to_save.default" in name}
    assert trained - saved_whole == adapter_parameters(model).keys()
    model.train()
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-2, verbose=False))
    model(**inputs, labels=labels(row, inputs)).loss.backward()
    for name, value in model.named_parameters():
        assert (value.grad is not None) == (name in trained), name
        assert value.grad is None or value.grad.isfinite().all(), name
    optimizer.step()
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == trained


@every_row
def test_saving_and_loading_under_another_name(row, tmp_path):
    _, model, inputs = wrapped(row)
    base = copy.deepcopy(model).unload()
    expected = logits(model, inputs)
    model.save_pretrained(tmp_path)
    assert "import nonlinear_lowrank" in (tmp_path / "README.md").read_text()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text().count("import nonlinear_lowrank") == 1
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, adapter_name="mine").eval()
    assert torch.equal(logits(again, inputs), expected)
    assert not any(value.requires_grad for value in again.parameters())
    assert again.peft_config["mine"].peft_type == row.config().peft_type
    sparing = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, low_cpu_mem_usage=True, is_trainable=True)
    assert torch.equal(logits(sparing.eval(), inputs), expected)
    assert all(value.requires_grad for value in adapter_parameters(sparing).values())
    model.load_adapter(tmp_path, "model")  # a name that is a part of every module's
    model.set_adapter("model")
    assert torch.equal(logits(model.eval(), inputs), expected)


@every_row
def test_switching_disabling_and_deleting_adapters(row):
    before, model, inputs = two_adapters(row)
    first = logits(model, inputs)
    assert not any(value.requires_grad for value in adapter_parameters(model, "other").values())
    model.set_adapter("other")
    other = logits(model, inputs)
    assert not torch.equal(first, other)
    assert all(value.requires_grad for value in adapter_parameters(model, "other").values())
    assert not any(value.requires_grad for value in adapter_parameters(model).values())
    with model.disable_adapter():
        assert torch.equal(logits(model, inputs), before)
    model.set_adapter("default")
    assert torch.equal(logits(model, inputs), first)
    model.delete_adapter("other")
    assert torch.equal(logits(model, inputs), first)
    assert not adapter_parameters(model, "other")
    assert not any(layer.present(["other"]) for layer in layers(model))
    held = [each for layer in layers(model) for each in vars(layer).values() if isinstance(each, dict)]
    assert not any("other" in each for each in held)
    plain = model.unload()
    assert not any(isinstance(module, BaseTunerLayer) for module in plain.modules())
    assert torch.equal(logits(plain, inputs), before)


# peft lets a trained head be active for one adapter at a time.
@pytest.mark.parametrize("row", [row for row in ROWS if "classifier" not in row.family], ids=lambda row: row.name)
def test_activating_two_adapters_in_any_order_is_the_same(row):
    _, model, inputs = two_adapters(row)
    alone = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        alone[name] = logits(model, inputs)
    model.base_model.set_adapter(["default", "other"])
    both = logits(model, inputs)
    assert not any(torch.equal(both, each) for each in alone.values())
    model.base_model.set_adapter(["other", "default"])
    assert torch.equal(logits(model, inputs), both)


@every_row
def test_mixing_adapters_in_a_batch(row):
    before, model, inputs = two_adapters(row, torch.float64)
    names = ["other", "__base__", "default", "other"]
    mixed = logits(model, inputs, adapter_names=names)
    for i, name in enumerate(names):
        model.set_adapter("default" if name == "__base__" else name)
        assert_close_by_norm(mixed[i], before[i] if name == "__base__" else logits(model, inputs)[i])
    for bad, word in ((["nobody"] * 4, "nobody"), (["default"] * 3, "one name per row")):
        with pytest.raises(UserError, match=word):
            logits(model, inputs, adapter_names=bad)
    with pytest.raises(UserError, match="training mode"):
        model.train()(**inputs, adapter_names=names)


def mixture():
    widths = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "vocab_size": 31}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**widths, **counts, shared_expert_intermediate_size=24)).eval()


@pytest.mark.parametrize("kind", ["sine", "noble", "nora"])
def test_mixing_adapters_where_the_model_flattens_its_tokens(kind):
    linears = {"r": 2, "target_modules": ["q_proj", "shared_expert.up_proj", "shared_expert_gate"]}
    config = {
        "sine": lambda: nlr.SineLoraConfig(init_lora_weights=False, **linears),
        "noble": lambda: nlr.NobleAdapterConfig(init_weights=False, r=2, target_modules=["shared_expert.up_proj"]),
        "nora": lambda: nlr.NoraConfig(init_weights=False, groups=4, target_modules=["shared_expert.act_fn"]),
    }[kind]
    model = get_peft_model(mixture(), config())
    model.add_adapter("other", config())
    inputs, expected = {"input_ids": torch.randint(31, (3, 5))}, []
    mixed = logits(model.eval(), inputs, adapter_names=["other", "default", "__base__"])
    for name in ("other", "default"):
        model.set_adapter(name)
        expected.append(logits(model, inputs)[len(expected)])
    with model.disable_adapter():
        expected.append(logits(model, inputs)[2])
    assert_close_by_norm(mixed, torch.stack(expected))
    assert not torch.allclose(expected[2], logits(model, inputs)[2])


def test_experts_take_no_mixed_batch():
    """They see tokens in an order of their own."""
    model = get_peft_model(mixture(), nlr.NoraConfig(groups=4)).eval()
    with pytest.raises(UserError, match="Length of `adapter_names`"):
        model(input_ids=torch.randint(31, (3, 5)), adapter_names=["default"] * 3)


@merging_rows
def test_merging_and_unmerging(row):
    before, model, inputs = two_adapters(row, torch.float64)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    adapted, bases = logits(model, inputs), [layer.get_base_layer() for layer in layers(model)]
    model.merge_adapter()
    assert_close_by_norm(logits(model, inputs), adapted)
    model.unmerge_adapter()
    assert all(layer.get_base_layer() is base for layer, base in zip(layers(model), bases, strict=True))
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert torch.equal(logits(model, inputs), adapted)
    with model.disable_adapter():
        assert torch.equal(logits(model, inputs), before)
    classes = {type(module) for module in row.base().modules()}
    plain = model.merge_and_unload(safe_merge=True)
    if row.name.startswith("nora"):  # keeps the rational layer
        classes |= {type(module) for module in plain.modules() if type(module).__module__.startswith("nonlinear")}
    assert {type(module) for module in plain.modules()} <= classes
    assert_close_by_norm(logits(plain, inputs), adapted)


@merging_rows
def test_merging_one_by_one_is_merging_together(row):
    _, model, _ = two_adapters(row)
    model.to(torch.bfloat16)
    model.merge_adapter(["default", "other"])
    together = {name: value.clone() for name, value in model.state_dict().items()}
    model.unmerge_adapter()
    for first, second in (("default", "other"), ("other", "default")):
        model.merge_adapter([first])
        with pytest.warns(UserWarning, match="additionally merging"):
            model.merge_adapter([second])
        assert {tuple(each.merged_adapters) for each in layers(model)} - {(first,), (second,)} == {(first, second)}
        for name, value in model.state_dict().items():
            assert torch.equal(value, together[name]), name
        model.unmerge_adapter()


@pytest.mark.parametrize("row", [row for row in one_a_method if row.merges], ids=lambda row: row.name)
def test_disabling_merged_adapters_gives_the_base(row):
    before, model, inputs = wrapped(row)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model, inputs), before)


@merging_rows
def test_merging_refuses_a_broken_adapter(row):
    _, model, _ = wrapped(row)
    last = list(adapter_parameters(model).values())[-1]
    with torch.no_grad():
        last.view(-1)[0] = float("nan")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(UserError, match="not finite"):
            merge(safe_merge=True)
        assert not any(layer.merged for layer in layers(model))
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]) or value.isnan().any(), name


@every_row
def test_merging_refuses_in_one_line_or_merges(row):
    _, model, _ = wrapped(row)
    if row.merges:
        with pytest.raises(UserError, match="there is no adapter 'typo'"):
            model.merge_adapter(["typo"])
        return
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(UserError, match="cannot be merged") as caught:
            merge()
        assert "\n" not in str(caught.value)


@every_method
def test_add_adapter_of_transformers(row, tmp_path):
    model = row.base()
    inputs = batch(model)
    before = logits(model, inputs)
    plain = copy.deepcopy(model)
    model.add_adapter(row.config(), adapter_name="mine")
    adapted = logits(model.eval(), inputs)
    assert not torch.equal(adapted, before)
    assert all(value.requires_grad == (".nlr_" in name or ".lora_" in name) for name, value in model.named_parameters())
    model.disable_adapters()
    assert torch.equal(logits(model, inputs), before)
    model.enable_adapters()
    model.save_pretrained(tmp_path)
    plain.load_adapter(tmp_path, adapter_name="again")
    assert torch.equal(logits(plain.eval(), inputs), adapted)
    plain.delete_adapter("again")
    assert not adapter_parameters(plain, "again")


@every_row
def test_gradient_checkpointing_gives_the_same_gradients(row):
    gradients = []
    _, model, inputs = wrapped(row, **{name: 0.0 for name in row.options if name.endswith("dropout")})
    model.train()
    target = labels(row, inputs)
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad()
        model(**inputs, labels=target).loss.backward()
        gradients.append([value.grad.clone() for value in adapter_parameters(model).values()])
    for plain, *checkpointed in zip(*gradients, strict=True):
        for each in checkpointed:
            torch.testing.assert_close(each, plain)


def rounding(model, inputs):
    """Return the error of this draw's outputs from rounding the weights alone to bfloat16."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for value in rounded.parameters():
            value.copy_(value.bfloat16())
    return (logits(rounded, inputs) - logits(model, inputs)).norm()


@every_row
def test_adding_a_float32_adapter_to_a_bfloat16_base(row):
    base = row.base()
    inputs = batch(base, size=16)  # a classifier's few outputs tell little of the rounding
    reference = get_peft_model(copy.deepcopy(base), row.config()).eval()
    expected = logits(reference, inputs)
    model = get_peft_model(base.to(torch.bfloat16), row.config()).eval()
    assert {value.dtype for value in adapter_parameters(model).values()} == {torch.float32}
    with torch.no_grad():
        for name, value in adapter_parameters(reference).items():
            model.get_parameter(name).copy_(value)
    low = logits(model, inputs)
    assert low.dtype == torch.bfloat16
    assert (low - expected).norm() <= 4 * rounding(reference, inputs) + 0.02 * expected.norm()
    model.train()
    model(**inputs, labels=labels(row, inputs)).loss.backward()
    assert all(value.grad.isfinite().all() for value in adapter_parameters(model).values())
    model.add_adapter("other", row.config(second=True))
    assert not any(value.requires_grad for value in adapter_parameters(model, "other").values())


@every_row
def test_compiling_a_layer_breaks_no_graph(row):
    torch.compiler.reset()
    _, model, inputs = wrapped(row)
    caught = {}
    layer = layers(model)[0]
    layer.register_forward_pre_hook(lambda module, args: caught.setdefault("x", args[0].detach()))
    logits(model, inputs)
    x = caught["x"]
    layer._forward_pre_hooks.clear()
    if x.is_floating_point():
        x.requires_grad_()
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        y = function(x)
        y.square().sum().backward()
        trained = [value.grad for value in layer.parameters() if value.requires_grad]
        results.append([y.detach(), *(value.clone() for value in trained)])
    assert len(results[0]) > 1
    for eager, compiled in zip(*results, strict=True):
        assert_close_by_norm(compiled, eager, 1e-5)


# What every method refuses, in one line, before anything is changed.

NAMES = {"target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("options", "name", "word"),
    [
        ({"target_modules": ["typo_proj"]}, "default", "typo_proj.*match no module.*q_proj"),
        ({"target_modules": r".*\.layers\.9\..*"}, "default", "match no module"),
        ({**NAMES, "layers_to_transform": [7]}, "default", "layers_to_transform"),
        ({"target_modules": ["input_layernorm"]}, "default", "input_layernorm is a LlamaRMSNorm"),
        ({"target_modules": ["q_proj", "mlp"]}, "default", "mlp is a LlamaMLP"),
        ({**NAMES, "rank_pattern": {"k_proj": 2}}, "default", "rank_pattern.*k_proj"),
        ({"bias": "some"}, "default", "bias"),
        ({"target_modules": ".*", "layers_to_transform": [1]}, "default", "target_modules as a list"),
        ({"layers_pattern": "layers"}, "default", "layers_to_transform"),
        *((NAMES, name, "an adapter cannot be called") for name in ("__base__", "a.b", "keys", "training")),
    ],
)
def test_adding_refuses_bad_configs_targets_and_names(options, name, word):
    base = FAMILIES["llama"].make()
    before = {name: value.requires_grad for name, value in base.named_parameters()}
    modules = [type(module) for module in base.modules()]
    with pytest.raises(UserError, match=word) as caught:
        get_peft_model(base, nlr.NobleAdapterConfig(r=4, **options), name)
    assert "\n" not in str(caught.value)
    assert {name: value.requires_grad for name, value in base.named_parameters()} == before
    assert [type(module) for module in base.modules()] == modules


def test_loading_for_another_base_names_the_shapes(tmp_path):
    def model(d_in, depth=1):
        return nn.Sequential(*(nn.Linear(d_in, 12) if i == 0 else nn.Linear(12, 12) for i in range(depth)))

    config = nlr.NobleAdapterConfig(r=2, target_modules="[0-9]")
    get_peft_model(model(8, depth=2), config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"another base.*nlr_noble_down.*2x8 in its file and 2x10 here"):
        PeftModel.from_pretrained(model(10, depth=2), tmp_path)
    with pytest.raises(UserError, match=r"5 tensors are only in its file.*1\.nlr_noble"):
        PeftModel.from_pretrained(model(8), tmp_path)
    with pytest.raises(UserError, match=r"5 tensors are only here.*2\.nlr_noble"):
        PeftModel.from_pretrained(model(8, depth=3), tmp_path)


def test_training_and_saving_biases_with_the_adapter(tmp_path):
    for bias, trained in (("all", {"0", "2"}), ("adapter_only", {"0"}), ("lora_only", {"0"}), ("none", set())):
        base = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        plain = copy.deepcopy(base)
        model = get_peft_model(base, nlr.NobleAdapterConfig(r=2, target_modules=["0"], bias=bias))
        names = {name for name, value in model.named_parameters() if value.requires_grad and name.endswith("bias")}
        assert {name.split(".")[2] for name in names} == trained
        x = torch.randn(3, 8)
        model(x).square().sum().backward()
        with torch.no_grad():
            for value in model.parameters():
                if value.grad is not None:
                    value.sub_(value.grad)
        model.save_pretrained(tmp_path)
        assert torch.equal(PeftModel.from_pretrained(plain, tmp_path)(x), model(x))


def test_layers_and_exclusions_choose_the_modules():
    config = nlr.NobleAdapterConfig(
        r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[1], rank_pattern={r"layers\.1\..*v_proj": 2}
    )
    model = get_peft_model(FAMILIES["llama"].make(), config)
    ranks = {
        name: module.configs["default"].r for name, module in model.named_modules() if isinstance(module, AdapterLayer)
    }
    prefix = "base_model.model.model.layers.1.self_attn"
    assert ranks == {f"{prefix}.q_proj": 4, f"{prefix}.v_proj": 2}
    excluding = nlr.NobleAdapterConfig(r=4, target_modules=["q_proj", "v_proj"], exclude_modules=["v_proj"])
    model = get_peft_model(FAMILIES["llama"].make(), excluding)
    assert len(layers(model)) == 2
    everything = get_peft_model(FAMILIES["llama"].make(), nlr.NobleAdapterConfig(r=4, target_modules="all-linear"))
    assert len(layers(everything)) == 14  # the head is left alone
    assert everything.peft_config["default"].peft_type == peft.PeftType.NLR_NOBLE


AGAIN = {  # a config, and another that has other tensors
    "sine-dora, sine-lora": (nlr.SineLoraConfig(r=4, omega=50, use_dora=True), nlr.SineLoraConfig(r=4, omega=50)),
    "targets": (nlr.SineLoraConfig(r=4, omega=50), nlr.SineLoraConfig(r=4, omega=50, target_modules=["o_proj"])),
    "noble": (nlr.NobleAdapterConfig(r=4, depth=3), nlr.NobleAdapterConfig(r=4, depth=1, activation="gelu")),
    "nora": (nlr.NoraConfig(r=1, groups=4), nlr.NoraConfig(r=1, groups=4, numerator_only=True)),
}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time:UserWarning")
@pytest.mark.parametrize("configs", AGAIN.values(), ids=AGAIN)
def test_second_adapter_on_one_base_has_nothing_of_the_first(configs, tmp_path):
    base = model_helpers.FAMILIES["llama"]()
    clean = copy.deepcopy(base)
    first, second = (each if each.target_modules else _on(each, ["q_proj"]) for each in copy.deepcopy(configs))
    get_peft_model(base, first)
    model = get_peft_model(base, second).eval()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(clean, tmp_path).eval()
    assert adapter_parameters(loaded).keys() == adapter_parameters(model).keys()
    tokens = torch.arange(9)[None]
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)


def _on(config, names):
    if not isinstance(config, nlr.NoraConfig):
        config.target_modules = set(names)
    return config


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`:UserWarning")
def test_merging_into_a_weight_of_two_adapted_layers_is_refused():
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))
    model = get_peft_model(base, nlr.SineLoraConfig(r=2, omega=50, target_modules=["embed_tokens", "lm_head"]))
    before = {name: each.clone() for name, each in model.named_parameters()}
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(UserError, match=r"embed_tokens and lm_head.* share one weight"):
            merge()
    assert all(torch.equal(before[name], each) for name, each in model.named_parameters())


@pytest.mark.parametrize("make", [nlr.SineLoraConfig, nlr.NobleAdapterConfig, nlr.NoraConfig])
def test_embeddings_that_are_trained_whole_stay_tied(make, tmp_path):
    base = model_helpers.llama(tie_word_embeddings=True)
    plain = copy.deepcopy(base)
    size = {"groups": 2} if make is nlr.NoraConfig else {"r": 2, "target_modules": ["q_proj"]}
    model = get_peft_model(base, make(**size, modules_to_save=["embed_tokens"], ensure_weight_tying=True))
    saved = [each.modules_to_save["default"] for each in (model.get_input_embeddings(), model.get_output_embeddings())]
    assert saved[0].weight is saved[1].weight
    tokens = torch.arange(12).view(2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        saved[0].weight -= 0.1 * saved[0].weight.grad
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    assert torch.equal(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize(
    "config",
    [
        nlr.SineLoraConfig(r=2, target_modules=["0"], init_lora_weights=False),
        nlr.NobleAdapterConfig(r=2, target_modules=["0"], init_weights=False),
    ],
    ids=["sine-lora", "noble-adapter"],
)
def test_what_is_put_on_the_base_is_called(config):
    model, x, passed = get_peft_model(nn.Sequential(nn.Linear(16, 24)), config), torch.randn(3, 16), []
    base = model.base_model.model[0].base_layer
    handle = base.register_full_backward_hook(lambda *_: passed.append(1))
    model(x.requires_grad_()).sum().backward()
    assert passed == [1]
    handle.remove()
    before = model(x) - base(x)
    base.forward = lambda x: x.new_zeros(*x.shape[:-1], 24)
    torch.testing.assert_close(model(x), before)


def test_all_linear_leaves_out_the_classifier_of_images():
    for config in (nlr.SineLoraConfig(r=2, omega=50), nlr.NobleAdapterConfig(r=4)):
        config.target_modules = "all-linear"
        model = get_peft_model(model_helpers.FAMILIES["vit"](), config)
        assert not any("classifier" in name for name in adapter_parameters(model))
        assert layers(model)
