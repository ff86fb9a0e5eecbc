"""Loading models and tokenizers from a folder that a user gave: checked first, strict, no pickle, no code."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nonlinear_lowrank.errors import BUILD_ERRORS, UserError
from nonlinear_lowrank.validation import one_line

from .classes import CLASS_PREFIX, TYPE_PREFIX, check_loading_info, plain_class, twin_of
from .files import check_folder, check_model_folder, read_json, weight_files
from .safetensors_header import safetensors_header

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MOST_RATIO, _SMALL = 16, 1 << 20  # parameters described for each number held: packed and tied ones are fewer


def load_model(path: str | Path, **kwargs: Any) -> Any:
    """Loads a model, plain or augmented, with the class that saved it; strictly, and from safetensors only.

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
    folder = str(check_folder(path))
    model_class = _architecture(config, folder)
    _check_scale(model_class, config, Path(folder))
    kwargs = {**kwargs, "use_safetensors": True, "output_loading_info": True}
    try:
        with _quiet():  # what transformers would warn of is an error here
            model, info = model_class.from_pretrained(folder, **kwargs)
        check_loading_info(model, info)
    except UserError:
        raise
    except (StrictDataclassError, *BUILD_ERRORS) as error:
        raise UserError(f"{folder} cannot be loaded as {model_class.__name__}: {one_line(error)[:500]}") from error
    return model


def load_tokenizer(path: str | Path) -> Any:
    """Loads the tokenizer of a model folder, from its files alone.

    Raises:
        UserError: no tokenizer in the folder, or its files cannot be read.
    """
    from transformers import AutoTokenizer

    folder = check_folder(path)
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
    there = [name for name in names if (folder / name).is_file()]
    if not there:
        raise UserError(f"{folder} has no tokenizer; save one into it with tokenizer.save_pretrained({str(folder)!r})")
    for name in there:
        if name.endswith(".json"):
            read_json(folder / name)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {one_line(error)[:500]}") from error


def check_causal(path: str | Path) -> None:
    """Refuses a model folder whose model does not continue text, before its weights are read.

    Raises:
        UserError: config.json names another kind of model.
    """
    folder = check_folder(path)
    check_causal_config(read_json(folder / "config.json"), str(folder))


def check_causal_config(config: dict[str, Any], where: str) -> None:
    """As `check_causal`, of the content of config.json; `where` names it in the message."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    registered = {each.__name__ for each in MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.values()}
    names = config.get("architectures") or ["no model class"]
    if str(names[0]).removeprefix(CLASS_PREFIX) not in registered.union(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise UserError(f"{where} is no causal language model: its config.json names {names[0]}")


def _architecture(config: dict[str, Any], folder: str) -> Any:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UserError(f'{folder}/config.json names no model class: add its name as "architectures": ["..."]')
    plain = plain_class(names[0].removeprefix(CLASS_PREFIX))
    if plain is None:
        raise UserError(f"{folder}/config.json: this transformers version has no model class {names[0]!r}")
    model_type: str = config["model_type"]
    if not model_type.startswith(TYPE_PREFIX):
        return plain
    return twin_of(plain, CONFIG_MAPPING[model_type.removeprefix(TYPE_PREFIX)])


def _check_scale(model_class: Any, config: dict[str, Any], folder: Path) -> None:
    """Refuses a config that describes far more than the files hold, before transformers takes the memory for it."""
    import torch

    tensors = [entry for file in weight_files(folder) for entry in safetensors_header(file).values()]
    layers = [config[name] for name in _LAYERS if isinstance(config.get(name), int)]
    if layers and max(layers) > len(tensors):
        raise UserError(
            f"{folder / 'config.json'} describes {max(layers):,} layers, and the files hold {len(tensors):,} tensors; "
            "copy both again"
        )
    try:
        with _quiet(), torch.device("meta"):
            described = sum(each.numel() for each in model_class(model_class.config_class(**config)).parameters())
    except Exception:  # a config that no model can be built from: from_pretrained says what is wrong with it
        return
    held = sum(math.prod(entry.shape) for entry in tensors)
    if described > _MOST_RATIO * held + _SMALL:
        raise UserError(
            f"{folder / 'config.json'} describes {described:,} parameters, and the files hold {held:,} numbers; "
            "copy both again"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
