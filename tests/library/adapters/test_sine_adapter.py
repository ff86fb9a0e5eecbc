"""Sine-LoRA and sine-DoRA as PEFT methods, beside what every method's matrix (test_adapters.py) covers."""

import copy
import functools
import json
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DebertaV2Config, DebertaV2Model, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import model_helpers
import nonlinear_lowrank as nlr
from nonlinear_lowrank import SineLoraConfig, UserError
from nonlinear_lowrank.adapters.sine import SineLayer
from nonlinear_lowrank.analysis.saved import saved_bytes
from rounding_helpers import assert_close_by_norm

doras = pytest.mark.parametrize("dora", [False, True], ids=["sine-LoRA", "sine-DoRA"])

# Fields of huggingface.co/microsoft/deberta-v3-base and meta-llama/Meta-Llama-3-8B that shape the weights.
DEBERTA_V3_BASE = DebertaV2Config(
    vocab_size=128100, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
    max_position_embeddings=512, type_vocab_size=0, relative_attention=True, position_buckets=256,
    norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type="p2c|c2p", position_biased_input=False,
)  # fmt: skip
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip
COUNTED = {
    "deberta_v3_base_q_v": (DebertaV2Model, DEBERTA_V3_BASE, ["query_proj", "value_proj"]),
    "llama3_8b_q_k_v_up_down": (LlamaForCausalLM, LLAMA_3_8B, ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]),
}
PUBLISHED = {  # as printed: sine_lowrank.txt, Tables 1, 2 and 7, confirmed by arithmetic
    ("sine_lora", "deberta_v3_base_q_v"): {1: 36864, 2: 73728, 4: 147456, 8: 294912},
    ("sine_lora", "llama3_8b_q_k_v_up_down"): {4: 7077888, 8: 14155776, 16: 28311552, 32: 56623104},
    ("sine_dora", "llama3_8b_q_k_v_up_down"): {8: 14942208, 16: 29097984, 32: 57409536},
}


@pytest.mark.parametrize(("method", "model"), PUBLISHED, ids=["-".join(key) for key in PUBLISHED])
def test_trainable_counts_are_the_published_ones(method, model):
    make, config, targets = COUNTED[model]
    with torch.device("meta"):
        base = make(config)
    for r, count in PUBLISHED[method, model].items():
        settings = SineLoraConfig(r=r, target_modules=targets, use_dora=method == "sine_dora")
        adapted = get_peft_model(base, settings)
        assert sum(value.numel() for value in adapted.parameters() if value.requires_grad) == count
        base = adapted.unload()


@pytest.mark.shared_data
def test_the_published_counts_are_the_shared_ones():
    shared = json.loads((Path(__file__).resolve().parents[4] / "shared/facts/parameter_counts.json").read_text())
    for (method, model), counts in PUBLISHED.items():
        assert {int(r): count for r, count in shared[method][model].items()} == counts


class One(nn.Module):
    """A model of one module."""

    def __init__(self, module):
        super().__init__()
        self.target = module

    def forward(self, x):
        return self.target(x)


MODULES = {
    "linear": lambda: nn.Linear(12, 10),
    "linear-no-bias": lambda: nn.Linear(12, 10, bias=False),
    "conv1d": lambda: Conv1D(10, 12),
    "conv2d": lambda: nn.Conv2d(12, 10, 1, stride=2),
    "embedding": lambda: nn.Embedding(10, 12, padding_idx=3),
}


def adapted_one(kind, dtype=torch.float64, **options):
    torch.nn.init.normal_((module := MODULES[kind]()).weight)
    model = One(module.to(dtype))
    options = {"r": 3, "omega": 5.0, "target_modules": ["target"], "init_lora_weights": False, **options}
    return copy.deepcopy(module).to(dtype), get_peft_model(
        model, SineLoraConfig(**options), autocast_adapter_dtype=False
    )


def one_input(kind, dtype=torch.float64):
    if kind == "embedding":
        return torch.randint(0, 10, (4, 5))
    return torch.randn(*((2, 12, 5, 6) if kind == "conv2d" else (4, 5, 12)), dtype=dtype)


def factors_of(model, name="default"):
    layer = model.base_model.model.target
    factors = layer.factors(name)
    return [each.detach() for each in (factors.up, factors.down, factors.magnitude) if each is not None]


@doras
@pytest.mark.parametrize(("options", "scale", "gain"), [({}, 1.0, 12**0.5), ({"lora_alpha": 6.0, "gain": 2.0}, 2.0, 2)])
@pytest.mark.parametrize("kind", MODULES)
def test_the_weight_is_the_papers_equation(kind, options, scale, gain, dora):
    """And it is a sine of the weight in training, in evaluation, and merged."""
    plain, model = adapted_one(kind, use_dora=dora, **options)
    up, down, *magnitude = factors_of(model)
    assert up.shape == (10, 3)
    assert down.shape == (3, 12)
    stored = plain.weight.detach()
    matrix = stored.t() if kind == "conv1d" else stored.flatten(1)
    expected = matrix + scale * torch.sin(5.0 * up @ down) / gain
    if dora:
        torch.testing.assert_close(magnitude[0], matrix.norm(dim=1))
        expected = magnitude[0][:, None] * expected / expected.norm(dim=1, keepdim=True)
    plain.weight.data = expected.t() if kind == "conv1d" else expected.view(stored.shape)
    x = one_input(kind)
    with torch.no_grad():
        for mode in (True, False):
            torch.testing.assert_close(model.train(mode)(x), plain(x))
        torch.testing.assert_close(model.merge_and_unload()(x), plain(x))


def released_output(x, dropped, plain, transposed, model):
    """The published listing of sine-DoRA's forward, in training: (n, d_in) -> (n, d_out)."""
    up, down, magnitude = (
        model.get_parameter(f"base_model.model.target.{name}.default.weight")
        for name in ("lora_B", "lora_A", "lora_magnitude_vector")
    )
    weight, scale, gain = plain.weight.T if transposed else plain.weight, 6.0 / 3, 12**0.5
    norm = torch.linalg.norm(weight + torch.sin(5.0 * (up @ down)) / gain * scale, dim=1).detach()
    base = x @ weight.T + (0 if plain.bias is None else plain.bias)
    moved = magnitude / norm * torch.sin(5.0 * (dropped @ down.T @ up.T) / gain) * scale
    return base + (magnitude / norm - 1) * (dropped @ weight.T) + moved


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["linear", "linear-no-bias", "conv1d"])
def test_the_sine_of_activations_is_the_released_one(kind, dropout):
    """In training, gradients included; in evaluation and merged it is the sine of the weight, as in the release."""
    options = {"use_dora": True, "lora_alpha": 6.0, "lora_dropout": dropout}
    plain, model = adapted_one(kind, activation_sine=True, **options)
    twin = adapted_one(kind, **options)[1]
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for name, value in trained.items():
        if "magnitude" in name:
            value.data += torch.rand(10)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(7, 10, dtype=torch.float64)
    torch.manual_seed(3)
    y = model.train()(x)
    torch.manual_seed(3)
    expected = released_output(x, F.dropout(x, dropout), plain, kind == "conv1d", model)
    torch.testing.assert_close(y, expected)
    inputs = [x, *trained.values()]
    for ours, theirs in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert (y - twin.train()(x)).abs().max() > 0.1
        assert torch.equal(model.eval()(x), twin.eval()(x))
        assert torch.equal(model.merge_and_unload()(x), twin.merge_and_unload()(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sine_of_activations_starts_at_the_base(dtype):
    """Beside another adapter too, whose weight stays a sine of its own."""
    plain, x = nn.Linear(12, 10, dtype=dtype), torch.randn(7, 12, dtype=dtype)
    options = {"r": 3, "use_dora": True, "activation_sine": True, "target_modules": ["target"]}
    model = get_peft_model(One(copy.deepcopy(plain)), SineLoraConfig(**options))
    with torch.no_grad():
        assert torch.equal(model.train()(x), plain(x))
        model.add_adapter("weight", SineLoraConfig(r=3, target_modules=["target"], init_lora_weights=False))
        model.base_model.set_adapter("weight")
        alone = model(x)
        model.base_model.set_adapter(["default", "weight"])
        torch.testing.assert_close(model(x), alone, rtol=0, atol=8 * torch.finfo(dtype).eps)
        assert not torch.equal(alone, plain(x))


def test_the_sine_of_activations_is_of_sine_doras_linears():
    with pytest.raises(UserError, match="set use_dora=True"):
        SineLoraConfig(activation_sine=True)
    for kind in ("conv2d", "embedding"):
        with pytest.raises(UserError, match="target is not a linear, which activation_sine needs; name it in exclude"):
            adapted_one(kind, use_dora=True, activation_sine=True)


@doras
def test_a_whole_model_merges_bit_equal_in_bfloat16(dora):
    base = model_helpers.llama().bfloat16().eval()
    inputs = model_helpers.batch(base)
    with torch.no_grad():
        plain = base(**inputs).logits
    options = {"r": 4, "use_dora": dora, "target_modules": "all-linear"}
    model = get_peft_model(base, SineLoraConfig(**options)).eval()
    assert all(value.dtype == torch.float32 for value in model.parameters() if value.requires_grad)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, plain)
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.05)
        expected = model(**inputs).logits
        assert not torch.equal(expected, plain)
        merged = model.merge_and_unload()
        assert torch.equal(merged(**inputs).logits, expected)


@doras
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_trained_tensors_survive_a_bfloat16_base(autocast, low, dora, tmp_path):
    base = model_helpers.llama().bfloat16().eval()
    model = get_peft_model(copy.deepcopy(base), SineLoraConfig(r=2, use_dora=dora, target_modules=["q_proj"]))
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.rand_like(value) * 0.01)
    model.save_pretrained(tmp_path)
    how = {"low_cpu_mem_usage": low, "autocast_adapter_dtype": autocast}
    again = peft.PeftModel.from_pretrained(base, tmp_path, **how)
    ours, theirs = (
        {name: value for name, value in each.named_parameters() if ".lora_" in name} for each in (model, again)
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(theirs[name], value if autocast else value.bfloat16()), name


def test_a_1x1_convolution_takes_an_image_without_a_batch():
    model = get_peft_model(nn.Sequential(nn.Conv2d(8, 12, 1)), SineLoraConfig(r=2, target_modules=["0"]))
    nn.init.normal_(model.base_model.model[0].lora_B.default.weight)
    image = torch.randn(8, 5, 5, requires_grad=True)
    batch = image.detach()[None].requires_grad_()
    one, several = model(image), model(batch)
    torch.testing.assert_close(one, several[0])
    one.sum().backward()
    several.sum().backward()
    torch.testing.assert_close(image.grad, batch.grad[0])


def test_patterns_set_rank_and_omega_by_module():
    config = SineLoraConfig(
        r=4, omega=100.0, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 2},
        omega_pattern={r"layers\.1\.self_attn\.q_proj": 7.0},
    )  # fmt: skip
    model = get_peft_model(model_helpers.llama(), config)
    seen = {
        name: (module.r["default"], module.factors("default").omega)
        for name, module in model.named_modules()
        if isinstance(module, SineLayer)
    }
    prefix = "base_model.model.model.layers"
    assert seen == {
        f"{prefix}.0.self_attn.q_proj": (4, 100.0),
        f"{prefix}.0.self_attn.v_proj": (2, 100.0),
        f"{prefix}.1.self_attn.q_proj": (4, 7.0),
        f"{prefix}.1.self_attn.v_proj": (2, 100.0),
    }


def test_the_gradient_at_the_zero_start_is_omega_over_root_d_in_times_loras():
    """The reason for which the learning rates of the two differ."""
    module = nn.Linear(64, 48).double()
    x, dy = torch.randn(20, 64).double(), torch.randn(20, 48).double()
    lora = get_peft_model(One(copy.deepcopy(module)), LoraConfig(r=4, lora_alpha=4, target_modules=["target"]))
    sine = get_peft_model(One(module), SineLoraConfig(r=4, omega=300.0, target_modules=["target"]))
    lora, sine = lora.double(), sine.double()
    a = lora.base_model.model.target.lora_A["default"].weight
    sine.base_model.model.target.lora_A["default"].weight.data.copy_(a.detach())
    for model in (lora, sine):
        (model(x) * dy).sum().backward()
    ours = sine.base_model.model.target.lora_B["default"].weight.grad
    torch.testing.assert_close(ours, lora.base_model.model.target.lora_B["default"].weight.grad * 300 / 8)


# Llama-3-8B's q, k, up and down projections, 1/64 of the widths: (d_in, d_out).
SHAPES = {"q": (64, 64), "k": (64, 16), "up": (64, 224), "down": (224, 64)}


def kept_bytes(config, shape, dtype, autocast, backend):
    torch.compiler.reset()
    d_in, d_out = SHAPES[shape]
    model = get_peft_model(
        One(nn.Linear(d_in, d_out, bias=False).to(dtype)), config, autocast_adapter_dtype=dtype == torch.float32
    ).train()
    run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    x = torch.randn(4, 40, d_in, dtype=dtype, requires_grad=True)

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return run(x)

    torch.manual_seed(0)  # the mask itself is kept, and counts the same for both
    return saved_bytes(forward, x, parameters=list(model.parameters()))


TYPES = {"float32": (torch.float32, False), "bf16": (torch.bfloat16, False), "autocast": (torch.float32, True)}


@functools.cache
def kept_by_lora(shape, dropout, kind, backend):
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules=["target"])
    return kept_bytes(config, shape, *TYPES[kind], backend)


@doras
@pytest.mark.parametrize(
    ("shape", "dropout", "kind", "backend"),
    [
        *((shape, dropout, kind, None) for shape in SHAPES for dropout in (0.0, 0.1) for kind in TYPES),
        # Compiling takes seconds. aot_eager runs the same partitioner as inductor, which decides what is kept.
        ("up", 0.0, "bf16", "aot_eager"),
        ("down", 0.1, "float32", "aot_eager"),
        pytest.param("q", 0.1, "autocast", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_keeps_no_more_for_backward_than_lora(shape, dropout, kind, backend, dora):
    config = SineLoraConfig(r=4, lora_dropout=dropout, use_dora=dora, target_modules=["target"])
    assert 0 < kept_bytes(config, shape, *TYPES[kind], backend) <= 1.01 * kept_by_lora(shape, dropout, kind, backend)


@doras
def test_keeps_no_more_than_lora_at_the_full_size(dora):
    """One layer of Llama-3-8B on meta, bfloat16: the figures in docs/sine-lora.md."""
    expected = {0.0: (240.0, 240.3), 0.05: (480.0, 480.3)}  # MiB for 8 x 512 tokens: ours, LoRA's
    for dropout, figures in expected.items():
        options = {"r": 8, "lora_dropout": dropout, "target_modules": ["target"]}
        kept = [0.0, 0.0]
        for d_in, d_out in ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 14336), (14336, 4096)):
            for index, config in enumerate((SineLoraConfig(**options, use_dora=dora), LoraConfig(**options))):
                with torch.device("meta"):
                    base = One(nn.Linear(d_in, d_out, bias=False, dtype=torch.bfloat16))
                    x = torch.empty(8, 512, d_in, dtype=torch.bfloat16, requires_grad=True)
                model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
                kept[index] += saved_bytes(model, x) / 2**20
        assert [round(each, 1) for each in kept] == list(figures)


@doras
def test_dropout_touches_the_delta_only(dora):
    _, model = adapted_one("linear", use_dora=dora, lora_dropout=0.5)
    layer, x = model.base_model.model.target, torch.randn(6, 12).double()
    torch.manual_seed(3)
    y = model.train()(x)
    torch.manual_seed(3)
    dropped = F.dropout(x, 0.5)
    with torch.no_grad():
        base = layer.base_layer(x)
        delta = layer.get_delta_weight("default")
        torch.testing.assert_close(y, base + dropped @ delta.T)
        torch.testing.assert_close(model.eval()(x), base + x @ delta.T)


class ScaledEmbedding(nn.Embedding):
    """An embedding like Gemma's."""

    def __init__(self, *args, embed_scale):
        super().__init__(*args)
        self.register_buffer("embed_scale", torch.tensor(embed_scale), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.embed_scale.to(self.weight.dtype)


@doras
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_hooks_of_the_base_run_once_and_embeddings_are_scaled_once(kind, hooked, dora):
    base = nn.Linear(12, 10) if kind == "linear" else ScaledEmbedding(10, 12, embed_scale=3.5)
    seen = []
    if hooked:
        base.register_forward_hook(lambda *_: seen.append(1))
    config = SineLoraConfig(r=3, use_dora=dora, target_modules=["target"], init_lora_weights=False)
    model = get_peft_model(One(base), config).eval()
    x = one_input(kind, torch.float32)
    with torch.no_grad():
        y = model(x)
        assert len(seen) == hooked
        torch.testing.assert_close(y, model.merge_and_unload()(x), **({} if hooked else {"rtol": 0, "atol": 0}))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # peft's, of the LoRA on Conv1D
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_converts_an_adapter_to_lora(family, tmp_path):
    base = model_helpers.FAMILIES[family]().eval()
    inputs = model_helpers.batch(base)
    targets = ["q_proj", "down_proj"] if family == "llama" else ["c_attn"]
    options = {"r": 2, "omega": 50.0, "lora_alpha": 1.0, "target_modules": targets, "init_lora_weights": False}
    scaled = get_peft_model(copy.deepcopy(base), SineLoraConfig(**options, use_dora=True))
    with pytest.raises(TypeError, match=r"do not support LoRA conversion: .*SineLinear"):  # rows scaled: of full rank
        peft.save_as_lora(tmp_path / "scaled", scaled, 4)
    model = get_peft_model(copy.deepcopy(base), SineLoraConfig(**options)).eval()
    errors = []
    with torch.no_grad():
        expected = model(**inputs).logits
        for rank in (4, 32):  # 32: full
            peft.save_as_lora(tmp_path / str(rank), model, rank)
            lora = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / str(rank)).eval()
            errors.append((lora(**inputs).logits - expected).norm() / expected.norm())
    assert errors[1] < 1e-4 < errors[0]


def test_modules_that_cannot_be_adapted_are_refused_before_any_change():
    class Positions(nn.Embedding):
        def forward(self, x):
            return super().forward(x + 2)

    for bad, words in (
        (Positions(9, 8), "lookup of its own"),
        (nn.Embedding(9, 8, max_norm=1.0), "max_norm"),
        (nn.Conv2d(6, 6, 3, groups=3), "3 groups; choose an r"),
        (nn.LayerNorm(8), "LayerNorm"),
    ):
        model = nn.ModuleDict({"good": nn.Linear(8, 8), "bad": bad})
        with pytest.raises(UserError, match=words):
            get_peft_model(model, SineLoraConfig(target_modules=["good", "bad"]))
        assert type(model["good"]) is nn.Linear


def test_learning_rate_roles():
    model = get_peft_model(model_helpers.llama(), SineLoraConfig(r=4, use_dora=True, target_modules=["q_proj"]))
    groups = nlr.param_groups(model, lr=1e-3, weight_decay=0.1, verbose=False)
    decays = {name.split(".")[-3]: group["weight_decay"] for group in groups for name, _ in group["params"]}
    assert decays == {"lora_A": 0.1, "lora_B": 0.1, "lora_magnitude_vector": 0.0}
    assert {group["lr"] for group in groups} == {1e-3}


@pytest.mark.quantized
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@doras
def test_a_quantized_base_is_not_kept_dequantized(dora, dropout):
    """And the gradients are those beside the dequantized weight."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    plain = nn.Linear(128, 192, bias=False)
    base = bitsandbytes.nn.Linear4bit(128, 192, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    base.load_state_dict(plain.state_dict())
    base = base.to("cpu")  # quantizes
    options = {
        "r": 4,
        "use_dora": dora,
        "lora_dropout": dropout,
        "target_modules": ["target"],
        "init_lora_weights": False,
    }
    model = get_peft_model(One(base), SineLoraConfig(**options)).train()
    layer = model.base_model.model.target
    plain.weight.data = layer.get_base_weight().float()
    twin = get_peft_model(One(plain), SineLoraConfig(**options)).train()
    x = torch.randn(7, 128, requires_grad=True)
    dy = torch.randn(7, 192)
    gradients = []
    for each in (model, twin):
        inputs = [x]
        for name, value in each.base_model.model.target.named_parameters():
            if "lora_" in name:
                value.data = layer.get_parameter(name).data.clone()
                inputs.append(value)
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(each(x), inputs, dy))
    for ours, expected in zip(*gradients, strict=True):
        assert_close_by_norm(ours, expected, 1e-3)
    kept = saved_bytes(model, x)
    lora = get_peft_model(One(layer.base_layer), LoraConfig(r=4, lora_dropout=dropout, target_modules=["target"]))
    assert kept <= 1.01 * saved_bytes(lora.train(), x)


@pytest.mark.parametrize("grad", [True, False])
def test_a_model_trained_by_sines_of_activations_is_evaluated_by_its_weight(grad):
    settings = {"init_lora_weights": False, "use_dora": True, "activation_sine": True}
    model = get_peft_model(
        nn.Sequential(nn.Linear(12, 10)), SineLoraConfig(r=3, target_modules=["0"], **settings)
    ).eval()
    x, layer = torch.randn(4, 12), model.base_model.model[0]
    weight = layer.base_layer.weight + layer.get_delta_weight("default")
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model(x), F.linear(x, weight, layer.base_layer.bias))


def test_random_factors_have_phases_of_one_radian():
    config = SineLoraConfig(r=30, target_modules=["0"], init_lora_weights=False)
    layer = get_peft_model(nn.Sequential(nn.Linear(300, 300)), config).base_model.model[0]
    up, down = layer.matrices("default")
    assert (layer.omega["default"] * up @ down).std().item() == pytest.approx(1, rel=0.1)
