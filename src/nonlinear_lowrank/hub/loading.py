"""Loading models and tokenizers from a folder that a user gave: checked first, strict, no pickle, no code."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging

from nonlinear_lowrank.errors import BUILD_ERRORS, UserError
from nonlinear_lowrank.validation import one_line

from .classes import check_loading_info, plain_class, twin_of
from .files import check_folder, check_model_folder, read_json, tensor_shapes, weight_files
from .registration import CLASS_PREFIX, TYPE_PREFIX, config_class

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MOST_RATIO, _SMALL = 16, 1 << 20  # parameters described for each number held: packed and tied ones are fewer
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def load_model(path: str | Path, **kwargs: Any) -> Any:
    """Load a model, plain or augmented, with the class that saved it; strictly, and from safetensors only.

    Args:
        path: a folder as `save_pretrained` writes it.
        **kwargs: for transformers' from_pretrained (dtype, device_map, attn_implementation, ...).

    Returns:
        The `transformers.PreTrainedModel`, in evaluation mode.

    Raises:
        UserError: the folder or a file in it is not whole (see `hub.files`), the architecture is unknown,
            or tensors are missing, extra or of another shape.
    """
    config = check_model_folder(path)
    folder = check_folder(path)
    model_class = _architecture(config, folder)
    _check_scale(model_class, config, folder)
    kwargs = {**kwargs, "use_safetensors": True, "output_loading_info": True}
    try:
        with quiet_loading():  # what transformers would warn of is an error here
            model, info = model_class.from_pretrained(str(folder), **kwargs)
        check_loading_info(model, info)
    except UserError:
        raise
    except (StrictDataclassError, *BUILD_ERRORS) as error:
        raise UserError(f"{folder} cannot be loaded as {model_class.__name__}: {one_line(error)}") from error
    return model


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model folder, from its files alone; UserError if that cannot be done."""
    from transformers import AutoTokenizer

    folder = check_folder(path)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(f"{folder} has no tokenizer; save one into it with tokenizer.save_pretrained({str(folder)!r})")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {one_line(error)}") from error


def check_causal(path: str | Path) -> None:
    """Raise UserError unless a folder's model continues text, before its weights are read."""
    folder = check_folder(path)
    check_causal_config(read_json(folder / "config.json"), str(folder))


def check_causal_config(config: dict[str, Any], where: str) -> None:
    """Raise UserError as `check_causal` does, for the content of config.json; `where` names it in the message."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    registered = {each.__name__ for each in MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.values()}
    names = config.get("architectures") or ["no model class"]
    if str(names[0]).removeprefix(CLASS_PREFIX) not in registered.union(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise UserError(f"{where} is no causal language model: its config.json names {names[0]}")


def _architecture(config: dict[str, Any], folder: Path) -> Any:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UserError(f'{folder}/config.json names no model class: add its name as "architectures": ["..."]')
    model_type: str = config["model_type"]
    base = config_class(model_type.removeprefix(TYPE_PREFIX))
    plain = plain_class(names[0].removeprefix(CLASS_PREFIX))
    if plain is None:
        raise UserError(f"{folder}/config.json: this transformers version has no model class {names[0]!r}")
    return twin_of(plain, base) if model_type.startswith(TYPE_PREFIX) else plain


def _check_scale(model_class: Any, config: dict[str, Any], folder: Path) -> None:
    """Refuse a config that describes far more than the files hold, before transformers takes the memory for it."""
    shapes = [shape for file in weight_files(folder) for shape in tensor_shapes(file).values()]
    layers = [config[name] for name in _LAYERS if isinstance(config.get(name), int)]
    if layers and max(layers) > len(shapes):
        raise UserError(
            f"{folder / 'config.json'} describes {max(layers):,} layers, and the files hold {len(shapes):,} tensors; "
            "copy both again"
        )
    try:
        with quiet_loading(), torch.device("meta"):
            described = sum(each.numel() for each in model_class(model_class.config_class(**config)).parameters())
    except Exception:  # a config that no model can be built from: from_pretrained says what is wrong with it
        return
    held = sum(map(math.prod, shapes))
    if described > _MOST_RATIO * held + _SMALL:
        raise UserError(
            f"{folder / 'config.json'} describes {described:,} parameters, and the files hold {held:,} numbers; "
            "copy both again"
        )


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Let transformers and the hub say nothing and show no bar."""
    verbosity, bars, hub = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub)
        if bars:
            logging.enable_progress_bar()
