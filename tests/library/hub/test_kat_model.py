"""Released Kolmogorov-Arnold transformers: their computation, written anew in float64, against our model."""

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageClassification

import nonlinear_lowrank as nlr
from nlr_lab.tasks.finetune.classification import ImageData, ImageTask
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nonlinear_lowrank.hub.card import loading_code
from nonlinear_lowrank.hub.kat import KatForImageClassification, released_model
from nonlinear_lowrank.hub.merging import merge_adapter
from refusals import assert_refused

WIDTH, HEADS, BLOCKS, PATCH = 16, 2, 2, 4


def random_state():
    """Tensors of a checkpoint by its names, as timm saves it: images of 8 x 8, 5 classes."""
    shapes = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, 5, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
    }
    sizes = {"head": (5, WIDTH)}
    for block in range(BLOCKS):
        at = f"blocks.{block}."
        sizes |= {f"{at}attn.qkv": (3 * WIDTH, WIDTH), f"{at}attn.proj": (WIDTH, WIDTH)}
        sizes |= {f"{at}mlp.fc1": (32, WIDTH), f"{at}mlp.fc2": (WIDTH, 32)}
        shapes |= {f"{at}{norm}.weight": (WIDTH,) for norm in ("norm1", "norm2")}
        for act in ("act1", "act2"):
            shapes |= {f"{at}mlp.{act}.weight_numerator": (1, 6), f"{at}mlp.{act}.weight_denominator": (8, 4)}
    shapes |= {f"{name}.weight": shape for name, shape in sizes.items()} | {"norm.weight": (WIDTH,)}
    biases = {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items() if name.endswith(".weight")}
    return {name: 0.4 * torch.randn(shape) for name, shape in (shapes | biases).items()}


def released_logits(state, images):
    """The authors' forward pass: (B, 3, 8, 8) -> (B, 5)."""
    own = {name: value.double() for name, value in state.items()}

    def linear(x, name):
        return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    def normed(x, name):
        return F.layer_norm(x, (WIDTH,), own[f"{name}.weight"], own[f"{name}.bias"], 1e-6)

    def rational(x, name):
        a, b = own[f"{name}.weight_numerator"][0], own[f"{name}.weight_denominator"].abs()
        b = b.repeat_interleave(x.shape[-1] // 8, dim=0)  # (C, 4)
        above = sum(a[power] * x**power for power in range(6))
        return above / (1 + sum(b[:, power] * x.abs() ** (power + 1) for power in range(4)))

    rows = images.double().unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # (B, 3, 2, 2, 4, 4)
    x = torch.einsum("bchwij,dcij->bhwd", rows, own["patch_embed.proj.weight"]).flatten(1, 2)
    x = torch.cat([own["cls_token"].expand(len(x), 1, WIDTH), x + own["patch_embed.proj.bias"]], 1) + own["pos_embed"]
    for block in range(BLOCKS):
        at = f"blocks.{block}."
        q, k, v = linear(normed(x, f"{at}norm1"), f"{at}attn.qkv").chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        x = x + linear((weights @ v).transpose(1, 2).flatten(2), f"{at}attn.proj")
        y = linear(rational(normed(x, f"{at}norm2"), f"{at}mlp.act1"), f"{at}mlp.fc1")
        x = x + linear(rational(y, f"{at}mlp.act2"), f"{at}mlp.fc2")
    return linear(normed(x, "norm")[:, 0], "head")


@pytest.fixture
def images():
    return torch.randn(3, 3, 8, 8)


@torch.no_grad()
def test_released_model_computes_what_theirs_does_and_is_loaded_again(images, tmp_path):
    state = random_state()
    model = released_model(state, heads=HEADS)
    expected = released_logits(state, images)
    torch.testing.assert_close(model(images).logits.double(), expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    for again in (AutoModelForImageClassification.from_pretrained(tmp_path), nlr.hub.load_model(tmp_path)):
        assert torch.equal(again(images).logits, model(images).logits)
    half = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(
        half.vit.layers[1].mlp.input_fn.rational_numerator, model.vit.layers[1].mlp.input_fn.rational_numerator
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("pos_embed"), "no 'pos_embed': it is not a KAT's"),
        (lambda state: state.pop("blocks.1.norm1.bias"), r"vit.layers.1.layernorm_before.bias is missing, not \(16,\)"),
        (lambda state: state.update({"blocks.1.ls1.gamma": torch.ones(16)}), "ls1.gamma is .*, not unknown"),
    ],
)
def test_state_of_another_model_is_refused(change, words):
    state = random_state()
    change(state)
    assert_refused(words, released_model, state, heads=HEADS)
    assert_refused("16 does not divide into 3 heads", released_model, random_state(), heads=3)
    assert_refused("give their number as heads=", released_model, random_state())


def test_drawn_model_starts_with_the_identity_and_silu():
    model = KatForImageClassification(released_model(random_state(), heads=HEADS).config)
    x = torch.linspace(-3, 3, 48).view(3, 16)
    assert torch.equal(model.vit.layers[0].mlp.input_fn(x), x)
    torch.testing.assert_close(model.vit.layers[0].mlp.activation_fn(x), F.silu(x), rtol=0, atol=1e-2)


def test_nora_tunes_the_coefficients_of_a_released_model(images, tmp_path):
    released_model(random_state(), heads=HEADS).save_pretrained(tmp_path)
    pretrained = Pretrained(checkpoint=str(tmp_path))
    pixels = ImageTask(images=ImageData(source="unread"), model=pretrained).pixels()
    assert (pixels.size, pixels.mean, pixels.std) == (8, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    released_model(random_state(), heads=HEADS).save_pretrained(tmp_path)
    assert (tmp_path / "preprocessor_config.json").read_text() == "{}", "a user's own stays"
    base = pretrained.load("image", 3, seed=0)
    assert_refused("has no b0", peft.get_peft_model, base, nlr.NoraConfig(tuning="constants"))
    with torch.no_grad():
        before = base(images).logits
    settings = {"target_modules": ["activation_fn"], "modules_to_save": ["classifier"]}
    model = peft.get_peft_model(base, nlr.NoraConfig(r=2, groups=8, form="sum_of_abs", **settings))
    assert torch.equal(model(images).logits, before)
    model(images, labels=torch.tensor([0, 1, 2])).loss.backward()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad and "classifier" not in name}
    assert sum(each.numel() for each in trained.values()) == BLOCKS * 8 * (5 * 2 + 2 + 4 * 2 + 2)
    assert all(each.grad.any() for name, each in trained.items() if "_b." in name)
    # What the card says loads it, and merging reads its base too.
    model.save_pretrained(tmp_path / "adapter")
    known = {}
    exec(loading_code(tmp_path / "adapter", str(tmp_path)), known)
    expected = model.eval()(images).logits
    torch.testing.assert_close(known["model"].eval()(images).logits, expected)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=str(tmp_path))
    merged = AutoModelForImageClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged.eval()(images).logits, expected)
