"""The paper's language model: exact parameter counts, its init table, and seeds."""

import math
from types import SimpleNamespace

import pytest
import torch

from model_helpers import parameters
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import GlmBackbone, LanguageModelTask
from nlr_lab.training import Arm
from nonlinear_lowrank.errors import UserError

BASE = {"layers": 12, "width": 1024, "heads": 8, "hidden": 2752}
LARGE = {"layers": 24, "width": 2048, "heads": 16, "hidden": 5504}
# 10 pages of table: section 4.1.1; also facts/parameter_counts.json.
COUNTS = [
    pytest.param(BASE, 254_733_312, {64: 5.70, 128: 11.63, 256: 24.19}, id="base"),
    pytest.param(LARGE, 1_420_204_032, {64: 4.04, 128: 8.17, 256: 16.68}, id="large"),
]

TEXT = SimpleNamespace(vocab_size=97, tokenizer=SimpleNamespace(eos_token_id=5))


def task(vocab_size: int = 2048, **sizes) -> LanguageModelTask:
    sizes = {"layers": 2, "width": 64, "heads": 4, "hidden": 96, **sizes}
    return LanguageModelTask(text=TextData(vocab_size=vocab_size, sequence_length=32), backbone=GlmBackbone(**sizes))


@pytest.mark.parametrize(("sizes", "total", "percent"), COUNTS)
def test_parameter_counts_of_the_paper(sizes, total, percent):
    whole = task(**sizes)
    model = whole.build_on_meta(50257)
    assert parameters(model) == total
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    for rank, expected in percent.items():
        changed = Arm.parse(f"noble:rank={rank}").apply(whole.build_on_meta(50257))
        added = parameters(changed) - total
        assert round(100 * added / total, 2) == pytest.approx(expected)
        d, h = sizes["width"], sizes["hidden"]
        linears = [(d, d)] * 4 + [(d, 2 * h), (h, d)]
        assert added == sizes["layers"] * sum(rank * (a + b) + rank * rank + 4 * rank for a, b in linears)


def test_shape_of_the_backbone():
    model = task().build_model(TEXT)
    names = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    block = {f"self_attn.{letter}_proj" for letter in "qkvo"} | {"mlp.gate_up_proj", "mlp.down_proj"}
    assert names == {f"model.layers.{layer}.{name}" for layer in range(2) for name in block} | {"lm_head"}
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    config = model.config
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (5, None, None)
    assert config._attn_implementation == "sdpa"
    assert len(model.model.rotary_emb.inv_freq) == 16 // 2, "rotary positions turn the whole head"
    tokens = torch.randint(0, 97, (2, 32))
    assert model(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(math.log(97), abs=0.3)


def test_gate_is_gelu():
    model = task(layers=1).build_model(TEXT)
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 64)
    gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
    expected = mlp.down_proj(up * torch.nn.functional.gelu(gate))
    torch.testing.assert_close(mlp(x), expected)


def test_no_end_of_text_token():
    model = task().build_model(SimpleNamespace(vocab_size=97, tokenizer=SimpleNamespace(eos_token_id=None)))
    assert model.config.eos_token_id is None
    assert model.generation_config.eos_token_id is None


@pytest.mark.parametrize("dense_init", ["stock", "noble", "kaiming"])
def test_init_table(dense_init):
    model = task(width=256, hidden=320, heads=4, embedding_std=0.7, dense_init=dense_init).build_model(TEXT, seed=11)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.7, rel=0.03)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.03)
    for name, module in model.model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        d_in, weight = module.in_features, module.weight
        std = {"stock": 0.02, "noble": 0.5 / math.sqrt(d_in), "kaiming": 1 / math.sqrt(3 * d_in)}[dense_init]
        assert weight.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(weight.mean().item()) < 4 * std / math.sqrt(weight.numel())
        bounded = weight.abs().max().item() <= 1 / math.sqrt(d_in)
        assert bounded == (dense_init == "kaiming"), name


def test_init_follows_the_seed_alone():
    torch.manual_seed(1)
    one = task().build_model(TEXT, seed=3).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = task().build_model(TEXT, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before), "building draws nothing from the caller's generator"
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = task().build_model(TEXT, seed=4).state_dict()
    assert all(not torch.equal(one[name], other[name]) for name in one if "norm" not in name)


def test_embedding_and_head_are_the_same_in_all_arms():
    models = [task().build_model(TEXT, dense_init, seed=3) for dense_init in ("stock", "noble", "kaiming")]
    noble = Arm.parse("noble:rank=8").apply(task().build_model(TEXT, seed=3))
    for model in [*models[1:], noble]:
        assert torch.equal(model.model.embed_tokens.weight, models[0].model.embed_tokens.weight)
        assert torch.equal(model.lm_head.weight, models[0].lm_head.weight)
    names = "model.layers.1.mlp.down_proj.weight"
    assert len({model.get_parameter(names).sum().item() for model in models}) == 3


@pytest.mark.parametrize(
    "sizes",
    [
        {"layers": 0},
        {"width": 60, "heads": 8},
        {"width": 24, "heads": 8},
        {"hidden": -1},
        {"heads": True},
        {"embedding_std": 0.0},
        {"embedding_std": float("nan")},
        {"dropout": 1.0},
        {"dense_init": "xavier"},
    ],
)
def test_bad_sizes(sizes):
    with pytest.raises(
        UserError, match=next(reversed(sizes)) if len(sizes) == 1 and "dense_init" not in sizes else "."
    ):
        task(**sizes)
