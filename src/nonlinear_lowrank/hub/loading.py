"""Loading models, adapters and tokenizers from a folder that a user gave: checked first, strict, no pickle, no code."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from nonlinear_lowrank.errors import BUILD_ERRORS, UserError
from nonlinear_lowrank.validation import one_line, require

from .classes import check_loading_info, plain_class, quiet_loading, twin_of
from .registration import CLASS_PREFIX, TYPE_PREFIX, config_class
from .storage import check_folder, check_hashes, check_model_folder, read_json, tensor_shapes, weight_files

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "base"  # in an adapter's folder: the base's config, where transformers has no such class
_AUTO = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_HEADS = {
    f"base_model.model.{head}.weight"
    for head in ("classifier", "score", "classifier.out_proj", "classification_head.out_proj")
}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def load_model(path: str | Path, **kwargs: Any) -> Any:
    """Load a model, plain or augmented, with the class that saved it; strictly, and from safetensors only.

    Args:
        path: a folder as `save_pretrained` writes it.
        **kwargs: for transformers' from_pretrained (dtype, device_map, attn_implementation, ...).

    Returns:
        The `transformers.PreTrainedModel`, in evaluation mode.

    Raises:
        UserError: the folder or a file in it is not whole (see `hub.storage`), the architecture is unknown,
            or tensors are missing, extra or of another shape.
    """
    folder, config = check_folder(path), check_model_folder(path)
    model_class = _architecture(config, folder)
    tensors = sum(len(tensor_shapes(file)) for file in weight_files(folder))
    layers = max((config[name] for name in _LAYERS if isinstance(config.get(name), int)), default=0)
    if layers > tensors:  # building them would never end
        raise UserError(f"{folder / 'config.json'} describes {layers:,} layers, and the files hold {tensors:,} tensors")
    try:
        with quiet_loading():  # what transformers would warn of is an error here
            options = {**kwargs, "use_safetensors": True, "output_loading_info": True}
            model, info = model_class.from_pretrained(str(folder), **options)
        check_loading_info(model, info)
    except UserError:
        raise
    except (StrictDataclassError, *BUILD_ERRORS) as error:
        raise UserError(f"{folder} cannot be loaded as {model_class.__name__}: {one_line(error)}") from error
    return model


def model_on_meta(path: str | Path) -> Any:
    """Return the model of a folder on the meta device, by its config alone; errors as in `load_model`."""
    folder, config = check_folder(path), check_model_folder(path)
    model_class = _architecture(config, folder)
    with torch.device("meta"):
        return model_class(model_class.config_class.from_pretrained(folder))


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


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model folder, from its files alone; UserError if that cannot be done."""
    folder = check_folder(path)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(f"{folder} has no tokenizer; save one into it with tokenizer.save_pretrained({str(folder)!r})")
    return _tokenizer(str(folder), local_files_only=True)


def load_adapter_tokenizer(path: str | Path, *, base: str | None = None) -> Any:
    """Load the tokenizer in an adapter's folder, or else its base model's; UserError if that cannot be done."""
    folder = check_folder(path)
    named = str(folder) if (folder / "tokenizer_config.json").is_file() else base_of(folder, base)
    return load_tokenizer(named) if Path(named).is_dir() else _tokenizer(named)


def _tokenizer(name: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"the tokenizer of {name} cannot be loaded: {one_line(error)}") from error


def check_causal(path: str | Path, config: dict[str, Any] | None = None) -> None:
    """Raise UserError unless a folder's model, or that of a config, continues text; before its weights are read."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from . import image_tokens  # noqa: F401  # registers its class

    config = read_json(check_folder(path) / "config.json") if config is None else config
    registered = {each.__name__ for each in MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.values()}
    names = config.get("architectures") or ["no model class"]
    if str(names[0]).removeprefix(CLASS_PREFIX) not in registered.union(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise UserError(f"{path} is not a causal language model: its config.json names {names[0]}")


def is_adapter(path: str | Path) -> bool:
    """Return whether a folder holds an adapter of peft, and no model of its own."""
    return (Path(path) / ADAPTER_CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def base_of(path: str | Path, base: str | None = None) -> str:
    """Return the folder or hub name of an adapter's base model: `base`, the one that lies in the adapter's folder, or
    the one that the adapter names."""
    from .pooled import find_encoder

    named = base or read_json(check_folder(path) / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise UserError(f"{Path(path) / ADAPTER_CONFIG} names no base model (base_model_name_or_path); pass --base")
    if named.startswith((".", "/", "~")):
        named = str(Path(named).expanduser())
        if not Path(named).is_dir():
            raise UserError(f"the base model {named!r} of {path} is not a folder here; pass --base FOLDER")
    return str(Path(path) / BASE) if base is None and (Path(path) / BASE).is_dir() else find_encoder(named)


def base_class(config: Mapping[str, Any]) -> str:
    """Return the name of transformers' class that loads the base of an adapter's config; empty where it has none."""
    task, mapping = config.get("task_type"), config.get("auto_mapping") or {}
    name = _AUTO.get(task or "") or str(mapping.get("base_model_class") or "")
    if str(mapping.get("parent_library")).startswith(__package__) and "For" in name:  # a type of our own
        return f"AutoModelFor{name.partition('For')[2]}"
    return name


def is_mergeable(peft_type: str) -> bool:
    """Return whether adapters of a type can be merged into weights, as its config class says."""
    config_class = require("peft", "peft.mapping").PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type)
    return getattr(config_class, "mergeable", True)


def head_labels(folder: Path) -> int | None:
    """Return how many outputs the classification head has that an adapter brings; None where it brings none."""
    shapes = tensor_shapes(folder / ADAPTER_WEIGHTS)
    return next((shape[0] for name, shape in sorted(shapes.items()) if name in _HEADS), None)


def load_causal_adapter(path: str | Path, *, base: str | None = None, **kwargs: Any) -> Any:
    """Load a base language model (default: the one that the adapter names) with an adapter on it, unmerged.

    Like peft's AutoPeftModelForCausalLM, but a missing, damaged, pickled or unfit file is a UserError. `kwargs`
    are for the base model's from_pretrained.
    """
    folder = check_folder(path)
    task = read_json(folder / ADAPTER_CONFIG).get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise UserError(f"{folder} is an adapter for {task}, not for a causal language model")
    check_weights(folder)
    named = base_of(folder, base)
    if Path(named).is_dir():
        check_causal(named)
        model = load_model(named, **kwargs)
    else:
        model = _from_hub(named, folder, kwargs)
    make_room(model, folder)
    return put_adapter(model, folder, base=named)


def embedding_of(model: Any) -> Any:
    """Return the module that takes a model's tokens, or patches; None where it has none of its own (CLIP has two)."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def make_room(model: Any, folder: Path) -> None:
    """Give a model rows for the tokens that were added for tuning; the adapter in the folder brings them."""
    embedding = embedding_of(model)
    name = next((name for name, module in model.named_modules() if module is embedding), "")
    shapes = tensor_shapes(folder / ADAPTER_WEIGHTS)
    own = f"base_model.model.{name}."  # its weight lies deeper where the adapter is on it too
    brought = [shape for key, shape in shapes.items() if key.startswith(own) and key.endswith("weight")]
    rows = max((shape[0] for shape in brought if len(shape) == 2), default=0)
    if embedding is not None and rows > getattr(embedding, "num_embeddings", rows):
        model.resize_token_embeddings(rows, mean_resizing=False)


def put_adapter(model: Any, path: str | Path, *, base: str = "the model") -> Any:
    """Put an adapter's folder on a model, which messages call `base`, unmerged; return it in evaluation mode.

    A file that is missing or damaged, or an adapter that does not fit the model, raises UserError.
    """
    peft = require("peft", "peft")
    folder = check_folder(path)
    check_weights(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", ".*missing adapter keys")
            return peft.PeftModel.from_pretrained(model, str(folder)).eval()
    except UserWarning as warning:
        raise UserError(f"{folder / ADAPTER_WEIGHTS} is not whole: {one_line(warning)}") from warning
    except BUILD_ERRORS as error:  # a KeyError has the name of a tensor that is missing
        raise UserError(f"the adapter in {folder} does not fit {base}: {one_line(error)}") from error


def check_weights(folder: Path) -> None:
    """Raise UserError if an adapter's tensors are not there, are pickled or have changed."""
    if not (folder / ADAPTER_WEIGHTS).is_file():
        why = f"{folder} has no {ADAPTER_WEIGHTS}, and pickled weights are never read"
        raise UserError(f"{why}; save the adapter with safe_serialization=True")
    tensor_shapes(folder / ADAPTER_WEIGHTS)
    check_hashes(folder)


def _from_hub(name: str, folder: Path, kwargs: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        check_causal(name, AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict())
        return AutoModelForCausalLM.from_pretrained(name, use_safetensors=True, trust_remote_code=False, **kwargs)
    except UserError:
        raise
    except BUILD_ERRORS as error:
        reason = f"is neither a folder nor on the hub ({one_line(error)})"
        raise UserError(f"the base model {name!r} of {folder} {reason}; pass --base FOLDER") from error
