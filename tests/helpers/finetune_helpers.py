"""Tiny pretrained models and tiny data for the tests of fine-tuning; everything is made here, nothing is fetched."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from nlr_lab.tasks.finetune.classification import GlueData, GlueTask, ImageData, ImageTask
from nlr_lab.tasks.finetune.instructions import InstructionData, InstructionTask
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nlr_lab.training import Arm, Recipe
from nonlinear_lowrank.hub.classes import quiet_loading
from training_helpers import tiny_recipe

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "red", "birds", "who", "what", "yes", "no", "very", "not")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def sentence(generator: np.random.Generator, words: int = 6) -> str:
    return " ".join(generator.choice(WORDS[:12], words))


def save(model: Any, folder: Path, pairs: bool | None = None) -> str:
    """Save a model without transformers' bars, and a tokenizer where it is said of what; return the folder."""
    with quiet_loading():
        model.save_pretrained(folder)
    if pairs is not None:
        tokenizer(pairs).save_pretrained(folder)
    return str(folder)


def tokenizer(pairs: bool) -> hf.PreTrainedTokenizerFast:
    """A tokenizer of words, of sentences or of pairs of them as BERT's."""
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]"))
    inner.pre_tokenizer = WhitespaceSplit()
    names, special = ["input_ids", "attention_mask"], {}
    if pairs:
        names.insert(1, "token_type_ids")
        special = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
        inner.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    special |= {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=names, **special)


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCABULARY = {**SIZES, "vocab_size": len(SPECIAL) + len(WORDS)}


def encoder(folder: Path, dropout: float = 0.1) -> str:
    torch.manual_seed(0)
    dropped = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = hf.BertConfig(**VOCABULARY, max_position_embeddings=64, **dropped)
    return save(hf.BertModel(config), folder, pairs=True)


def language_model(folder: Path) -> str:
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = hf.LlamaConfig(**VOCABULARY, max_position_embeddings=128, **tokens)
    return save(hf.LlamaForCausalLM(config), folder, pairs=False)


def vision_model(folder: Path, channels: int = 1, labels: int = 3, **sizes: int) -> str:
    torch.manual_seed(0)
    config = hf.ViTConfig(image_size=8, patch_size=4, num_channels=channels, num_labels=labels, **{**SIZES, **sizes})
    return save(hf.ViTForImageClassification(config), folder)


def glue_folder(folder: Path, rows: int = 40, seed: int = 0) -> str:
    """CoLA and STS-B in the uniform layout. A sentence is good when it has "red"; two are alike as they share words."""
    generator = np.random.default_rng(seed)
    for task in ("CoLA", "STS-B"):
        (folder / task).mkdir(parents=True, exist_ok=True)
    for split, count in (("train", rows), ("dev", rows // 2), ("test", rows // 2)):
        good = [sentence(generator) for _ in range(count)]
        lines = ["source\tlabel\tsentence", *(f"x\t{int('red' in text)}\t{text}" for text in good)]
        (folder / "CoLA" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        pairs = [(sentence(generator), sentence(generator)) for _ in range(count)]
        lines = ["score\tsentence1\tsentence2"]
        lines += [f"{min(5.0, len(set(a.split()) & set(b.split())))}\t{a}\t{b}" for a, b in pairs]
        (folder / "STS-B" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


def instruction_file(path: Path, rows: int = 30, seed: int = 0) -> str:
    """Alpaca's form; every third row has an input."""
    generator = np.random.default_rng(seed)
    records = []
    for index in range(rows):
        record = {"instruction": sentence(generator, 4), "output": sentence(generator, 3)}
        records.append(record | ({"input": sentence(generator, 2)} if index % 3 == 0 else {}))
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return str(path)


def image_file(path: Path, rows: int = 60, classes: int = 3, seed: int = 0) -> str:
    """Grey images whose bright corner is their class."""
    generator = np.random.default_rng(seed)
    sides = {}
    for side, count in (("train", rows), ("test", rows // 2)):
        labels = generator.integers(0, classes, count)
        images = generator.integers(0, 60, (count, 8, 8))
        for image, label in zip(images, labels, strict=True):
            top, left = 4 * (label // 2), 4 * (label % 2)
            image[top : top + 4, left : left + 4] += 180
        sides |= {f"x_{side}": images.astype(np.uint8), f"y_{side}": labels}
    np.savez(path, **sides)
    return str(path)


def recipe(task: Any, arm: str | Arm = "lora:r=2", **train: Any) -> Recipe:
    settings = {"steps": 12, "eval_every": 5, "save_every": 4, "log_every": 3, **train}
    return replace(tiny_recipe(task, arm, **settings), arms=("lora:r=2", "head"))


def glue_task(root: Path, task: str = "cola", pooling: str = "own", **data: Any) -> GlueTask:
    """On the files of `glue_folder` and the model of `encoder`, both made under `root` unless they are there."""
    if not (root / "glue").exists():
        glue_folder(root / "glue")
    if not (root / "bert").exists():
        encoder(root / "bert")
    return GlueTask(
        glue=GlueData(task=task, source=str(root / "glue"), max_length=32, **data),
        model=Pretrained(checkpoint=str(root / "bert"), targets=("query", "value"), pooling=pooling),
    )


def glue_command(root: Path, out: Path, *more: Any) -> list[Any]:
    """`nlr finetune` on CoLA and the model of `encoder`, over four steps."""
    return [
        *("finetune", "glue-minilm", "--checkpoint", root / "bert", "--source", root / "glue", "--steps", 4),
        *("--pooling", "own", "--eval-every", 2, "--batch-size", 4, "--max-length", 32, "--threads", 1),
        *("--tracker", "none", "--out", out, *more),
    ]


def instruction_task(root: Path, **data: Any) -> InstructionTask:
    if not (root / "llama").exists():
        language_model(root / "llama")
        instruction_file(root / "alpaca.json")
    settings = {"source": str(root / "alpaca.json"), "template": "plain", "max_length": 32, "held_out": 0.2, **data}
    model = Pretrained(checkpoint=str(root / "llama"), targets=("q_proj", "v_proj"))
    return InstructionTask(instructions=InstructionData(**settings), model=model)


def image_task(root: Path, **data: Any) -> ImageTask:
    if not (root / "vit").exists():
        vision_model(root / "vit")
        image_file(root / "images.npz")
    model = Pretrained(checkpoint=str(root / "vit"), targets=("q_proj", "v_proj"))
    return ImageTask(images=ImageData(**{"source": str(root / "images.npz"), **data}), model=model)


@torch.no_grad()
def answer_loss(model: Any, examples: Any) -> float:
    """The mean over answer tokens, one example at a time."""
    total = count = 0
    for index in range(len(examples)):
        tokens, targets = examples[index]["input_ids"][None], examples[index]["labels"][1:]
        logits = model(input_ids=tokens).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        count += int((targets != -100).sum())
    return total / count


def root(folder: Path) -> Path:
    glue_task(folder)
    instruction_task(folder)
    image_task(folder)
    return folder
