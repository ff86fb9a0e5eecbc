"""Adapters on quantized bases, on the CPU: bitsandbytes 8-bit and 4-bit, torchao int8."""

import copy

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import model_helpers
import nonlinear_lowrank as nlr
from adapter_helpers import ROWS
from nonlinear_lowrank import UserError
from nonlinear_lowrank.adapters.lora import LoraLayer
from nonlinear_lowrank.adapters.weights import WeightLayer
from rounding_helpers import assert_close_by_norm

pytestmark = [
    pytest.mark.quantized,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torchao.*"),
]

METHODS = [row for row in ROWS if row.name in ("noble-llama", "sine-llama", "sine_dora-llama")]
# Beside quantized linears activations change too: what is said of whole modules does not hold for it.
NORA = [row for row in ROWS if row.name == "nora++-llama"]
MERGING = [row for row in [*METHODS, *NORA] if row.merges]
every_method = pytest.mark.parametrize("row", METHODS, ids=lambda row: row.name)
with_nora = pytest.mark.parametrize("row", [*METHODS, *NORA], ids=lambda row: row.name)
merging_with_nora = pytest.mark.parametrize("row", MERGING, ids=lambda row: row.name)
every_format = pytest.mark.parametrize("kind", ["8bit", "4bit-nested", "4bit", "torchao"])

# Largest error of a weight that is quantized once, relative to its largest entry.
ROUNDING = {"8bit": 0.006, "4bit-nested": 0.17, "4bit": 0.18, "torchao": 0.006}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    sizes = {**model_helpers.SIZES, "hidden_size": 64}  # a 4-bit block is 64 numbers long
    LlamaForCausalLM(LlamaConfig(**sizes, **model_helpers.TOKENS, intermediate_size=128)).save_pretrained(path)
    return path


def quantized(folder, kind):
    pytest.importorskip("bitsandbytes")
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import BitsAndBytesConfig, TorchAoConfig

    config = {
        "8bit": BitsAndBytesConfig(load_in_8bit=True),
        "4bit-nested": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "4bit": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
        "torchao": TorchAoConfig(quantization.Int8WeightOnlyConfig()),
    }[kind]
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval()


def tokens():
    return torch.randint(2, 67, (2, 9))


@torch.no_grad()
def logits(model, ids, **options):
    return model(ids, **options).logits


def layers(model):
    return [module for module in model.modules() if isinstance(module, WeightLayer | LoraLayer)]


def state(model):
    """Every tensor of the model, quantized ones as their numbers and scales."""
    tensors = {}
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            tensors[name] = (value.dequantize() if hasattr(value, "qdata") else value).clone()
    return tensors


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@every_format
@with_nora
def test_training_and_loading_on_a_quantized_base(folder, tmp_path, kind, row):
    base, ids = quantized(folder, kind), tokens()
    # In eval mode a CPU with AVX512-BF16 packs 4-bit weights, which rounds their scales.
    before = logits(base.train("4bit" in kind), ids)
    model = get_peft_model(base, row.config()).eval()
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), before)
    adapters = {name: value for name, value in model.named_parameters() if ".nlr_" in name or ".lora_" in name}
    assert {value.dtype for value in adapters.values()} == {torch.float32}
    model.train()(ids, labels=ids).loss.backward()
    for name, value in model.named_parameters():
        assert (value.grad is not None) == (name in adapters), name
        assert value.grad is None or (value.grad.isfinite().all() and value.grad.any()), name
    adapted = logits(model.eval(), ids)
    mixed = logits(model, ids, adapter_names=["__base__", "default"])
    torch.testing.assert_close(mixed, torch.stack([before[0], adapted[1]]), atol=2e-2, rtol=2e-2)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(quantized(folder, kind), tmp_path, adapter_name="mine").eval()
    torch.testing.assert_close(logits(again, ids), adapted)


@every_format
@every_method
def test_adapting_adds_the_same_as_on_the_dequantized_base(folder, kind, row):
    model = get_peft_model(quantized(folder, kind), row.config()).eval()
    for layer in layers(model)[:7]:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
        plain.weight.data = layer.get_base_weight().float()
        reference = get_peft_model(nn.Sequential(plain), row.config(target_modules=["0"], task_type=None)).eval()
        for name, value in reference.base_model.model[0].named_parameters():
            if name.startswith(("nlr_", "lora_")):
                value.data = layer.get_parameter(name).data.clone()
        x = torch.randn(5, layer.in_features)
        with torch.no_grad():
            ours = layer(x) - layer.base_layer(x)
            expected = reference(x) - plain(x)
        assert_close_by_norm(ours, expected, 1e-4)


@every_format
@merging_with_nora
def test_merging_quantizes_once_and_is_undone_exactly(folder, kind, row):
    base, ids = quantized(folder, kind), tokens()
    kinds = [type(module) for module in base.modules()]
    model = get_peft_model(base, row.config()).eval()
    model.add_adapter("other", row.config(second=True))
    before, adapted = state(model), logits(model, ids)
    exact = [layer.merged_weight(layer.get_base_weight(), ["default"]) for layer in layers(model)]
    for _ in range(2):  # again: nothing drifts
        model.merge_adapter()
        for layer, weight in zip(layers(model), exact, strict=True):
            error = (layer.get_base_weight() - weight).abs().max() / weight.abs().max()
            assert error <= ROUNDING[kind]
        merged = logits(model, ids)
        assert not torch.equal(merged, adapted)
        model.unmerge_adapter()
        assert_same(state(model), before)
        assert torch.equal(logits(model, ids), adapted)
    model.merge_adapter(["default", "other"])
    together = state(model)
    model.unmerge_adapter()
    model.merge_adapter(["other"])
    logits(model, ids)
    with pytest.warns(UserWarning, match="additionally"):
        model.merge_adapter(["default"])
    assert_same(state(model), together)
    model.unmerge_adapter()
    plain = model.merge_and_unload()
    if row in METHODS:
        assert [type(module) for module in plain.modules()] == kinds
    assert torch.equal(logits(plain, ids), merged)


@pytest.mark.parametrize("kind", ["4bit", "4bit-nested"])
@with_nora
def test_adding_an_adapter_keeps_the_weight_from_being_packed(folder, kind, row):
    base = quantized(folder, kind)
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    for module in base.model.layers.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = True  # such a CPU, which has run the base before
            module.weight.data, _ = _convert_weight_packed_for_cpu(module.weight.data, module.weight.quant_state)
    model, ids = get_peft_model(base, row.config()).eval(), tokens()
    states = [layer.get_base_layer().weight.quant_state for layer in layers(model)]
    before = state(model)
    first = logits(model, ids)
    assert states
    assert not any(each.packing_format_for_cpu for each in states)
    assert_same(state(model), before)
    assert torch.equal(logits(model, ids), first)
    model.train()(ids, labels=ids).loss.backward()  # the packed form has no gradient
    assert all(value.grad.any() for value in layers(model)[0].parameters() if value.requires_grad)


def test_merging_refuses_torchao_weights_without_a_config(folder):
    quantization = pytest.importorskip("torchao.quantization")
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    ids = tokens()
    before = logits(model, ids)
    tuned = get_peft_model(model, nlr.SineLoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    adapted = logits(tuned, ids)
    assert not torch.equal(adapted, before)
    with pytest.raises(UserError, match="cannot be merged into torchao weights"):
        tuned.merge_adapter()
    assert torch.equal(logits(tuned, ids), adapted)
    assert torch.equal(logits(copy.deepcopy(tuned).unload(), ids), before)
