"""The model that continued pretraining starts from, and whether it fits the text."""

from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.loading import load_model

_MODEL = "model"  # of a run's folder


def start_folder(path: str) -> Path:
    """Return the folder with the model itself: a run's is inside it."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"init_from: {path} is not a folder; give one with a config.json and safetensors, or a run's")
    inside = folder / _MODEL
    return inside if not (folder / "config.json").is_file() and inside.is_dir() else folder


def load_start(path: str, prepared: Any, sequence_length: int, dense_init: str | None) -> Any:
    """Return the model of a folder, in training mode.

    Raises:
        UserError: the folder has no whole model, the text's tokens are not the model's, its sequences are too long for
            it, or an init is asked for, which would redraw its weights.
    """
    folder = start_folder(path)
    if dense_init is not None:
        raise UserError(f"init={dense_init} would redraw the weights of {path}; omit it from the arm")
    model = load_model(folder)
    rows = model.get_input_embeddings().weight.shape[0]
    hint = f"give the model's own: --task.text.tokenizer {folder}"
    if prepared.vocab_size > rows:
        raise UserError(f"the text has {prepared.vocab_size} tokens and {path} has {rows}; {hint}")
    if prepared.tokenizer is not None and (folder / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        if AutoTokenizer.from_pretrained(folder).get_vocab() != prepared.tokenizer.get_vocab():
            raise UserError(f"the text's tokenizer is not that of {path}; {hint}")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        raise UserError(
            f"sequence_length {sequence_length} exceeds the {positions} positions of {path}; lower "
            "--task.text.sequence-length"
        )
    return model.train()
