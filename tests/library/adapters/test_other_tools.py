"""Adapters in the tools that people use LoRA with, LoRA as the control: trl's trainers and accelerate's offloading."""

import math

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from datasets import Dataset
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import finetune_helpers
import nonlinear_lowrank as nlr
from adapter_helpers import PEFT_WARNINGS

pytestmark = pytest.mark.filterwarnings(*PEFT_WARNINGS, "ignore::FutureWarning", "ignore::DeprecationWarning")

_LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
_NORA = {"r": 2, "groups": 4, "anchor": "exact", "task_type": "CAUSAL_LM"}
CONFIGS = {
    "LoRA": lambda: peft.LoraConfig(init_lora_weights=False, **_LORA),
    "sine-LoRA": lambda: nlr.SineLoraConfig(init_lora_weights=False, **_LORA),
    "sine-DoRA": lambda: nlr.SineLoraConfig(init_lora_weights=False, use_dora=True, **_LORA),
    "NOBLE": lambda: nlr.NobleAdapterConfig(init_weights=False, **_LORA),
    "NoRA": lambda: nlr.NoraConfig(init_weights=False, **_NORA),
    "NoRA++": lambda: nlr.NoraConfig(init_weights=False, lora_r=4, lora_target_modules=["q_proj"], **_NORA),
}
every_method = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with its tokenizer."""
    return finetune_helpers.language_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS)
def tuned(request, folder, tmp_path_factory):
    """An adapter after trl's SFT."""
    out = str(tmp_path_factory.mktemp("tuned"))
    options = {"max_steps": 3, "learning_rate": 0.02, "per_device_train_batch_size": 4, "max_length": 24}
    data = Dataset.from_dict({"text": ["the cat sat on a mat", "the birds saw red"] * 6})
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        SFTConfig(out, report_to=[], save_strategy="no", use_cpu=True, **options),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=request.param(),
        callbacks=[nlr.LearningRateCallback()],
    )
    trainer.train()
    trainer.save_model(out)
    return out


def first_log(trainer_class, config_class, folder, tuned, tmp_path, data, **options):
    """The first logged values of a preference trainer that goes on with the adapter."""
    base = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(4, 16)[None]
    with torch.no_grad():
        plain = base(ids).logits
        model = PeftModel.from_pretrained(base, tuned, is_trainable=True)
        assert (model(ids).logits - plain).abs().max() > 1e-3  # else the base would do for a reference
    settings = {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3, **options}
    arguments = config_class(str(tmp_path), report_to=[], save_strategy="no", use_cpu=True, **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    extra = {"reward_funcs": lambda completions, **_: [float(len(each)) for each in completions]}
    extra = extra if "num_generations" in options else {}
    extra["callbacks"] = [nlr.LearningRateCallback()]
    trainer = trainer_class(model, args=arguments, train_dataset=data, processing_class=tokenizer, **extra)
    trainer.train()
    return trainer.state.log_history[0]


PAIRS = {"prompt": ["the cat"] * 8, "chosen": [" sat on a mat"] * 8, "rejected": [" saw red birds"] * 8}


def test_dpo_after_sft_starts_from_the_tuned_model(folder, tuned, tmp_path):
    """Policy and reference are the same at first: the loss is log 2."""
    log = first_log(DPOTrainer, DPOConfig, folder, tuned, tmp_path, Dataset.from_dict(PAIRS))
    assert log["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_kto_after_sft_starts_from_the_tuned_model(folder, tuned, tmp_path):
    """Policy and reference are the same at first: the loss is 1 - sigmoid(0)."""
    rows = {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": [True, False] * 4}
    log = first_log(KTOTrainer, KTOConfig, folder, tuned, tmp_path, Dataset.from_dict(rows))
    assert log["loss"] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(("trainer", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_policy_gradients_after_sft_start_from_the_tuned_model(trainer, config, folder, tuned, tmp_path):
    data = Dataset.from_dict({"prompt": PAIRS["prompt"]})
    options = {"beta": 0.1, "num_generations": 2, "max_completion_length": 6}
    log = first_log(trainer, config, folder, tuned, tmp_path, data, **options)
    assert log["kl"] == pytest.approx(0.0, abs=1e-5)


@every_method
@pytest.mark.parametrize("where", ["cpu", "disk", "map"])
def test_offloading_leaves_the_outputs(config, where, folder, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config()).eval()
    ids = torch.arange(4, 16)[None]
    with torch.no_grad():
        expected = model(ids).logits
        if where == "cpu":
            cpu_offload(model, execution_device="cpu")
        elif where == "disk":
            disk_offload(model, str(tmp_path), execution_device="cpu")
        else:
            layers = {f"base_model.model.model.layers.{index}": ("cpu", "disk")[index] for index in range(2)}
            rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
            device_map = layers | {f"base_model.model.{name}": device for name, device in rest.items()}
            dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
        torch.testing.assert_close(model(ids).logits, expected)  # one product at most in place of two
