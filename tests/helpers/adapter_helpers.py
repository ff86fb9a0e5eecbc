"""Rows of the fine-tuning matrix: a method on a tiny model. A method joins by adding rows to `ROWS`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

import model_helpers
import nonlinear_lowrank as nlr

LABELS = 3


def bert_classifier() -> PreTrainedModel:
    sizes = {**model_helpers.SIZES, "vocab_size": 67, "intermediate_size": 48, "max_position_embeddings": 64}
    config = BertConfig(**sizes, num_labels=LABELS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config)


def llama_classifier() -> PreTrainedModel:
    sizes = {**model_helpers.SIZES, **model_helpers.TOKENS, "intermediate_size": 48, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_labels=LABELS)
    config.pad_token_id = 0
    return LlamaForSequenceClassification(config)


def gpt2() -> PreTrainedModel:
    model = model_helpers.gpt2()
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(model.config, name, 0.0)
    return type(model)(model.config)


@dataclass(frozen=True)
class Family:
    """A tiny model and how to load its like from a folder."""

    make: Callable[[], PreTrainedModel]
    auto: type = AutoModelForCausalLM
    task_type: str = "CAUSAL_LM"


FAMILIES = {
    "llama": Family(model_helpers.llama),
    "gpt2": Family(gpt2),
    "bert-classifier": Family(bert_classifier, AutoModelForSequenceClassification, "SEQ_CLS"),
    "llama-classifier": Family(llama_classifier, AutoModelForSequenceClassification, "SEQ_CLS"),
}


@dataclass(frozen=True)
class Row:
    """One row of the matrix."""

    name: str
    family: str
    config_class: str
    """Name of a config class of the package."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its fields; the adapter should be small enough for the tiny model."""
    second: dict[str, Any] = field(default_factory=dict)
    """Fields of a second adapter that differ from the first's."""
    merges: bool = True
    starts_equal: bool = True
    """True where an adapter with its default init leaves every output bit of the base as it was."""

    def base(self) -> PreTrainedModel:
        """The tiny model, drawn anew."""
        return FAMILIES[self.family].make().eval()

    def config(self, *, second: bool = False, **overrides: Any) -> Any:
        """The adapter's config; its init changes the outputs from the start, unless init_weights=True is given."""
        options = {"init_weights": False, "task_type": FAMILIES[self.family].task_type, **self.options}
        options = {**options, **(self.second if second else {}), **overrides}
        if self.config_class == "SineLoraConfig":  # which has peft's name of the field
            options["init_lora_weights"] = options.pop("init_weights")
        return getattr(nlr, self.config_class)(**options)


def _noble(name: str, family: str, options: dict[str, Any], second: dict[str, Any]) -> Row:
    return Row(f"noble-{name}", family, "NobleAdapterConfig", options, second, merges=False)


def _sine(dora: bool, family: str) -> Row:
    options = {"r": 4, "use_dora": dora, "target_modules": "all-linear"}
    second = {"r": 3, "omega": 50.0, "lora_alpha": 6.0, "use_dora": not dora and family == "llama"}
    return Row(f"sine{'_dora' * dora}-{family}", family, "SineLoraConfig", options, second)


def _nora(family: str, options: dict[str, Any], second: dict[str, Any]) -> Row:
    equal = options.get("anchor") == "exact"
    own, other = {"r": 2, "groups": 4, **options}, {"r": 1, "groups": 8, **second}
    return Row(f"nora-{family}", family, "NoraConfig", own, other, starts_equal=equal)


def _nora_pp(family: str, sine: bool) -> Row:
    options = {"groups": 4, "lora_r": 3, "lora_sine": sine, "lora_target_modules": "all-linear", "anchor": "exact"}
    return Row(
        f"nora++-{family}", family, "NoraConfig", options, {"tuning": "constants", "lora_r": 2, "lora_alpha": 3.0}
    )


_SOME = {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 2}}
_OTHERS = {"target_modules": ["v_proj", "down_proj"], "rank_pattern": {}}
_EMBEDDED = {
    "target_modules": [*_SOME["target_modules"], "embed_tokens"],
    "omega_pattern": {"layers.1.*down_proj": 30.0},
}
_EMBEDDED_OTHERS = {"target_modules": [*_OTHERS["target_modules"], "embed_tokens"], "omega_pattern": {}}
ROWS = [
    *(
        _noble(family, family, {"r": 4, "target_modules": "all-linear"}, {"r": 3, "activation": "gelu", "depth": 1})
        for family in FAMILIES
    ),
    _noble("dropout", "llama", {"r": 4, "depth": 3, "dropout": 0.1, **_SOME}, _OTHERS),
    *(_sine(dora, family) for dora in (False, True) for family in FAMILIES),
    _nora("llama", {"anchor": "exact"}, {"tuning": "zero_init"}),
    _nora("gpt2", {"form": "sum_of_abs"}, {"tuning": "rational"}),
    _nora("bert-classifier", {"tails": "rational"}, {"numerator_only": True}),
    _nora("llama-classifier", {"anchor": "exact", "form": "sum_of_abs"}, {"denominator_only": True}),
    *(_nora_pp(family, sine) for family, sine in (("llama", False), ("gpt2", True), ("bert-classifier", False))),
    Row(
        "sine-dropout",
        "llama",
        "SineLoraConfig",
        {"r": 4, "lora_dropout": 0.1, **_SOME, **_EMBEDDED},
        {"use_dora": True, **_OTHERS, **_EMBEDDED_OTHERS},
    ),
]


def batch(model: PreTrainedModel, size: int = 4) -> dict[str, torch.Tensor]:
    """A random input."""
    return model_helpers.batch(model, size=size)


def labels(row: Row, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Random targets that fit the row's model."""
    if FAMILIES[row.family].task_type == "SEQ_CLS":
        return torch.randint(LABELS, (len(inputs["input_ids"]),))
    return inputs["input_ids"]
