"""NOBLE's dense part as a linear of its own: what is done to it, and its names in memory and in files."""

import copy

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, GteConfig, GteForMaskedLM

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES
from nonlinear_lowrank import NobleConfig, NobleConv1D, NobleLinear
from refusals import assert_refused

CONFIGS = {"add": NobleConfig(rank=4), "biased": NobleConfig(rank=4, up_bias=True, output_scale=1.5)}
WHOLE = StateDictOptions(full_state_dict=True)
CONFIGS["gated"] = NobleConfig(rank=4, fusion="gated", activation="silu")


class Doubling(nn.Linear):
    """A converter's linear: the same tensors, with a forward of its own."""

    @classmethod
    def of(cls, linear):
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def forward(self, x):
        return 2 * super().forward(x)


def _numbers(layer, x):
    layer.zero_grad()
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), *(each.grad.clone() for _, each in sorted(layer.named_parameters()))]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_converted_dense_part_acts_and_the_branch_stays(config):
    layer, x = NobleLinear(12, 10, config=config).double(), torch.randn(5, 12, dtype=torch.float64)
    nn.init.normal_(layer.noble_up)
    nn.init.normal_(layer.dense.bias)
    with torch.no_grad():
        layer.branch_enabled = False
        dense = layer(x)
        layer.branch_enabled = True
        gate = 1 - torch.sigmoid(layer.noble_fusion) if config.fusion == "gated" else 0
        wanted = layer(x) + (1 - gate) * config.scale * dense
    for name, child in list(layer.named_children()):
        setattr(layer, name, Doubling.of(child))
    assert sum(name.startswith("noble_") for name, _ in layer.named_parameters()) >= 4
    found = _numbers(layer, x)
    torch.testing.assert_close(found[0], wanted)
    assert all(bool(each.any()) for each in found[1:])


HOOKS = ["register_forward_hook", "register_forward_pre_hook"]
HOOKS += ["register_full_backward_hook", "register_full_backward_pre_hook"]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("make", [NobleLinear, NobleConv1D])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hooked_dense_part_is_called_and_gives_the_same_numbers(hook, make, config):
    layer = make(10, 12, config=config).double() if make is NobleConv1D else make(12, 10, config=config).double()
    nn.init.normal_(layer.noble_up)
    nn.init.normal_(layer.dense.bias)
    x, calls = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True), []
    wanted = _numbers(layer, x)
    getattr(layer.dense, hook)(lambda *_: calls.append(1))
    torch.testing.assert_close(_numbers(layer, x), wanted)
    assert calls == [1]


def test_layers_of_one_input_are_computed_alone_where_one_is_converted():
    model = FAMILIES["glm"]().double()
    nlr.augment(model, NobleConfig(rank=4, fuse_shared_inputs=True), verbose=False)
    tokens = torch.arange(9)[None]
    attention = model.model.layers[0].self_attn
    wanted = model(tokens).logits
    attention.k_proj.dense.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(model(tokens).logits, wanted)
    attention.k_proj.dense = Doubling.of(attention.k_proj.dense)
    assert not torch.allclose(model(tokens).logits, wanted)


def test_a_loop_over_all_modules_redraws_by_the_layers_table():
    layer = nn.Sequential(NobleLinear(400, 300, config=NobleConfig(rank=4, dense_scale=3.0)))
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert layer[0].weight.std().item() == pytest.approx(3.0 / 20, rel=0.05)


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_model_inside_ddp_is_refused(process_group):
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16)))
    assert_refused("augment it, then wrap it", _augmented, wrapped)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("wrapped", [lambda model: model, torch.compile, fully_shard, DistributedDataParallel])
def test_distributed_state_dicts_load_into_wrapped_models(wrapped, full, process_group):
    layers = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(3))
    plain, model, other = map(_augmented, layers)
    wrapped_model, wrapped_other = wrapped(model), wrapped(other)
    options = StateDictOptions(full_state_dict=full)
    set_model_state_dict(wrapped_other, get_model_state_dict(wrapped_model, options=options), options=options)
    whole, again = (get_model_state_dict(each, options=WHOLE) for each in (wrapped_model, wrapped_other))
    assert {"0.dense.weight", "2.noble_up"} < whole.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    plain.load_state_dict({name.replace("dense.", ""): tensor for name, tensor in whole.items()})
    x = torch.randn(3, 16)
    torch.testing.assert_close(plain(x), wrapped_model(x))


def test_activations_are_drawn_after_sharding(process_group):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        nlr.augment(model, nlr.RationalConfig(groups=2, anchor="exact"), verbose=False)
    fully_shard(model)
    model.to_empty(device="cpu")
    model[1].reset_parameters()
    x = torch.randn(3, 8)
    for each in (model[0], model[2]):
        nn.init.eye_(each.weight.to_local())
        nn.init.zeros_(each.bias.to_local())
    torch.testing.assert_close(model(x), nn.functional.gelu(x))


def _augmented(model):
    nlr.augment(model, NobleConfig(rank=4), verbose=False)
    return model


@pytest.mark.parametrize("include", [r".*", r".*layers\.0\..*", r".*[qv]_proj", r".*layers\.1\..*k_proj"])
def test_linears_that_files_hold_as_one_tensor_come_back(include, tmp_path):
    """transformers splits these files' q, k and v, and gate and up."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    model = GteForMaskedLM(GteConfig(**sizes, vocab_size=67)).eval()
    model.save_pretrained(tmp_path / "plain")
    nlr.augment(model, NobleConfig(rank=4, up_scale=1.0), include=include, verbose=False)
    model.save_pretrained(tmp_path / "out")
    files = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert not any(".dense." in name for name in files if "attn" in name or "mlp" in name)
    if include == r".*":
        assert load_file(tmp_path / "plain" / "model.safetensors").keys() <= files
    tokens = torch.arange(9)[None]
    loaded = type(model).from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == files


@pytest.mark.parametrize("config", [nlr.NonlinearQueryConfig(), nlr.QKNormConfig(), nlr.SineLowRankConfig(rank=4)])
def test_layers_without_a_linear_of_such_files_come_back(config, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = GteForMaskedLM(GteConfig(**sizes, vocab_size=67)).eval()
    nlr.augment(model, config, verbose=False)
    model.save_pretrained(tmp_path / "out")
    tokens = torch.arange(9)[None]
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    del loaded._weight_conversions  # as `dequantize` of transformers 5.24 does
    loaded.save_pretrained(tmp_path / "again")
    names = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("out", "again")]
    assert names[0] == names[1]


def test_transformers_finds_the_base_with_branches_of_an_adapter(tmp_path):
    _augmented(FAMILIES["llama"]()).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    tokens = torch.arange(9)[None]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_plain_weights_load_into_an_augmented_model(tmp_path):
    """Up-cycling: the config says what is new, the files are the plain model's."""
    plain = FAMILIES["llama"]()
    plain.save_pretrained(tmp_path)
    model = _augmented(FAMILIES["llama"]())
    with pytest.raises(nlr.UserError, match=r"tensors .* missing"):
        type(model).from_pretrained(tmp_path, config=model.config)
    found = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not found.unexpected_keys
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, plain.model.layers[1].self_attn.q_proj.weight)


@pytest.mark.parametrize("settings", [{}, {"share_down": "qkv"}, {"share_down": "qkv", "fuse_shared_inputs": True}])
def test_offloaded_models_compute_the_same(settings, tmp_path):
    model, tokens = FAMILIES["llama"]().eval(), torch.arange(9)[None]
    nlr.augment(model, NobleConfig(rank=4, up_scale=1.0, **settings), verbose=False)
    wanted = model(tokens).logits
    offloaded = copy.deepcopy(model)
    accelerate.cpu_offload(offloaded, execution_device="cpu")
    assert torch.equal(offloaded(tokens).logits, wanted)
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert torch.equal(model(tokens).logits, wanted)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj.dense", "v_proj.dense"]], ids=["all-linear", "named"])
def test_lora_of_peft_goes_onto_the_dense_part(targets):
    model, tokens = _augmented(FAMILIES["llama"]().double()), torch.arange(9)[None]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).double()
    with torch.no_grad():
        wanted = adapted(tokens).logits
        merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, wanted)
    assert isinstance(merged.model.layers[0].self_attn.q_proj, NobleLinear)
