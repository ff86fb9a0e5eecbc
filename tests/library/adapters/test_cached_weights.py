"""Weights with sine adapters in them that layers keep in evaluation: when they are formed again, size and cost."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank import SineLoraConfig

MODULES = {
    "linear": lambda: nn.Linear(12, 10),
    "conv1d": lambda: Conv1D(10, 12),
    "conv2d": lambda: nn.Conv2d(12, 10, 3, padding=1),
}
doras = pytest.mark.parametrize("dora", [False, True], ids=["sine-LoRA", "sine-DoRA"])


def adapted(kind, **options):
    options = {"r": 3, "target_modules": ["0"], "init_lora_weights": False, **options}
    module = MODULES[kind]()
    nn.init.normal_(module.weight)
    return get_peft_model(nn.Sequential(module), SineLoraConfig(**options)).eval()


def inputs(kind):
    return torch.randn(*((2, 12, 4, 4) if kind == "conv2d" else (2, 5, 12)))


def cached_bytes(model):
    return sum(kept.weight.nbytes for each in model.modules() for kept in getattr(each, "_formed", {}).values())


@torch.no_grad()
def check(model, x):
    """Compare with the model that forms its weight anew."""
    fresh = copy.deepcopy(model)
    fresh.base_model.model[0].cached = dict.fromkeys(fresh.base_model.model[0].cached, 0)
    assert torch.equal(model(x), fresh(x))
    assert torch.equal(model(x), fresh(x))
    assert cached_bytes(fresh) == 0


def changes(model, folder):
    """Give all the ways in which what a weight is formed from can change, each doing it."""
    layer = model.base_model.model[0]
    a, b, base = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.base_layer.weight

    def step():
        optimizer = torch.optim.SGD([a], lr=1.0)
        a.grad = torch.ones_like(a)
        optimizer.step()

    def swap():
        hotswap_adapter(model, folder, adapter_name="default")

    with torch.no_grad():
        yield "an optimizer's step", step
        yield "data", lambda: a.data.mul_(2)
        yield "another parameter", lambda: setattr(layer.lora_A["default"], "weight", nn.Parameter(a + 1))
        yield "other data", lambda: setattr(b, "data", torch.zeros_like(b))
        if not layer.lora_magnitude_vector:  # peft cannot swap DoRA's magnitudes
            yield "hotswap", swap
        yield "the base", lambda: base.mul_(1.5)
        yield "loading", lambda: model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()})
        layer.scaling["default"] = torch.tensor(2.0)  # as peft's compiled hotswap has it
        yield "a scale in place", lambda: layer.scale_layer(1.25)
        yield "the scale", lambda: layer.set_scale("default", 3.0)
        yield "omega", lambda: layer.omega.update(default=7.0)
        yield "the gain", lambda: layer.gain.update(default=2.0)
        yield "the type", model.double
        yield "merging and back", lambda: (model.merge_adapter(), model.unmerge_adapter())


@doras
@pytest.mark.parametrize("kind", MODULES)
def test_weights_are_kept_until_something_changes(kind, dora, tmp_path):
    model, x = adapted(kind, use_dora=dora), inputs(kind)
    adapted(kind, use_dora=dora).save_pretrained(tmp_path)
    layer = model.base_model.model[0]
    for what, change in changes(model, tmp_path):
        check(model, x)
        with torch.no_grad():
            assert layer.formed(["default"]) is layer.formed(["default"]), what
            before = model(x)
        change()
        x = x.to(layer.base_layer.weight.dtype)
        with torch.no_grad():
            same = torch.equal(model(x), before.to(x.dtype))
        assert same == (what == "merging and back") or what == "the type", what
        check(model, x)
    assert cached_bytes(model) == layer.base_layer.weight.nbytes
    model(x)  # with gradients
    assert cached_bytes(model) == 0


def test_no_weight_is_kept_for_many_rows_or_a_merged_one():
    model, x = adapted("linear"), torch.randn(1025, 12)
    with torch.no_grad():
        whole = model(x)
        assert cached_bytes(model) == 0
        torch.testing.assert_close(model(x[:1024]), whole[:1024])
    assert cached_bytes(model) > 0
    model.merge_adapter()
    assert cached_bytes(model) == 0


def test_no_more_weights_are_kept_than_asked_for():
    model, x = adapted("linear", cached_weights=2), inputs("linear")
    for name in ("b", "c"):
        model.add_adapter(name, SineLoraConfig(r=3, target_modules=["0"], init_lora_weights=False, cached_weights=2))
    one = model.base_model.model[0].base_layer.weight.nbytes
    with torch.no_grad():
        for name, kept in (("default", 1), ("b", 2), ("c", 2)):
            model.set_adapter(name)
            model(x)
            assert cached_bytes(model) == kept * one
        model.delete_adapter("b")
        assert cached_bytes(model) == 0
        model = adapted("linear", cached_weights=0)
        model(x)
        assert cached_bytes(model) == 0


@doras
@torch.no_grad()
def test_a_token_costs_what_loras_does(dora):
    """Hidden size 512, one adapter and a mixed batch: no more FLOPs and no more calls of operators."""
    base = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    names = ["default", "b", "c", "d"]
    models = []
    for config in (LoraConfig, SineLoraConfig):
        options = {"use_dora": dora} if config is SineLoraConfig else {}
        options |= {"r": 8, "target_modules": ["0", "1", "2", "3"], "init_lora_weights": False}
        model = get_peft_model(copy.deepcopy(base), config(**options))
        for name in names[1:]:
            model.add_adapter(name, config(**options))
        models.append(model.eval())
    one, mixed = (torch.randn(1, 1, 512),), (torch.randn(4, 1, 512),)
    for args, options in ((one, {}), (mixed, {"adapter_names": names})):
        for model in models:
            model(*args, **options)  # forms the weights that are kept
        (lora_flops, lora_calls), (flops, calls) = (cost(model, *args, **options) for model in models)
        assert calls <= lora_calls
        assert flops <= lora_flops


def cost(model, *args, **options):
    """FLOPs and calls of torch's operators in a forward pass."""
    with FlopCounterMode(display=False) as flops, Calls() as calls:
        model(*args, **options)
    return flops.get_total_flops(), calls.count


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_adapters_made_in_inference_mode_compute_there():
    base = nn.Sequential(nn.Linear(12, 10))
    with torch.inference_mode():
        model = get_peft_model(base, SineLoraConfig(r=3, target_modules=["0"], init_lora_weights=False)).eval()
        x = torch.randn(2, 12)
        expected = model(x)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
        base[0].lora_B["default"].weight.mul_(2)
        assert not torch.equal(model(x), expected)
