"""The tiny models of the hub that peft's tests load, drawn here and put where huggingface_hub looks for them."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig
from transformers import AutoConfig, PreTrainedModel

SIZE = {"vocab_size": 1024, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
WIDE = SIZE | {"intermediate_size": 64}
LLAMA = WIDE | {"num_key_value_heads": 2}
EXPERTS = LLAMA | {"num_local_experts": 4, "head_dim": 8}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "peft-internal-testing/tiny-random-OPTForCausalLM": (
        "opt",
        "OPTForCausalLM",
        SIZE | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("gpt2", "GPT2LMHeadModel", SIZE),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("gptj", "GPTJForCausalLM", SIZE | {"rotary_dim": 4}),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("llama", "LlamaForCausalLM", WIDE),
    "peft-internal-testing/tiny-dummy-qwen2": ("qwen2", "Qwen2ForCausalLM", LLAMA),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        LLAMA | {"head_dim": 8},
    ),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": (
        "t5",
        "T5ForConditionalGeneration",
        {"vocab_size": 1024, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2}
        | {"decoder_start_token_id": 0},
    ),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": (
        "bart",
        "BartForConditionalGeneration",
        {"vocab_size": 1024, "d_model": 32}
        | {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))}
        | {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
        | {"init_std": 0.1},  # adapters must change what is generated
    ),
    "peft-internal-testing/tiny-random-BertModel": ("bert", "BertModel", WIDE),
    "peft-internal-testing/tiny-random-RobertaModel": ("roberta", "RobertaModel", WIDE),
    "peft-internal-testing/tiny-random-DebertaModel": ("deberta", "DebertaModel", WIDE),
    "peft-internal-testing/tiny-random-DebertaV2Model": ("deberta-v2", "DebertaV2Model", WIDE),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": (
        "bert",
        "BertForSequenceClassification",
        WIDE,
    ),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": (
        "roberta",
        "RobertaForSequenceClassification",
        WIDE,
    ),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": (
        "llama",
        "LlamaForSequenceClassification",
        LLAMA | {"pad_token_id": 0},
    ),
    "trl-internal-testing/tiny-Llama4ForCausalLM": (
        "llama4_text",
        "Llama4ForCausalLM",
        EXPERTS | {"intermediate_size_mlp": 64},
    ),
    "trl-internal-testing/tiny-GptOssForCausalLM": ("gpt_oss", "GptOssForCausalLM", EXPERTS),
}
"""By the hub's name: the model's type, class and sizes."""


def write(cache: Path) -> None:
    """Write every model into a folder that is the hub's cache (HF_HUB_CACHE)."""
    for name, (kind, class_name, sizes) in MODELS.items():
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, class_name)(AutoConfig.for_model(kind, **sizes))
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text("0")
        model.save_pretrained(folder / "snapshots" / "0")
    # An adapter's config, which the tests of configs read.
    folder = cache / "models--peft-internal-testing--tiny-opt-lora-revision"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "test").write_text("0")
    LoraConfig(base_model_name_or_path="facebook/opt-125m").save_pretrained(folder / "snapshots" / "0")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
