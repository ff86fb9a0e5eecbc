"""Settings by the names that transformers, trl and peft have for them."""

from collections.abc import Sequence

from nonlinear_lowrank.errors import UserError

SAME = {
    "learning_rate": "lr",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "output_dir": "out",
    "warmup_ratio": "warmup_share",
    "per_device_eval_batch_size": "eval_batch_size",
    "logging_steps": "log_every",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "report_to": "tracker",
    "torch_compile": "compile",
    "torch_compile_mode": "compile_mode",
    "dataloader_num_workers": "dataloader_workers",
    "label_smoothing_factor": "label_smoothing",
    "neftune_noise_alpha": "embedding_noise",
    "block_size": "sequence_length",
    "tokenizer_name": "tokenizer",
}
"""Our names of settings that mean the same: either is accepted."""

_BATCH = "use {}, which counts the sequences of a step, over all devices and micro-batches"
_ARM = "use {}, which names a method with its settings; --help has examples"
_EACH = "use {}, a number of steps; 0 with --epochs: after each epoch"
_SOURCE = "use {}, a file, a folder or the name of a data set"
_LAUNCH = "start the command by accelerate launch, whose setting it is"
DIFFERENT = {
    "per_device_train_batch_size": ("batch_size", _BATCH),
    "train_batch_size": ("batch_size", _BATCH),
    "gradient_accumulation_steps": ("gradient_accumulation", "use {}, which splits --batch-size: that does not grow"),
    "lr_scheduler_type": ("schedule", "use {}: linear, cosine, constant or wsd, each after the warm-up"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), ("betas", "use {}, which takes both: --betas 0.9 0.98")),
    "optim": ("optimizer", "use {}: adamw or muon"),
    "fp16": ("bf16", "use {}; training in float16 is not supported"),
    "data_seed": ("seed", "use {}, which is the data's too"),
    "eval_strategy": ("eval_every", _EACH),
    "save_strategy": ("save_every", _EACH),
    "resume_from_checkpoint": ("resume", "use {}, which resumes from the newest complete checkpoint in --out"),
    "overwrite_output_dir": ("overwrite", "use {}, which deletes what is in --out first"),
    **dict.fromkeys(("dataset_name", "text", "data"), ("source", _SOURCE)),
    "train_file": ("source", _SOURCE),
    "validation_file": ("valid_source", _SOURCE),
    "max_seq_length": ("max_length", "use {}, in tokens of prompt and answer"),
    **dict.fromkeys(("model_name_or_path", "init_from"), ("model.checkpoint", "use {}, a folder or a model's name")),
    "output": ("out", "use {}"),
    "plot": ("picture", "use {}"),
    **dict.fromkeys(("fsdp", "deepspeed"), ("steps", _LAUNCH)),
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_dropout", "use_peft", "use_dora", "peft_type"), ("arm", _ARM)),
    **dict.fromkeys(("target_modules", "lora_target_modules", "method", "methods", "rank", "ranks"), ("arm", _ARM)),
}
"""Our names of settings that do the same in another way, and a sentence that points to them."""


def find(name: str, known: Sequence[str]) -> list[str]:
    """Return those of `known`, dotted names with underscores, that a name means: itself, those that end as it does, or
    those of our name for it.

    Raises:
        UserError: it is a setting of `DIFFERENT`, and there is ours.
    """
    if ends := _ends(name, known):
        return ends
    stem, dot, word = name.rpartition(".")
    if word in SAME:
        return _ends(f"{stem}{dot}{SAME[word]}", known)
    ours, how = DIFFERENT.get(word, ("", ""))
    for each in (ours, f"{ours}s"):  # --arm, --arms
        if ours and _ends(each, known):
            option = "--" + each.rpartition(".")[2].replace("_", "-")
            raise UserError(f"--{word.replace('_', '-')}: {how.format(option)}")
    return []


def _ends(name: str, known: Sequence[str]) -> list[str]:
    return [name] if name in known else [leaf for leaf in known if leaf.endswith(f".{name}")]
