"""All that peft does with LoRA, done with sine-LoRA: its modules, fields, scales, optimizers, hotswap and experts."""

import copy
import dataclasses

import peft
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import rescale_adapter_scale
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import model_helpers
from nonlinear_lowrank import NobleAdapterConfig, SineLoraConfig, UserError
from nonlinear_lowrank.adapters.sine import SineLayer
from rounding_helpers import assert_close_by_norm


class Model(nn.Module):
    """One module, called with one input."""

    def __init__(self, module):
        super().__init__()
        self.target = module

    def forward(self, x):
        return self.target(x, x, x, need_weights=False)[0] if isinstance_attention(self.target) else self.target(x)


def isinstance_attention(module):
    return isinstance(getattr(module, "base_layer", module), nn.MultiheadAttention)


def adapted(module, name="target", **options):
    """The module's model in float64 with an adapter, a plain twin, and the one adapted layer."""
    options = {"r": 4, "omega": 9.0, "target_modules": [name], "init_lora_weights": False, **options}
    model = Model(module.double())
    plain = copy.deepcopy(model)
    tuned = get_peft_model(model, SineLoraConfig(**options), autocast_adapter_dtype=False).eval()
    return tuned, plain.eval(), tuned.base_model.model.target


def sine(layer, scaling=1.0):
    """The formula, by the factors that peft's names say."""
    up, down = (getattr(layer, name)["default"].weight.flatten(1) for name in ("lora_B", "lora_A"))
    return scaling * torch.sin(9.0 * up @ down) / down.shape[1] ** 0.5


CONVOLUTIONS = {
    "1d": (nn.Conv1d, (6, 4, 3), {"stride": 2, "padding": 1}, (2, 6, 9)),
    "2d": (nn.Conv2d, (6, 4, 3), {"padding": 2, "dilation": 2}, (2, 6, 8, 7)),
    "2d-reflect": (nn.Conv2d, (6, 4, (3, 1)), {"padding": (1, 0), "padding_mode": "reflect"}, (2, 6, 5, 5)),
    "2d-same": (nn.Conv2d, (6, 4, 3), {"padding": "same"}, (2, 6, 5, 5)),
    "1x1-padded": (nn.Conv2d, (6, 4, 1), {"padding": 1}, (2, 6, 5, 5)),
    "3d": (nn.Conv3d, (3, 4, 2), {"stride": 2, "bias": False}, (2, 3, 5, 4, 4)),
}


@pytest.mark.parametrize("dora", [False, True], ids=["sine-LoRA", "sine-DoRA"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_have_a_sine_of_their_kernel(kind, dora):
    make, sizes, options, shape = CONVOLUTIONS[kind]
    model, plain, layer = adapted(make(*sizes, **options), use_dora=dora)
    kernel = plain.target.weight.flatten(1)
    total = kernel + sine(layer)
    if dora:
        total = kernel.norm(dim=1, keepdim=True) * total / total.norm(dim=1, keepdim=True)
    plain.target.weight.data = total.detach().view_as(plain.target.weight)
    x = torch.randn(shape, dtype=torch.float64)
    expected = plain(x)
    torch.testing.assert_close(model(x), expected)
    hooked = layer.base_layer.register_forward_hook(lambda *_: None)  # the base's output and the delta's
    torch.testing.assert_close(model(x), expected)
    hooked.remove()
    torch.testing.assert_close(model.merge_and_unload()(x), expected)


def test_a_row_of_zeros_has_finite_gradients():
    convolution = nn.Conv2d(3, 4, 3)
    convolution.weight.data[1] = 0
    model, _, _ = adapted(convolution, use_dora=True)
    model(torch.randn(2, 3, 6, 6, dtype=torch.float64)).square().sum().backward()
    assert all(value.grad.isfinite().all() for value in model.parameters() if value.requires_grad)


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups")  # peft's
@pytest.mark.parametrize("dora", [False, True], ids=["sine-LoRA", "sine-DoRA"])
def test_a_grouped_convolution_has_a_delta_over_all_channels(dora):
    model, plain, layer = adapted(nn.Conv2d(6, 4, 3, groups=2), use_dora=dora)
    ups, down = layer.lora_B["default"].weight.flatten(1).chunk(2), layer.lora_A["default"].weight
    kernel = plain.target.weight
    dense = torch.cat([F.pad(kernel[:2], (0, 0, 0, 0, 0, 3)), F.pad(kernel[2:], (0, 0, 0, 0, 3, 0))]).flatten(1)
    total = dense + torch.sin(9.0 * torch.block_diag(*ups) @ down.flatten(1)) / 54**0.5
    if dora:
        total = dense.norm(dim=1, keepdim=True) * total / total.norm(dim=1, keepdim=True)
    x = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(model(x), F.conv2d(x, total.view(4, 6, 3, 3), plain.target.bias))
    with pytest.raises(UserError, match="groups cannot be merged"):
        model.merge_and_unload()


@pytest.mark.parametrize("within", ["alone", "encoder"])
def test_attention_of_torch_acts_in_training_and_in_evaluation(within):
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    alone = within == "alone"
    model, plain, layer = adapted(attention if alone else encoder, "target" if alone else "self_attn")
    layer, twin = (layer, plain.target) if alone else (layer.self_attn, plain.target.self_attn)
    twin.in_proj_weight.data += sine(layer).detach()
    twin.out_proj.weight.data += sine(layer.base_layer.out_proj).detach()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for mode in (True, False):
        assert_close_by_norm(model.train(mode)(x), plain.train(mode)(x))
        with torch.no_grad():
            assert_close_by_norm(model(x), plain(x))
    model(x).square().sum().backward()
    assert all(value.grad.any() for value in model.parameters() if value.requires_grad)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.merge_adapter()
    assert_close_by_norm(model(x), plain(x))
    model.unmerge_adapter()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert_close_by_norm(model.merge_and_unload()(x), plain(x))


class Experts(nn.Module):
    """Experts in one parameter, (E, d_in, d_out) or (E, d_out, d_in)."""

    def __init__(self, transposed):
        super().__init__()
        self.is_transposed = transposed
        self.first = nn.Parameter(torch.randn(3, *((6, 8) if transposed else (8, 6))))
        self.second = nn.Parameter(torch.randn(3, *((8, 5) if transposed else (5, 8))))

    def forward(self, x):
        for weight in (self.first, self.second):
            x = torch.einsum("eti,eio->eto" if self.is_transposed else "eti,eoi->eto", x, weight)
        return x


@pytest.mark.parametrize("transposed", [False, True])
def test_each_expert_has_a_sine_of_its_own(transposed):
    model, plain, layer = adapted(
        Experts(transposed), target_modules=[], target_parameters=["target.first", "target.second"]
    )
    while isinstance(layer, SineLayer):
        up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
        weight = getattr(plain.target, layer.parameter_name)
        for expert in range(3):
            delta = torch.sin(9.0 * up[:, expert::3] @ down[4 * expert : 4 * expert + 4]) / down.shape[1] ** 0.5
            weight.data[expert] += (delta.t() if transposed else delta).detach()
        layer = layer.base_layer
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(model(x), plain(x))
    model(x).square().sum().backward()
    assert all(value.grad.any() for value in model.parameters() if value.requires_grad)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.merge_adapter()
    torch.testing.assert_close(model(x), plain(x))
    model.unmerge_adapter()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(model.merge_and_unload()(x), plain(x))  # of both parameters


SMALL = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
MIXTURES = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[])
    ),
}


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # peft's, LoRA has it
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"]], ids=str)
def test_mixtures_of_experts_train_what_lora_trains(family, targets, tmp_path):
    base = MIXTURES[family]().eval()
    trained = []
    for config in (LoraConfig, SineLoraConfig):
        model = get_peft_model(copy.deepcopy(base), config(r=4, target_modules=targets, init_lora_weights=False))
        trained.append({name: value.shape for name, value in model.named_parameters() if value.requires_grad})
    assert trained[0] == trained[1]
    inputs = {"input_ids": torch.randint(31, (2, 7))}
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        assert not torch.allclose(expected, base(**inputs).logits)
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
        assert torch.equal(again(**inputs).logits, expected)


# Fields of LoraConfig.


def llama(**options):
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    return get_peft_model(model_helpers.llama(), SineLoraConfig(**options)).eval()


def scales(model, name="default"):
    return {layer.factors(name).scale for layer in model.modules() if isinstance(layer, SineLayer)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {1.0}),
        ({"rank_pattern": {"v_proj": 2}}, {1.0}),
        ({"lora_alpha": 8}, {2.0}),
        ({"lora_alpha": 8, "alpha_pattern": {"v_proj": 12}}, {2.0, 3.0}),
        ({"rank_pattern": {"v_proj": 2}, "alpha_pattern": {r".*v_proj": 6}}, {1.0, 3.0}),
        ({"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 6}}, {1.0, 3.0}),
        ({"use_rslora": True}, {1.0}),
        ({"use_rslora": True, "lora_alpha": 8}, {4.0}),
    ],
)
def test_scales_are_loras(options, expected):
    model = llama(**options)
    assert scales(model) == expected
    alpha = options.get("lora_alpha", 2 if "use_rslora" in options else 4)
    assert model.peft_config["default"].lora_alpha == alpha, "as a number, which other tools read"


@pytest.mark.parametrize("changed", [{"r": 2}, {"rank_pattern": {"v_proj": 2}}, {"use_rslora": True}])
def test_the_default_scale_is_one_after_the_config_is_changed(changed):
    config = SineLoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    other = dataclasses.replace(config, **changed)
    for name, value in changed.items():
        setattr(config, name, value)
    assert scales(get_peft_model(model_helpers.llama(), config)) == {1.0}
    assert scales(get_peft_model(model_helpers.llama(), other)) == {1.0}


def test_changing_scales_changes_the_delta():
    model = llama()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    delta = layer.get_delta_weight("default")
    with rescale_adapter_scale(model, 0.5):
        torch.testing.assert_close(layer.get_delta_weight("default"), delta * 0.5)
    for change, factor in ((layer.set_scale, 3.0), (None, 1.0)):
        change("default", factor) if change else layer.unscale_layer()
        torch.testing.assert_close(layer.get_delta_weight("default"), delta * factor)
    layer.scale_layer(2.0)
    torch.testing.assert_close(layer.get_delta_weight("default"), delta * 2.0)


def logits(model, **inputs):
    with torch.no_grad():
        return model(**(inputs or {"input_ids": torch.arange(12).view(2, 6)})).logits


@pytest.mark.parametrize(
    "options",
    [
        {"trainable_token_indices": [1, 5]},
        {"layer_replication": [[0, 2], [0, 1]]},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_fields_of_loraconfig_act_and_survive_saving(options, tmp_path):
    model = llama(**options)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value), alpha=0.1)
    model.save_pretrained(tmp_path)
    expected = logits(model)
    lora = get_peft_model(
        model_helpers.llama(), LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **options})
    )
    names = [{name for name, value in each.named_parameters() if value.requires_grad} for each in (model, lora)]
    assert names[0] == names[1]
    torch.manual_seed(0)
    base = model_helpers.llama()
    base.load_state_dict({k.replace(".base_layer", ""): v for k, v in plain_state(model).items()}, strict=False)
    again = PeftModel.from_pretrained(base, tmp_path).eval()
    assert_close_by_norm(logits(again), expected, 1e-6)
    if "trainable_token_indices" in options or "modules_to_save" in options:
        assert_close_by_norm(logits(model.merge_and_unload()), expected, 1e-5)


def plain_state(model):
    state = model.base_model.model.state_dict()
    return {
        name.replace("token_adapter.base_layer.", "").replace("original_module.", ""): value
        for name, value in state.items()
        if "lora_" not in name and "modules_to_save" not in name
    }


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 4), lambda: nn.Conv2d(6, 4, 3)], ids=["linear", "conv2d"])
def test_a_trained_bias_is_added_and_merged(make):
    model, plain, layer = adapted(make(), lora_bias=True, lora_alpha=8)
    bias = layer.lora_B["default"].bias
    with torch.no_grad():
        bias.normal_()
    x = torch.randn(2, 6, 5, 6, dtype=torch.float64)
    total = plain.target.weight + sine(layer, 2.0).view_as(plain.target.weight)
    plain.target.weight.data, plain.target.bias.data = total.detach(), (plain.target.bias + 2.0 * bias).detach()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.testing.assert_close(model(x), plain(x))
    model.merge_adapter(safe_merge=True)
    torch.testing.assert_close(model(x), plain(x))
    model.unmerge_adapter()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed but the targeted layer")
def test_a_trained_bias_is_not_merged_where_there_is_none():
    model, _, _ = adapted(nn.Linear(6, 4, bias=False), lora_bias=True)
    with pytest.raises(UserError, match="layer without a bias"):
        model.merge_adapter()


def test_tied_weights_have_tied_adapters():
    base = model_helpers.llama(tie_word_embeddings=True)
    options = {"r": 4, "target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    model = get_peft_model(base, SineLoraConfig(**options, init_lora_weights=False))
    embedding, head = model.base_model.model.model.embed_tokens, model.base_model.model.lm_head
    torch.testing.assert_close(head.get_delta_weight("default"), embedding.get_delta_weight("default"))
    model(input_ids=torch.arange(12).view(2, 6)).logits.square().sum().backward()
    assert head.lora_A["default"].weight.grad is not None


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_a_weight_that_another_module_holds_is_not_merged():
    base = model_helpers.llama(tie_word_embeddings=True)
    model = get_peft_model(base, SineLoraConfig(r=2, target_modules=["embed_tokens"]))
    with pytest.raises(UserError, match=r"model.embed_tokens and .*lm_head share one weight; use it unmerged"):
        model.merge_and_unload()


def test_an_embedding_that_is_not_called_is_refused():
    tiny = {"d_model": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 4, "vocab_size": 12}
    model = T5ForConditionalGeneration(T5Config(**tiny))
    names = list(model.state_dict())
    with pytest.raises(UserError, match=r"on shared would have no effect: the forward of T5For.* does not call it"):
        get_peft_model(model, SineLoraConfig(r=2, target_modules=["shared", "q"]))
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("make", [SineLoraConfig, NobleAdapterConfig])
def test_a_linear_in_two_places_has_its_adapter_in_both(make):
    shared = nn.Linear(8, 8)
    base = nn.Sequential(nn.Sequential(shared, nn.GELU()), nn.Sequential(shared))
    model = get_peft_model(base, make(r=2, target_modules=r"\d\.0"))
    assert base[0][0] is base[1][0] is not shared
    assert model.unload()[1][0] is shared is base[0][0]


@pytest.mark.parametrize("make", ["plus", "fa"])
def test_optimizers_of_lora_find_the_factors(make):
    model = llama().train()
    if make == "plus":
        optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16.0)
        rates = {group["lr"]: len(group["params"]) for group in optimizer.param_groups if group["params"]}
        assert rates == {1e-2: 4, 16e-2: 4}
    else:
        optimizer = create_lorafa_optimizer(model, r=4, lora_alpha=4, lr=1e-2)
    before = {name: value.clone() for name, value in model.named_parameters() if "lora_" in name}
    model(input_ids=torch.arange(12).view(2, 6)).logits.square().mean().backward()
    optimizer.step()
    changed = {
        name for name, value in model.named_parameters() if "lora_" in name and not torch.equal(value, before[name])
    }
    assert changed == {name for name in before if make == "plus" or "lora_B" in name}


def test_hotswap_takes_the_same_frequency_and_gain_only(tmp_path):
    models = {"a": llama(), "b": llama(lora_alpha=8), "c": llama(omega=77.0), "d": llama(gain=2.0)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    base = models["a"]
    hotswap_adapter(base, tmp_path / "b", adapter_name="default")
    assert scales(base) == {2.0}
    a, b = (each.base_model.model.model.layers[1].self_attn.q_proj for each in (base, models["b"]))
    torch.testing.assert_close(a.get_delta_weight("default"), b.get_delta_weight("default"))
    for other, setting in (("c", "omega"), ("d", "gain")):
        with pytest.raises(ValueError, match=setting):
            hotswap_adapter(base, tmp_path / other, adapter_name="default")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"use_qalora": True}, "use_qalora belongs to another LoRA"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens belongs to another LoRA"),
        ({"alpha_pattern": {"v_proj": -1}}, r"alpha_pattern\['v_proj'\]"),
        ({"alpha_pattern": {"k_proj": 2}}, "alpha_pattern has 'k_proj'"),
        ({"omega_pattern": {"v_proj": 0}}, r"omega_pattern\['v_proj'\]"),
        (
            {"target_parameters": ["q_proj.weight"], "target_modules": [], "use_dora": True},
            "target_parameters.*use_dora",
        ),
    ],
)
def test_what_is_not_loras_is_refused_by_name(options, words):
    with pytest.raises(UserError, match=words) as caught:
        llama(**options)
    assert "\n" not in str(caught.value)


def test_what_a_sine_cannot_do_is_refused_in_one_line():
    model = llama()
    model.add_adapter("other", SineLoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with pytest.raises(UserError, match=r"convert_to_lora"):
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both")
    with pytest.raises(ValueError, match="NLR_SINE_LORA"):
        peft.PeftMixedModel(model_helpers.llama(), SineLoraConfig(target_modules=["q_proj"]))


def test_factors_of_an_embedding_are_drawn_as_a_linears():
    model = get_peft_model(Model(nn.Embedding(10, 64)), SineLoraConfig(r=3, target_modules=["target"]))
    _, down = model.base_model.model.target.matrices("default")
    assert 0.9 * 64**-0.5 < down.abs().max() <= 64**-0.5


def test_a_padding_token_is_not_trained():
    config = SineLoraConfig(r=3, target_modules=["target"], init_lora_weights=False)
    model = get_peft_model(Model(nn.Embedding(10, 12, padding_idx=4)), config)
    model(torch.tensor([[4, 7, 4]])).sum().backward()
    gradient = model.base_model.model.target.lora_embedding_A["default"].grad  # (r, tokens)
    assert gradient.any(dim=0).nonzero().flatten().tolist() == [7]
