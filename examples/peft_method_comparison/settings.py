"""Settings of our adapters for peft's method comparison (MetaMathQA): one default and one tuned experiment a method.

Command: `python examples/peft_method_comparison/settings.py [FOLDER]` writes all files anew, by default beside itself.
README.md says what each tuned experiment rests on, and how they are run.
"""

import json
import sys
from pathlib import Path
from typing import Any

from peft import PeftConfig

import nonlinear_lowrank as nlr

HERE = Path(__file__).resolve().parent
# The linears of a block that sine-LoRA's authors adapt in Llama-3-8B.
PAPER = ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]
# method/experiment -> the adapter, and what of default_training_params.json is changed.
EXPERIMENTS: dict[str, tuple[type[PeftConfig], dict[str, Any], dict[str, Any]]] = {
    "sine_lora/llama-3.2-3B-default": (nlr.SineLoraConfig, {}, {}),
    "sine_lora/llama-3.2-3B-rank16-omega200": (
        nlr.SineLoraConfig,
        {"r": 16, "omega": 200, "lora_alpha": 32, "target_modules": PAPER},
        {},
    ),
    "sine_lora/llama-3.2-3B-dora": (nlr.SineLoraConfig, {"use_dora": True}, {}),
    "sine_lora/llama-3.2-3B-rank16-omega150-dora-lr6e-5": (
        nlr.SineLoraConfig,
        {"r": 16, "omega": 150, "lora_alpha": 32, "target_modules": PAPER, "use_dora": True},
        {"optimizer_kwargs": {"lr": 6e-5, "weight_decay": 0.1}},
    ),
    "noble/llama-3.2-3B-default": (nlr.NobleAdapterConfig, {}, {}),
    "noble/llama-3.2-3B-rank16-lr1e-3": (
        nlr.NobleAdapterConfig,
        # peft's script has one learning rate and one decay for all tensors; frequencies must not decay.
        {"r": 16, "up_lr_power": 0.0, "mix_lr_power": 0.0, "frequency_lr": 1.0, "phase_lr": 1.0},
        {"optimizer_kwargs": {"lr": 1e-3, "weight_decay": 0.0}},
    ),
    "nora/llama-3.2-3B-default": (nlr.NoraConfig, {}, {}),
    "nora/llama-3.2-3B-groups32-exact-lr1e-2": (
        nlr.NoraConfig,
        {"groups": 32, "anchor": "exact"},
        {"optimizer_kwargs": {"lr": 1e-2, "weight_decay": 0.1}},
    ),
    "nora/llama-3.2-3B-lora8": (nlr.NoraConfig, {"lora_r": 8}, {}),
    "nora/llama-3.2-3B-groups32-exact-lora32-lr3e-4": (
        nlr.NoraConfig,
        {"groups": 32, "anchor": "exact", "lora_r": 32},
        {"optimizer_kwargs": {"lr": 3e-4, "weight_decay": 0.1}},
    ),
}


def write(folder: Path) -> None:
    """Write `MetaMathQA/experiments/<method>/<experiment>/{adapter_config,training_params}.json` into a folder."""
    for name, (config_class, options, training) in EXPERIMENTS.items():
        place = folder / "MetaMathQA" / "experiments" / name
        place.mkdir(parents=True, exist_ok=True)
        config = config_class(task_type="CAUSAL_LM", **options).to_dict()
        # The version of the peft that wrote a file is no setting.
        values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        values.pop("peft_version", None)
        _write(place / "adapter_config.json", values)
        if training:
            _write(place / "training_params.json", training)


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
