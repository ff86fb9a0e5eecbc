"""transformers' common tests of models, for tiny models of some families: plain, and as the augmented twins.

The test case `Llama_noble` has `ModelTesterMixin`'s tests, run on the twins of Llama's classes with NOBLE branches, and
`Llama_plain` is the control. `transformers_run.py` runs them; it puts transformers' source distribution on the path.
"""

import copy
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import TestCase

import torch
import transformers
from transformers import AutoConfig

import nonlinear_lowrank as nlr
from nonlinear_lowrank.hub.classes import twin_of

# The source distribution has only the top folder of the tests: not these mixins, from which the common tests inherit.
for module, mixin in (
    ("exporters.test_export", "ExportTesterMixin"),
    ("generation.test_utils", "GenerationTesterMixin"),
):
    sys.modules[f"tests.{module}"] = ModuleType(f"tests.{module}")
    setattr(sys.modules[f"tests.{module}"], mixin, type(mixin, (), {}))

from tests.test_modeling_common import ModelTesterMixin  # noqa: E402

METHODS: dict[str, Any] = {
    "plain": None,
    "noble": nlr.NobleConfig(rank=4),
    "sine": nlr.SineLowRankConfig(rank=4, omega=100),
    "rational": nlr.RationalConfig(groups=4),
}
BATCH, LENGTH, VOCABULARY = 3, 7, 99
SIZE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
WIDE = SIZE | {"vocab_size": VOCABULARY, "intermediate_size": 64, "max_position_embeddings": 64}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Classes of one model type, the first without a head, the second the one that is augmented."""

    model_type: str
    classes: tuple[str, ...]
    sizes: dict[str, Any]
    methods: tuple[str, ...] = ("plain", "noble")
    unfit: tuple[str, ...] = ()
    """Tests that transformers' own test of this family replaces or leaves out."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Attributes of the test case."""


FAMILIES = {
    "Llama": Family(
        model_type="llama",
        classes=(
            "LlamaModel",
            "LlamaForCausalLM",
            "LlamaForSequenceClassification",
        ),
        sizes=WIDE | {"num_key_value_heads": 2, "pad_token_id": 0},
        methods=("plain", "noble", "sine", "rational"),
    ),
    "GPT2": Family(
        model_type="gpt2",
        classes=("GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification"),
        sizes={"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"pad_token_id": 98, "bos_token_id": 97, "eos_token_id": 97},
    ),
    "Bert": Family(
        model_type="bert",
        classes=(
            "BertModel",
            "BertForMaskedLM",
            "BertForSequenceClassification",
            "BertForMultipleChoice",
        ),
        sizes=WIDE,
    ),
    "ViT": Family(
        model_type="vit",
        classes=("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"),
        sizes=SIZE | {"intermediate_size": 64, "image_size": 16, "patch_size": 4, "encoder_stride": 4},
        unfit=("test_model_get_set_embeddings",),  # a convolution
        settings={"test_resize_embeddings": False},
    ),
    "T5": Family(
        model_type="t5",
        classes=("T5Model", "T5ForConditionalGeneration"),
        sizes={"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2}
        | {"decoder_start_token_id": 0, "pad_token_id": 0},
        unfit=("test_model_base_model_prefix",),  # T5Model generates as well
        settings={"is_encoder_decoder": True, "model_split_percents": [0.5, 0.8, 0.9]},
    ),
}


class Tester:
    """The model_tester that the mixin asks for a config and inputs."""

    __test__ = False  # not pytest's
    batch_size = BATCH
    num_hidden_layers = 2
    num_attention_heads = 4
    hidden_size = 32
    num_choices = 4
    is_training = True

    def __init__(self, family: Family, config: Any) -> None:
        self.config = config
        self.images = "image_size" in family.sizes
        if self.images:
            self.image_size, self.patch_size = config.image_size, config.patch_size
            self.mask_length = (self.image_size // self.patch_size) ** 2
            self.num_masks, self.seq_length = self.mask_length // 2, self.mask_length + 1
        else:
            self.seq_length = self.encoder_seq_length = self.decoder_seq_length = LENGTH

    def get_config(self) -> Any:
        return copy.deepcopy(self.config)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.get_config()
        if self.images:
            return config, {"pixel_values": torch.rand(BATCH, config.num_channels, self.image_size, self.image_size)}
        # The highest ids are the special tokens.
        inputs = {"input_ids": torch.randint(1, VOCABULARY - 2, (BATCH, LENGTH))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if config.is_encoder_decoder:
            inputs |= {f"decoder_{name}": each.clone() for name, each in inputs.items()}
        return config, inputs


def classes_and_config(family: Family, method: str) -> tuple[tuple[Any, ...], Any]:
    """Return the classes under test and a config of theirs; both are twins where there is a method."""
    config = AutoConfig.for_model(family.model_type, **family.sizes)
    classes = tuple(getattr(transformers, name) for name in family.classes)
    if METHODS[method] is None:
        return classes, config
    model = classes[1](config)
    nlr.augment(model, METHODS[method], verbose=False)
    # Anew, since building a model sets fields of its config.
    config = type(model.config)(**family.sizes, nonlinear_lowrank=model.config.nonlinear_lowrank)
    return tuple(map(twin_of, classes)), config


def common_tests(name: str, method: str) -> type[TestCase]:
    """Return the test case of a family with a method."""
    family = FAMILIES[name]
    classes, config = classes_and_config(family, method)
    # Without a GenerationTesterMixin there is nothing to inherit from.
    left_out = ("test_generation_tester_mixin_inheritance", *family.unfit)
    own = {
        "all_model_classes": classes,
        "model_tester": Tester(family, config),
        "test_can_init_all_missing_weights_before_2023": True,
        **dict.fromkeys(left_out),
        # A test is one outcome, not one for each tensor.
        "subTest": lambda *_, **__: nullcontext(),
        **family.settings,
    }
    case: type[TestCase] = type(f"{name}_{method}", (ModelTesterMixin, TestCase), {})
    for attribute, value in own.items():
        setattr(case, attribute, value)
    return case


for family_name, each in FAMILIES.items():
    for method_name in each.methods:
        globals()[f"{family_name}_{method_name}"] = common_tests(family_name, method_name)
