"""Models that are trained from scratch: their init tables, seeds and architectures."""

import math
from types import SimpleNamespace

import pytest
import torch

from nlr_lab.tasks.images.tokens import ImageTokenData, ImageTokenTask
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import GlmBackbone, LanguageModelTask, OptBackbone, OptLanguageModelTask
from pretraining_helpers import image_task, masked_task

TOKENS = SimpleNamespace(eos_token_id=5, pad_token_id=0, mask_token_id=4)
PREPARED = SimpleNamespace(vocab_size=97, tokenizer=TOKENS, classes=("a", "b", "c"))
WIDE = {"layers": 2, "width": 256, "heads": 4, "hidden": 320, "embedding_std": 0.7}
TEXT = TextData(sequence_length=32)


def make_task(kind, root, **sizes):
    sizes = {**WIDE, **sizes}
    if kind == "glm":
        return LanguageModelTask(text=TEXT, backbone=GlmBackbone(**sizes))
    if kind == "opt":
        return OptLanguageModelTask(text=TEXT, backbone=OptBackbone(**sizes))
    if kind == "eurobert":
        del sizes["embedding_std"]
        return masked_task(sizes=sizes)
    if kind == "image-tokens":
        return ImageTokenTask(tokens=ImageTokenData(codes=97, classes=3), backbone=GlmBackbone(**sizes))
    del sizes["embedding_std"]
    return image_task(root, backbone=sizes) if kind == "vit" else image_task(root, convnext={"widths": (64, 128)})


KINDS = ("glm", "opt", "eurobert", "image-tokens", "vit", "convnext")


@pytest.mark.parametrize("dense_init", ["stock", "noble", "kaiming"])
@pytest.mark.parametrize("kind", KINDS)
def test_init_follows_the_table(tmp_path, kind, dense_init):
    task = make_task(kind, tmp_path)
    model, plain = (task.build_model(PREPARED, init, seed=11) for init in (dense_init, None))
    loose = kind == "vit" and dense_init == "stock"  # a normal that is cut at two deviations keeps 0.88 of its width
    inner = getattr(model, "base_model", model)
    for name, module in inner.named_modules():
        if isinstance(module, torch.nn.Linear):
            d_in, weight = module.in_features, module.weight
            std = {"stock": 0.02, "noble": 0.5 / math.sqrt(d_in), "kaiming": 1 / math.sqrt(3 * d_in)}[dense_init]
            assert weight.std().item() == pytest.approx(std, rel=0.13 if loose else 0.03), name
            assert abs(weight.mean().item()) < 4 * std / math.sqrt(weight.numel())
            if dense_init != "stock":
                assert (weight.abs().max() <= 1 / math.sqrt(d_in)) == (dense_init == "kaiming"), name
            assert module.bias is None or not module.bias.any()
        else:
            for local, parameter in module.named_parameters(recurse=False):
                assert torch.equal(parameter, plain.base_model.get_submodule(name).get_parameter(local)), name
    if kind not in ("vit", "convnext"):
        std = 1.0 if kind == "eurobert" else 0.7
        assert model.get_input_embeddings().weight.std().item() == pytest.approx(std, rel=0.03)
        head = model.get_output_embeddings().weight
        assert head.std().item() == pytest.approx(std if kind == "opt" else 0.02, rel=0.03)
    if kind == "opt":
        assert model.model.decoder.embed_positions.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_init_follows_the_seed_alone(tmp_path, kind):
    task = make_task(kind, tmp_path, layers=1, width=32, hidden=48)
    model = task.build_model(PREPARED, seed=3)
    if kind in ("vit", "convnext"):
        assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    one = model.state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = task.build_model(PREPARED, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before), "building draws nothing from the caller's generator"
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = task.build_model(PREPARED, seed=4).state_dict()
    drawn = [name for name in one if one[name].ndim > 1 and one[name].any() and "cls_token" not in name]
    assert all(not torch.equal(one[name], other[name]) for name in drawn)


def test_glm_is_the_papers_block():
    model = make_task("glm", None, width=64, hidden=96).build_model(PREPARED)
    names = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    block = {f"self_attn.{letter}_proj" for letter in "qkvo"} | {"mlp.gate_up_proj", "mlp.down_proj"}
    assert names == {f"model.layers.{layer}.{name}" for layer in range(2) for name in block} | {"lm_head"}
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    config = model.config
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (5, None, None)
    assert config._attn_implementation == "sdpa"
    assert len(model.model.rotary_emb.inv_freq) == 16 // 2, "rotary positions turn the whole head"
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 64)
    gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
    torch.testing.assert_close(mlp(x), mlp.down_proj(up * torch.nn.functional.gelu(gate)))
    endless = SimpleNamespace(vocab_size=97, tokenizer=SimpleNamespace(eos_token_id=None))
    model = make_task("glm", None, width=64).build_model(endless)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (None, None)


def test_opt_is_gpt3s_block():
    task = make_task("opt", None, width=64, hidden=256, embedding_std=0.02)
    model = task.build_model(PREPARED, seed=3).train()
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias") and "norm" not in name]
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert (model.config.eos_token_id, model.config.pad_token_id) == (5, None)
    tokens = torch.randint(0, 97, (2, 32))
    first, second = (model(input_ids=tokens, labels=tokens).loss for _ in range(2))
    assert torch.equal(first, second), "no dropout"
    assert first.item() == pytest.approx(math.log(97), abs=0.3)
    layer, x = model.model.decoder.layers[0], torch.randn(3, 64)
    torch.testing.assert_close(layer.activation_fn(x), torch.nn.functional.gelu(x))
    assert layer.do_layer_norm_before
    apart = OptLanguageModelTask(text=TEXT, backbone=task.backbone, tie_embeddings=False).build_model(PREPARED)
    assert apart.lm_head.weight is not apart.model.decoder.embed_tokens.weight


def test_eurobert_attends_both_ways_and_positions_matter():
    model = make_task("eurobert", None, width=32, hidden=48, heads=2).build_model(PREPARED, "kaiming").double().eval()
    tokens = torch.randint(5, 97, (1, 16))
    later = tokens.clone()
    later[0, -1] = (tokens[0, -1] + 1) % 97
    with torch.no_grad():
        before, after = model(input_ids=tokens).logits, model(input_ids=later).logits
        turned = model(input_ids=tokens.flip(1)).logits.flip(1)
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-4
    assert (before - turned).abs().max() > 1e-3
    names = {name.split(".")[-1] for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    assert names == {*(f"{letter}_proj" for letter in "qkvo"), "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    config = model.config
    assert (config.pad_token_id, config.mask_token_id, config.hidden_act) == (0, 4, "gelu")
    assert model.model.rotary_emb.inv_freq.shape == (8,), "rotary positions turn the whole head"
