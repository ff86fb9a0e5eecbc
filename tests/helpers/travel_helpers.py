"""Tiny models with every method, for what happens to them outside this package: their files, exported programs."""

from dataclasses import replace
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSeq2SeqLM

import nonlinear_lowrank as nlr
from family_helpers import FAMILIES as EVERY_FAMILY
from model_helpers import FAMILIES, SIZES, TOKENS, batch, build, randomised

_EXPERTS = {**SIZES, **TOKENS, "num_key_value_heads": 2, "num_local_experts": 3}
_T5 = {**TOKENS, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}
MODELS = {
    "llama": (FAMILIES["llama"], AutoModelForCausalLM),
    "gpt2": (FAMILIES["gpt2"], AutoModelForCausalLM),
    "mixtral": (lambda: build("mixtral", **_EXPERTS, intermediate_size=48), AutoModelForCausalLM),
    "vit": (FAMILIES["vit"], AutoModelForImageClassification),
    "t5": (lambda: build("t5", AutoModelForSeq2SeqLM, **_T5, feed_forward_proj="gated-gelu"), AutoModelForSeq2SeqLM),
}
_ALL = tuple(MODELS)
MODELS["gpt_neox"] = (lambda: build("gpt_neox", **SIZES, intermediate_size=48), AutoModelForCausalLM)
OWN_EXPERTS = ("llama4_text", "jetmoe", "longcat_flash", "dbrx")  # with classes of their own
MODELS |= {name: (EVERY_FAMILY[name].build, AutoModelForCausalLM) for name in OWN_EXPERTS}
_WITH_QKV = ("llama", "mixtral", "vit", "t5")
_GATED = nlr.NobleConfig(rank_ratio=0.25, activation="silu", fusion="gated", up_bias=True, init="pretrained")
ROWS = {
    "noble": ((*_ALL, *OWN_EXPERTS), [nlr.NobleConfig(rank=3)]),
    "gated-noble": (_ALL, [_GATED]),
    "shared-noble": (_WITH_QKV, [nlr.NobleConfig(rank=3, depth=3, share_down="qkv", expert_down="shared")]),
    "shared-ratio": (("llama",), [nlr.NobleConfig(rank_ratio=0.25, share_down="qkv")]),
    "shared-experts": (OWN_EXPERTS, [replace(_GATED, expert_down="shared")]),
    "official-noble": (("llama", "mixtral", *OWN_EXPERTS), [nlr.NobleConfig.official(rank=3, depth=3)]),
    "tanh-noble": (("gpt2",), [nlr.NobleConfig(rank=4, activation="tanh", depth=1)]),
    "dropped-noble": (("llama", "mixtral"), [nlr.NobleConfig(rank=3, dropout=0.5)]),
    "split-noble": (("gpt2", "gpt_neox"), [nlr.NobleConfig(rank=3, fusion="gated")]),
    "split-query": (("gpt2", "gpt_neox"), [nlr.NonlinearQueryConfig()]),
    "sine": ((*_ALL, *OWN_EXPERTS), [nlr.SineLowRankConfig(rank=2, omega=30)]),
    "low-rank": (("llama", "mixtral"), [nlr.SineLowRankConfig(rank=2, activation="identity", gain=2)]),
    "relu-low-rank": (("llama",), [nlr.SineLowRankConfig(rank=2, activation="relu")]),
    "rational": ((*_ALL, *OWN_EXPERTS), [nlr.RationalConfig(groups=4)]),
    "rational-exact": (("gpt2",), [nlr.RationalConfig(anchor="exact", form="sum_of_abs", degrees=(3, 2))]),
    "rational-tails": (("llama",), [nlr.RationalConfig(groups=4, fit_range=0.2)]),
    "query": (("llama", "gpt2", "mixtral", "vit", "t5"), [nlr.NonlinearQueryConfig()]),
    "kept-query": (("gpt2", "vit"), [nlr.NonlinearQueryConfig(residual="linear")]),
    "qk-norm": (("llama", "gpt2", "mixtral", "vit", "t5"), [nlr.QKNormConfig()]),
    "around": (("t5",), [nlr.NonlinearQueryConfig(), nlr.QKNormConfig()]),
    "several": (("llama", "gpt2"), [nlr.NobleConfig(rank=3), nlr.RationalConfig(groups=4), nlr.QKNormConfig()]),
    "on-sine-experts": (
        ("mixtral", "longcat_flash", "dbrx"),
        [nlr.SineLowRankConfig(rank=2, omega=30), nlr.RationalConfig(groups=4)],
    ),
}
CASES = [(row, name) for row, (names, _) in ROWS.items() for name in names]


def prepared(row, name):
    """The model of a case, no tensor at a default, an input and the logits for it."""
    plain = MODELS[name][0]()
    with TemporaryDirectory() as folder:  # a config that was read has its type on itself, not of its class alone
        plain.config.save_pretrained(folder)
        model = type(plain)(AutoConfig.from_pretrained(folder)).eval()
    for config in ROWS[row][1]:
        nlr.augment(model, config, split_fused=row.startswith("split"), verbose=False)
    inputs = batch(randomised(model, 0.05))
    if name == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :5]
    with torch.no_grad():
        return model, inputs, model(**inputs).logits


def assert_close(found, expected):
    """By a share of the largest logit, or of 1: the sine's phases, up to 30 rad, are rounded in another order."""
    assert (found - expected).abs().max() <= 4e-6 * expected.abs().max().clamp_min(1)
