"""Loading an adapter folder of peft, ours or its own, on the base model that it names: strict, no pickle."""

import warnings
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import BUILD_ERRORS, UserError
from nonlinear_lowrank.validation import one_line, require

from .files import check_folder, check_hashes, read_json, tensor_shapes
from .loading import check_causal, check_causal_config, load_model, load_tokenizer

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_HEADS = {f"base_model.model.{head}.weight" for head in ("classifier", "score", "classifier.out_proj")}


def is_adapter(path: str | Path) -> bool:
    """Return whether a folder holds an adapter of peft, and no model of its own."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def base_of(path: str | Path, base: str | None = None) -> str:
    """Return the folder or hub name of an adapter's base model: `base`, or else the one that the adapter names.

    Raises:
        UserError: the adapter names none.
    """
    named = base or read_json(check_folder(path) / CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise UserError(f"{Path(path) / CONFIG} names no base model (base_model_name_or_path); pass --base")
    return named


def is_mergeable(peft_type: str) -> bool:
    """Return whether adapters of a type can be merged into weights, as its config class says."""
    config_class = require("peft", "peft.mapping").PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type)
    return getattr(config_class, "mergeable", True)


def head_labels(folder: Path) -> int | None:
    """Return how many outputs the classification head has that an adapter brings; None where it brings none."""
    shapes = tensor_shapes(folder / WEIGHTS)
    return next((shape[0] for name, shape in sorted(shapes.items()) if name in _HEADS), None)


def load_causal_adapter(path: str | Path, *, base: str | None = None, **kwargs: Any) -> Any:
    """Load a base language model with an adapter on it, unmerged.

    What peft's AutoPeftModelForCausalLM does, but an adapter whose tensors are not all there is an error
    instead of a warning, and pickled weights are never read.

    Args:
        path: a folder as `PeftModel.save_pretrained` writes it.
        base: folder or hub name of the base model; None: as the adapter names it.
        **kwargs: for the base model's from_pretrained (dtype, device_map, ...).

    Returns:
        The `peft.PeftModelForCausalLM`, in evaluation mode.

    Raises:
        UserError: a file is missing or damaged, the base is not there, is no causal language model, or
            the adapter does not fit it.
    """
    folder = check_folder(path)
    task = read_json(folder / CONFIG).get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise UserError(f"{folder} is an adapter for {task}, not for a causal language model")
    check_weights(folder)
    named = base_of(folder, base)
    if Path(named).is_dir():
        check_causal(named)
        model = load_model(named, **kwargs)
    else:
        model = _from_hub(named, folder, kwargs)
    if (folder / "tokenizer_config.json").is_file():
        rows = model.get_input_embeddings().weight.shape[0]
        if len(tokenizer := load_tokenizer(folder)) > rows:  # tokens were added for tuning
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)  # the adapter brings them
    return put_adapter(model, folder, base=named)


def put_adapter(model: Any, path: str | Path, *, base: str = "the model") -> Any:
    """Put an adapter's folder on a model that is there already, unmerged.

    Args:
        model: the base with a head of the adapter's shape, where it has one; it is changed.
        path: a folder as `PeftModel.save_pretrained` writes it.
        base: what messages call the model.

    Returns:
        The `peft.PeftModel` of the adapter's task, in evaluation mode.

    Raises:
        UserError: a file is missing or damaged, or the adapter does not fit the model.
    """
    peft = require("peft", "peft")
    folder = check_folder(path)
    check_weights(folder)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapted = peft.PeftModel.from_pretrained(model, str(folder))
    except BUILD_ERRORS as error:
        if isinstance(error, KeyError) and str(error.args[0]).startswith("base_model."):  # of a module saved whole
            raise UserError(f"{folder / WEIGHTS} is not whole: it has no {error.args[0]}") from error
        raise UserError(f"the adapter in {folder} does not fit {base}: {one_line(error)}") from error
    for warning in caught:
        if "missing adapter keys" in str(warning.message):
            raise UserError(f"{folder / WEIGHTS} is not whole: {one_line(warning.message)}")  # type: ignore[arg-type]
    return adapted.eval()


def check_weights(folder: Path) -> None:
    """Raise UserError if an adapter's tensors are not there, are pickled or have changed."""
    if not (folder / WEIGHTS).is_file():
        pickled = "only pickled weights, which are never read" if (folder / "adapter_model.bin").exists() else "none"
        raise UserError(f"{folder} has no {WEIGHTS} ({pickled}); save the adapter with safe_serialization=True")
    tensor_shapes(folder / WEIGHTS)
    check_hashes(folder)


def load_adapter_tokenizer(path: str | Path, *, base: str | None = None) -> Any:
    """Load the tokenizer in an adapter's folder, or else its base model's; UserError if that cannot be done."""
    from transformers import AutoTokenizer

    folder = check_folder(path)
    if (folder / "tokenizer_config.json").is_file():
        return load_tokenizer(folder)
    named = base_of(folder, base)
    if Path(named).is_dir():
        return load_tokenizer(named)
    try:
        return AutoTokenizer.from_pretrained(named, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"the tokenizer of {named} cannot be loaded: {one_line(error)}") from error


def _from_hub(name: str, folder: Path, kwargs: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_causal_config(config.to_dict(), name)
        return AutoModelForCausalLM.from_pretrained(name, use_safetensors=True, trust_remote_code=False, **kwargs)
    except UserError:
        raise
    except BUILD_ERRORS as error:
        raise UserError(
            f"the base model {name!r} of {folder} is no folder here, and cannot be had from the hub "
            f"({one_line(error)}); pass --base FOLDER"
        ) from error
