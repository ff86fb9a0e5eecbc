"""Parameters, FLOPs and kept bytes by layer, against torch's own counters and the published counts."""

import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AlbertConfig,
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
)

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, batch
from nlr_lab.plan.inspect import format_cost, inspect_model
from nonlinear_lowrank.analysis.cost import active_parameters, count_parameters, model_cost
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.noble import layer as noble_layer
from nonlinear_lowrank.methods.noble.op import noble_linear_reference
from refusals import assert_refused

BATCH, LENGTH = 2, 9


def _noble(family: str) -> nn.Module:
    model = FAMILIES[family]()
    nlr.augment(model, nlr.NobleConfig(rank=8), verbose=False)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_equal_torchs_count_and_parameters_include_the_branches_share(family, monkeypatch):
    # torch's counter knows no in-place addmm_ and no fused CPU attention: the plain formulas, same products.
    monkeypatch.setattr(noble_layer, "noble_linear", noble_linear_reference)
    length = 17 if family == "vit" else LENGTH  # 16 patches and the class token
    costs = []
    for model in (FAMILIES[family]().eval(), _noble(family).eval()):
        model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**batch(model, size=BATCH, length=LENGTH))
        cost = model_cost(model, length)
        expected = counter.get_total_flops()
        if family == "vit":
            # Counted for all 17 tokens: the patch embedding sees 16 of them, the classifier 1.
            patch, head = 2 * model.vit.embeddings.patch_embeddings.projection.weight.numel(), 2 * 32 * 5
            expected += BATCH * (patch + 16 * head)
        assert BATCH * length * cost.flops == expected
        assert cost.parameters == count_parameters(model) == sum(p.numel() for p in model.parameters())
        assert not cost.notes
        costs.append(cost)
    plain, noble = costs
    assert noble.parameter_ratio == noble.parameters / plain.parameters
    assert noble.parameters - noble.branch_parameters == plain.parameters
    assert noble.flops - noble.branch_flops == plain.flops
    assert noble.branch_flops > 0
    (head,) = [row for row in noble.rows if row.kind == "head"]
    if family == "gpt2":  # whose head is the embedding
        assert (head.parameters, head.flops) == (0, 2 * 67 * 32)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_bytes_equal_those_of_a_step(family, bf16):
    model = _noble(family)
    cost = inspect_model(model, LENGTH, BATCH, bf16=bf16)
    inputs = batch(model, size=BATCH, length=LENGTH)
    if "input_ids" in inputs:
        inputs["labels"] = inputs["input_ids"].clone()

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(**inputs)

    assert not cost.notes
    assert cost.kept_bytes == saved_bytes(step, parameters=[*model.parameters(), *model.buffers()])
    assert cost.kept_bytes == sum(row.kept_bytes for row in cost.rows)
    assert cost.kept_dtype == ("bfloat16" if bf16 else "float32")


def test_inspection_changes_nothing():
    model = _noble("llama").eval()
    model.model.layers[0].train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    inspect_model(model, LENGTH, BATCH)
    assert modes == [module.training for module in model.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_large_models_are_inspected_by_their_config():
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16)
    cost = inspect_model(config, 1024, 8, bf16=True)
    assert cost.parameters > 1.2e9
    assert not cost.notes
    down = next(row for row in cost.rows if row.name.endswith("0.mlp.down_proj"))
    assert down.kept_bytes == 8 * 1024 * 5632 * 2
    attention = next(row for row in cost.rows if row.name == "model.layers.0.self_attn")
    assert attention.flops == 4 * 1024 * 2048


class _Mixer(nn.Module):
    """A module of the user's own, with a part that nobody can count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 7)
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)
        self.experts = nn.Parameter(torch.zeros(2, 7, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.attention(y, y, y, need_weights=False)[0] @ self.experts[0]


def test_plain_modules_need_inputs_for_saved_bytes():
    model = _Mixer()
    bare = inspect_model(model, 5)
    assert bare.kept_bytes is None
    assert any("(in Python: inputs=)" in note for note in bare.notes)
    assert any("_Mixer" in note and "not counted" in note for note in bare.notes)
    assert bare.flops == 2 * 6 * 7 + 2 * 4 * 7 * 7 + 4 * 5 * 7
    x = torch.randn(3, 5, 6)
    cost = inspect_model(model, 5, inputs={"x": x})
    assert cost.batch_size == 3
    assert cost.kept_bytes == saved_bytes(model, x)


def test_passes_that_need_contents_are_noted():
    class Peeking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    cost = inspect_model(Peeking(4, 4), 5, inputs={"x": torch.randn(2, 4)})
    assert cost.kept_bytes is None
    assert any("saved bytes unknown" in note for note in cost.notes)
    assert cost.parameters == 20


def test_table_and_json_hold_the_totals():
    cost = inspect_model(_noble("glm"), LENGTH, BATCH)
    folded, every = format_cost(cost), format_cost(cost, every_layer=True)
    row = next(line.split() for line in folded.splitlines() if line.startswith("model.layers.*.self_attn.q_proj"))
    assert row[1:4] == ["2", "3,264", "1,216"]  # 2 x (32 x 32 + 8 x (32 + 32) + 8 x 8 + 4 x 8)
    assert "model.layers.1.self_attn.q_proj" in every
    assert f"{cost.parameters:,}" in folded
    assert f"{cost.kept_bytes:,}" in folded
    assert all(len(line) <= 120 for line in folded.splitlines())
    data = json.loads(cost.to_json())
    assert data["parameters"] == cost.parameters
    assert sum(layer["flops"] for layer in data["layers"]) == data["flops"] == cost.flops
    assert sum(layer["kept_bytes"] for layer in data["layers"]) == data["kept_bytes"]


def test_bad_input_raises():
    assert_refused("sequence_length must be a positive integer", model_cost, nn.Linear(2, 2), 0)
    assert_refused("batch_size must be", inspect_model, AlbertConfig(), 5, 0)


@pytest.mark.parametrize("branch", [None, {}, {"expert_down": "shared"}], ids=["plain", "noble", "shared-down"])
def test_experts_count_as_many_as_a_token_goes_through(branch):
    d, width, layers, count, active, r = 32, 16, 2, 8, 2, 8
    config = MixtralConfig(
        hidden_size=d,
        intermediate_size=width,
        num_hidden_layers=layers,
        vocab_size=50,
        head_dim=16,
        num_local_experts=count,
        num_experts_per_tok=active,
        num_attention_heads=2,
        num_key_value_heads=2,
        output_router_logits=True,
    )
    model = MixtralForCausalLM(config)
    if branch is not None:
        nlr.augment(model, nlr.NobleConfig(rank=r, **branch), include=r".*experts", verbose=False)
    expert, added, fewer = 3 * d * width, 0, 0
    if branch is not None:
        downs = 0 if branch else r * (d + width)
        added = downs + r * (2 * width + d) + 2 * (r * r + 4 * r)
        fewer = 2 * r * (d + width + 2 * width + d) + 4 * r * r  # of products
    idle = layers * (count - active) * (expert + added)
    one, two = (inspect_model(model, LENGTH, size) for size in (1, 2))
    assert one.active_parameters == count_parameters(model) - idle == active_parameters(model)
    router, attention = 2 * count * d, 4 * 2 * d * d + 4 * LENGTH * d
    assert one.flops == layers * (attention + router + active * (2 * expert + fewer)) + 2 * 50 * d
    assert not one.notes
    for cost, size in ((one, 1), (two, 2)):
        inputs = batch(model, size=size, length=LENGTH)
        assert cost.kept_bytes == saved_bytes(model.train(), **inputs, labels=inputs["input_ids"])
    assert f"{one.active_parameters:,} parameters are active" in format_cost(one)
    assert json.loads(one.to_json())["active_parameters"] == one.active_parameters


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4),
        GPT2Config(vocab_size=67, n_embd=32, n_layer=7, n_head=4, bos_token_id=0, eos_token_id=0),
    ],
    ids=lambda config: config.model_type,
)
def test_four_blocks_of_a_stack_of_equal_ones_are_traced(config, alike):
    model = AutoModelForCausalLM.from_config(config)
    blocks = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    nlr.augment(model, nlr.NobleConfig(rank=8), exclude=None if alike else r".*\.4\..*", verbose=False)
    ran = []
    hooks = [each.register_forward_hook(lambda block, *_: ran.append(list(blocks).index(block))) for each in blocks]
    cost = inspect_model(model, LENGTH, BATCH)
    assert len(blocks) == 7
    assert len(ran) == (4 if alike else 7)
    for hook in hooks:
        hook.remove()
    ids = torch.randint(0, 67, (BATCH, LENGTH))
    model.train()
    expected = saved_bytes(lambda: model(input_ids=ids, labels=ids), parameters=[*model.parameters(), *model.buffers()])
    assert cost.kept_bytes == expected


def test_latent_attention_has_heads_of_two_widths():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "q_lora_rank": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    experts = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    config = AutoConfig.for_model("deepseek_v3", **sizes, **heads, **experts, qk_nope_head_dim=16, v_head_dim=12)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(64, (1, LENGTH)))
    assert LENGTH * model_cost(model, LENGTH).flops == counter.get_total_flops()
