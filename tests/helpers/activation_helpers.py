"""Models by where their activations are: what the finder takes, with its channels, what it skips, what it refuses."""

import types

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import model_helpers

CONV = {"num_channels": 3, "hidden_sizes": [16, 32], "depths": [1, 2], "num_labels": 5}
TEXT = {**model_helpers.SIZES, "vocab_size": 67, "intermediate_size": 48, "max_position_embeddings": 64}
GATED = {**model_helpers.SIZES, **model_helpers.TOKENS, "intermediate_size": 48, "num_key_value_heads": 2}
IMAGES = "AutoModelForImageClassification"
RESNET = {"embedding_size": 16, "hidden_sizes": [16], "depths": [1], "layer_type": "basic", "num_labels": 5}
VIT = {**model_helpers.SIZES, "intermediate_size": 48, "image_size": 16, "patch_size": 4}
DISTILBERT = {"vocab_size": 67, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}
BERT_MLP = "bert.encoder.layer.{}.intermediate.intermediate_act_fn"
BLOCKS = "model.layers.{}.mlp"


def plain(kind, config, **sizes):
    return lambda: getattr(hf, kind)(getattr(hf, config)(**sizes))


def two(name):
    return {name.format(0), name.format(1)}


# model: (made, names of the activations that are found, width)
FOUND = {
    "vit": (model_helpers.vit, two("vit.layers.{}.mlp.activation_fn"), 48),
    "bert": (plain("BertForMaskedLM", "BertConfig", **TEXT), two(BERT_MLP), 48),
    "gpt2": (model_helpers.gpt2, two("transformer.h.{}.mlp.act"), 128),
    "opt": (model_helpers.opt, two("model.decoder.layers.{}.activation_fn"), 48),
    "llama": (model_helpers.llama, two(f"{BLOCKS}.act_fn"), 48),
    "qwen2": (plain("Qwen2ForCausalLM", "Qwen2Config", **GATED), two(f"{BLOCKS}.act_fn"), 48),
    "glm": (model_helpers.glm, two(f"{BLOCKS}.activation_fn"), 48),
    "phi3": (plain("Phi3ForCausalLM", "Phi3Config", **GATED), two(f"{BLOCKS}.activation_fn"), 48),
    "eurobert": (model_helpers.eurobert, two(f"{BLOCKS}.act_fn"), 48),
    "convnext": (
        plain("ConvNextForImageClassification", "ConvNextConfig", **CONV, num_stages=2, image_size=16),
        {f"convnext.encoder.stages.{place}.act" for place in ("0.layers.0", "1.layers.0", "1.layers.1")},
        None,
    ),
    # Channels behind the batch, some of them behind a residual sum.
    "resnet": (
        plain("ResNetForImageClassification", "ResNetConfig", **RESNET),
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


# What is skipped, and what cannot be swapped: (made, what is skipped and why, what calls functions).
SKIPPED = {
    "bert-head-and-pooler": (
        *(plain("BertForSequenceClassification", "BertConfig", **TEXT), {"bert.pooler.activation": "pooler"}, {}),
    ),
    "bert-mlm-head": (
        *(plain("BertForMaskedLM", "BertConfig", **TEXT), {"cls.predictions.transform.transform_act_fn": "head"}, {}),
    ),
    "roberta": (
        plain("RobertaForSequenceClassification", "RobertaConfig", **TEXT),
        *({}, {"classifier": "RobertaClassificationHead calls tanh"}),
    ),
    "deberta-v2": (
        plain("DebertaV2ForSequenceClassification", "DebertaV2Config", **TEXT),
        *({}, {"pooler": "ContextPooler looks its activation up in its forward"}),
    ),
    "distilbert": (
        plain("DistilBertForSequenceClassification", "DistilBertConfig", **DISTILBERT),
        *({}, {"": "DistilBertForSequenceClassification calls ReLU"}),
    ),
    "vit-pooler": (plain("ViTModel", "ViTConfig", **VIT), {"pooler.activation": "pooler"}, {}),
}


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


# name: (made, shape of its input, where the 8 channels are)
LAYOUTS = {
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.GELU()), (2, 3, 5, 6), -3),
    "conv-no-batch": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.GELU()), (3, 8, 8), -3),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 2), nn.GELU()), (2, 3, 5, 6), -3),
    "first": (lambda: nn.Sequential(nn.GELU(), nn.Linear(8, 3)), (5, 8), -1),
    "batchnorm": (lambda: nn.Sequential(nn.Conv1d(3, 8, 2), nn.BatchNorm1d(8), nn.ReLU()), (2, 3, 5), -2),
    "linear-batchnorm": (lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU()), (4, 3), -1),
    "residual": (Residual, (2, 8, 5, 6), -3),
    "norm-activation": (NormActivation, (2, 8, 5, 6), 1),
    "mixer": (Mixer, (2, 6, 5), -1),
    "decoder-layer": (lambda: nn.TransformerDecoderLayer(16, 4, 8, activation=nn.GELU()), None, -1),
    "encoder-layer": (lambda: nn.TransformerEncoderLayer(16, 4, 8, activation=nn.SiLU()), (2, 4, 16), -1),
}


# What holds an activation and does not call it.


def liger_like():
    """Patch as Liger does: a bound forward with a fused function in it, and the module still there."""

    def fused(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    model = model_helpers.llama()
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(fused, layer.mlp)
    return model


def fast_path():
    return nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, activation=nn.GELU(), batch_first=True))


def mamba():
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=67, hidden_size=32, num_hidden_layers=1, state_size=4))
