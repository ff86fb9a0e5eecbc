"""Which activations NoRA finds in real models, which it leaves and names, and what it refuses."""

import types

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from peft import get_peft_model
from torch import nn

import zoo
from adapter_rows import PEFT_WARNINGS
from nonlinear_lowrank import NoraConfig, UserError
from nonlinear_lowrank.adapters.nora import NoraActivation

pytestmark = pytest.mark.filterwarnings(*PEFT_WARNINGS)

CONV = {"num_channels": 3, "hidden_sizes": [16, 32], "depths": [1, 2], "num_labels": 5}
TEXT = {**zoo.SIZES, "vocab_size": 67, "intermediate_size": 48, "max_position_embeddings": 64}
GATED = {**zoo.SIZES, **zoo.TOKENS, "intermediate_size": 48, "num_key_value_heads": 2}
IMAGES = "AutoModelForImageClassification"
DISTILBERT = {"vocab_size": 67, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}
BERT_MLP = "bert.encoder.layer.{}.intermediate.intermediate_act_fn"
BLOCKS = "model.layers.{}.mlp"


def two(name):
    return {name.format(0), name.format(1)}


# model: (made, names of the activations that are found, width)
FOUND = {
    "vit": (zoo.vit, two("vit.layers.{}.mlp.activation_fn"), 48),
    "dinov2": (
        lambda: hf.Dinov2ForImageClassification(
            hf.Dinov2Config(**zoo.SIZES, mlp_ratio=2, image_size=16, patch_size=4, num_labels=5)
        ),
        two("dinov2.encoder.layer.{}.mlp.activation_fn"),
        64,
    ),
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)), two(BERT_MLP), 48),
    "gpt2": (zoo.gpt2, two("transformer.h.{}.mlp.act"), 128),
    "opt": (zoo.opt, two("model.decoder.layers.{}.activation_fn"), 48),
    "llama": (zoo.llama, two(f"{BLOCKS}.act_fn"), 48),
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GATED)), two(f"{BLOCKS}.act_fn"), 48),
    "glm": (zoo.glm, two(f"{BLOCKS}.activation_fn"), 48),
    "phi3": (lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GATED)), two(f"{BLOCKS}.activation_fn"), 48),
    "eurobert": (zoo.eurobert, two(f"{BLOCKS}.act_fn"), 48),
    "convnext": (
        lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(**CONV, num_stages=2, image_size=16)),
        {f"convnext.encoder.stages.{place}.act" for place in ("0.layers.0", "1.layers.0", "1.layers.1")},
        None,
    ),
    # Channels behind the batch, some of them behind a residual sum.
    "resnet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=16, hidden_sizes=[16], depths=[1], layer_type="basic", num_labels=5)
        ),
        {
            "resnet.embedder.embedder.activation",
            *(f"resnet.encoder.stages.0.layers.0.{place}activation" for place in ("", "layer.0.")),
        },
        16,
    ),
}


def inputs_of(model):
    if not hasattr(model.config, "vocab_size"):
        size = getattr(model.config, "image_size", 20)
        return {"pixel_values": torch.randn(2, 3, size, size)}
    return {"input_ids": torch.randint(2, model.config.vocab_size, (2, 9))}


@pytest.mark.parametrize("name", FOUND)
def test_finds_the_mlps_activations_and_their_channels(name):
    """Shifting one group of one layer moves that group's channels and no others, wherever the channels are."""
    make, names, width = FOUND[name]
    model = get_peft_model(make().eval(), NoraConfig(groups=4, anchor="exact"))
    report = model.base_model.report()
    assert set(report.activations) == names
    if width:
        assert all(f"4 groups of {width} channels" in what for what in report.activations.values())
    layers = {name: model.base_model.model.get_submodule(name) for name in names}
    seen = {}
    for key, layer in layers.items():
        layer.register_forward_hook(lambda _, args, y, key=key: seen.update({key: (args[0], y)}))
        with torch.no_grad():
            layer.nlr_nora_numerator_b["default"][2] = 10.0
    with torch.no_grad():
        model(**inputs_of(model))
    assert seen.keys() == names
    for key, (x, y) in seen.items():
        moved = y != layers[key].base_layer(x)
        channels = moved.movedim(layers[key].channel_dim, 0).flatten(1).any(1)
        group = torch.arange(len(channels)) * 4 // len(channels)
        assert channels.tolist() == (group == 2).tolist(), key
        assert len(channels) == (width or layers[key].width)


@pytest.mark.parametrize("name", ["convnext", "resnet", "bert", "phi3"])
def test_merged_models_of_every_layout_are_saved_and_loaded(name, tmp_path):
    base = FOUND[name][0]().eval()
    inputs = inputs_of(base)
    model = get_peft_model(base, NoraConfig(groups=4, init_weights=False)).eval()
    with torch.no_grad():
        adapted = model(**inputs).logits
        merged = model.merge_and_unload(safe_merge=True)
        expected = merged(**inputs).logits
        torch.testing.assert_close(expected, adapted, atol=1e-5, rtol=1e-5)
        merged.save_pretrained(tmp_path)
        auto = getattr(hf, {"bert": "AutoModelForMaskedLM", "phi3": "AutoModelForCausalLM"}.get(name, IMAGES))
        assert torch.equal(auto.from_pretrained(tmp_path).eval()(**inputs).logits, expected)


# What is left, and what cannot be swapped.

SPOKEN_OF = {
    "bert-head-and-pooler": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT)),
        {"bert.pooler.activation": "pooler"},
        {},
    ),
    "bert-mlm-head": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)),
        {"cls.predictions.transform.transform_act_fn": "head"},
        {},
    ),
    "electra": (
        lambda: hf.ElectraForSequenceClassification(hf.ElectraConfig(**TEXT, embedding_size=16)),
        {"classifier.activation": "head"},
        {},
    ),
    "roberta": (
        lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT)),
        {},
        {"classifier": "RobertaClassificationHead calls tanh"},
    ),
    "deberta-v2": (
        lambda: hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**TEXT)),
        {},
        {"pooler": "ContextPooler looks its activation up in its forward"},
    ),
    "distilbert": (
        lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**DISTILBERT)),
        {},
        {"": "DistilBertForSequenceClassification calls ReLU"},
    ),
    "vit-pooler": (
        lambda: hf.ViTModel(hf.ViTConfig(**zoo.SIZES, intermediate_size=48, image_size=16, patch_size=4)),
        {"pooler.activation": "pooler"},
        {},
    ),
}


@pytest.mark.parametrize("name", SPOKEN_OF)
def test_poolers_heads_and_functions_are_left_alone_and_named(name, capsys):
    make, left, functional = SPOKEN_OF[name]
    model = get_peft_model(make().eval(), NoraConfig(groups=4))
    said = capsys.readouterr().out
    report = model.base_model.report()
    assert str(report) in said
    assert len(report.activations) == 2
    assert dict(report.left) == left
    assert dict(report.functional) == functional
    for where, why in left.items():
        assert f"left       {where}: {why}" in said
        assert not isinstance(model.base_model.model.get_submodule(where), NoraActivation)
    for where, why in functional.items():
        assert f"functional {where or 'the model'}: {why}; it cannot be swapped" in said
    model(**inputs_of(model))


def test_a_pooler_is_taken_when_it_is_asked_for():
    base = hf.BertForSequenceClassification(hf.BertConfig(**TEXT))
    model = get_peft_model(base, NoraConfig(groups=4, target_modules=["pooler.activation"]))
    report = model.base_model.report()
    assert list(report.activations) == ["bert.pooler.activation"]
    assert "tanh as degree 5/4" in report.activations["bert.pooler.activation"]
    assert set(report.left) == two(BERT_MLP)


def test_targets_by_name_layer_and_exclusion():
    def found(**options):
        return set(get_peft_model(zoo.llama(), NoraConfig(groups=4, **options)).base_model.report().activations)

    assert found(target_modules=["act_fn"], layers_to_transform=[1]) == {"model.layers.1.mlp.act_fn"}
    assert found(exclude_modules=r".*layers\.0\..*") == {"model.layers.1.mlp.act_fn"}
    assert found(target_modules=r".*0\.mlp\.act_fn") == {"model.layers.0.mlp.act_fn"}


def test_groups_and_ranks_by_module():
    config = NoraConfig(r=1, groups=4, rank_pattern={r"layers\.1\..*": 3}, groups_pattern={r"layers\.0\..*": 16})
    model = get_peft_model(zoo.llama(), config)
    for layer, shape in ((0, (16, 5, 1)), (1, (4, 5, 3))):
        act = model.base_model.model.model.layers[layer].mlp.act_fn
        assert act.nlr_nora_numerator_a["default"].shape == shape


def test_an_activation_that_layers_share_is_one_adapter():
    """ALBERT has one layer, which is called as often as the model is deep; here two modules hold one activation."""
    act = nn.GELU()
    base = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), act) for _ in range(2)))
    model = get_peft_model(base, NoraConfig(groups=2, init_weights=False))
    assert model.base_model.model[0][1] is model.base_model.model[1][1]
    assert isinstance(model.base_model.model[0][1], NoraActivation)
    x = torch.randn(3, 8)
    y = model(x)
    merged = model.merge_and_unload()
    assert merged[0][1] is merged[1][1]
    torch.testing.assert_close(merged(x), y)


# Layouts that only the neighbours tell.


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.activation = nn.ReLU()

    def forward(self, x):
        return self.activation(x + self.layer(x))


class NormActivation(nn.GroupNorm):
    def __init__(self):
        super().__init__(2, 8)
        self.activation = nn.ReLU()

    def forward(self, x):
        return self.activation(super().forward(x))


class Mixer(nn.Module):
    """GroupViT's: an MLP over a transposed input, in a class whose parent holds the forward that matters."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.activation_fn, self.fc2 = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)

        def forward(self, x):
            return self.fc2(self.activation_fn(self.fc1(x)))

    class Outer(Inner):
        def forward(self, x):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    def __init__(self):
        super().__init__()
        self.mlp = self.Outer()

    def forward(self, x):
        return self.mlp(x)


@pytest.mark.parametrize(
    ("make", "shape", "dim"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.GELU()), (2, 3, 5, 6), 1),
        (lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 2), nn.GELU()), (2, 3, 5, 6), 1),
        (lambda: nn.Sequential(nn.GELU(), nn.Linear(8, 3)), (5, 8), -1),
        (lambda: nn.Sequential(nn.Conv1d(3, 8, 2), nn.BatchNorm1d(8), nn.ReLU()), (2, 3, 5), 1),
        (lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU()), (4, 3), -1),
        (Residual, (2, 8, 5, 6), 1),
        (NormActivation, (2, 8, 5, 6), 1),
        (Mixer, (2, 6, 5), -1),
        (lambda: nn.TransformerDecoderLayer(16, 4, 8, activation=nn.GELU()), None, -1),
        (lambda: nn.TransformerEncoderLayer(16, 4, 8, activation=nn.SiLU()), (2, 4, 16), -1),
    ],
    ids=[
        *("conv", "transposed", "first", "batchnorm", "linear-batchnorm", "residual", "norm-activation", "mixer"),
        *("decoder-layer", "encoder-layer"),
    ],
)
def test_the_channels_are_where_the_neighbours_say(make, shape, dim):
    model = get_peft_model(make().eval(), NoraConfig(groups=4, anchor="exact"))
    (layer,) = (each for each in model.modules() if isinstance(each, NoraActivation))
    assert (layer.width, layer.channel_dim) == (8, dim)
    caught = {}
    layer.register_forward_hook(lambda _, args, y: caught.update(x=args[0], y=y))
    with torch.no_grad():
        layer.nlr_nora_numerator_b["default"][1] = 5.0
        model(*([torch.randn(2, 4, 16)] * 2 if shape is None else [torch.randn(shape)]))
    moved = (caught["y"] != layer.base_layer(caught["x"])).movedim(dim, 0).flatten(1).any(1)
    assert moved.tolist() == [False, False, True, True, *[False] * 4]


# Refusals, before anything is changed.


def liger_like():
    """What Liger's patch does: a bound forward with a fused function in it, and the module still there."""

    def fused(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    model = zoo.llama()
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(fused, layer.mlp)
    return model


def fast_path():
    return nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, activation=nn.GELU(), batch_first=True))


def mamba():
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=67, hidden_size=32, num_hidden_layers=1, state_size=4))


@pytest.mark.parametrize(
    ("make", "options", "word"),
    [
        (liger_like, {}, r"mlp\.act_fn is bypassed: the forward of LlamaMLP does not call it \(a fused MLP\?\)"),
        (fast_path, {}, "bypassed in inference by nn.TransformerEncoderLayer's fused path; set activation_relu_or"),
        (mamba, {}, "mixer.act is bypassed: the forward of MambaMixer"),
        (zoo.llama, {"groups": 7}, r"groups=7 do not divide the 48 channels of model\.layers\.0\.mlp\.act_fn"),
        (zoo.llama, {"groups_pattern": {r"layers\.1\..*": 9}, "groups": 4}, r"groups=9 do not divide.*layers\.1"),
        (zoo.gpt2, {"groups": 96}, "groups=96 do not divide the 128 channels"),
        (zoo.glm, {"groups": 32}, "groups=32 do not divide the 48 channels"),  # 96 channels are gate and value
        (zoo.llama, {"target_modules": ["q_proj"]}, "activations are called act_fn; linears are for lora_target"),
        (zoo.llama, {"target_modules": ["act_fn", "q_proj"]}, "q_proj: is a Linear, no activation"),
        (zoo.llama, {"target_modules": ["typo"]}, "'typo'.*the model's activations are called act_fn"),
        (zoo.llama, {"groups_pattern": {"typo": 4}, "groups": 4}, "groups_pattern has 'typo'"),
        (zoo.llama, {"lora_r": 2, "lora_target_modules": ["typo"]}, "lora_target_modules=.*match no module"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Mish()), {}, r"1 \(no rational fit for Mish\)"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Mish()), {"target_modules": ["1"]}, "no rational fit for Mish"),
        (lambda: nn.Sequential(nn.Linear(8, 8)), {}, "has no activation module"),
        (
            lambda: nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32)),
            {},
            "0 .TransformerEncoderLayer holds the function relu as .activation",
        ),
    ],
)
def test_refusals_change_nothing(make, options, word):
    base = make()
    modules = list(base.modules())
    trained = {name: value.requires_grad for name, value in base.named_parameters()}
    with pytest.raises(UserError, match=word) as caught:
        get_peft_model(base, NoraConfig(**{"groups": 4, **options}))
    assert "\n" not in str(caught.value)
    assert all(ours is theirs for ours, theirs in zip(base.modules(), modules, strict=True))
    assert {name: value.requires_grad for name, value in base.named_parameters()} == trained


def test_the_mends_of_the_refusals_mend():
    layer = fast_path()
    layer[0].activation_relu_or_gelu = 0
    model = get_peft_model(layer, NoraConfig(groups=4, init_weights=False)).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        adapted = model(x)
        with model.disable_adapter():
            assert not torch.equal(model(x), adapted)
    base = liger_like()
    base.model.layers[1].mlp.__dict__.pop("forward")
    model = get_peft_model(base, NoraConfig(groups=4, exclude_modules=r".*layers\.0\..*"))
    assert list(model.base_model.report().activations) == ["model.layers.1.mlp.act_fn"]


def test_a_width_that_only_the_input_tells_is_checked_there():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x):
            return self.act(x)

    model = get_peft_model(Bare(), NoraConfig(groups=4))
    assert model(torch.randn(2, 8)).shape == (2, 8)
    with pytest.raises(UserError, match="10 channels do not divide into 4 groups"):
        model(torch.randn(2, 10))


def test_channels_in_an_unexpected_place_are_refused_when_they_come():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.act = nn.Linear(4, 8), nn.GELU()

        def forward(self, x):
            return self.act(self.fc1(x).transpose(1, 2))

    model = get_peft_model(Turned(), NoraConfig(groups=4))
    with pytest.raises(UserError, match=r"has 8 channels and is given \(2, 8, 12\).*exclude_modules"):
        model(torch.randn(2, 12, 4))
