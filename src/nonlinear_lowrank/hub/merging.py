"""An adapter folder becomes a model folder: the base model with the adapter in its weights.

The result is a plain Hugging Face model that needs none of our code, but for NoRA, whose rational activations
stay: that one is an augmented model of the package (see `hub`).
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..errors import BUILD_ERRORS, UserError
from ..layers import config_to_dict, method_of_layer
from ..storage import check_new_or_empty, staged_output
from .adapter import CONFIG, WEIGHTS, base_of
from .card import Origin, shown_name, table, write_card
from .classes import FIELD
from .conversion import copy_companions, first_output, random_inputs
from .files import check_folder, check_hashes, one_line, read_json, tensor_names
from .loading import load_model
from .pooled import quiet_loading

_AUTO = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
# Times the square root of the type's precision, of the outputs: 7e-4 in float32, 0.18 in bfloat16, far above rounding.
_BOUND = 2
_HEADS = ("classifier", "score", "classifier.out_proj")


@dataclass(frozen=True)
class MergeReport:
    """What `merge_adapter` wrote, and how far its outputs are from the base's with the adapter on it."""

    output: Path
    peft_type: str
    base: str
    difference: float
    """Largest absolute difference of the outputs on random inputs, after writing and loading again."""
    scale: float
    """Largest absolute output."""
    measured: str
    """Which output was compared, with its shape."""
    copied: tuple[str, ...]
    """Files taken over from the base's folder and the adapter's."""
    needs_package: bool
    """Whether loading it needs this package."""
    untied: bool
    """Whether output head and embedding no longer share one weight."""

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.peft_type} adapter merged into {self.base}",
                f"{self.measured} adapted and merged: max |difference| {self.difference:.3e} "
                f"(outputs up to {self.scale:.3g})",
                *(["the output head has a weight of its own now, no longer the embedding's"] if self.untied else []),
                f"copied {', '.join(self.copied) or 'no other files'}",
                f"written to {self.output}; "
                + ("loading it needs `import nonlinear_lowrank`" if self.needs_package else "a plain model"),
            ]
        )


def merge_adapter(
    adapter_dir: str | Path, output_dir: str | Path, *, base: str | None = None, dtype: str = "auto"
) -> MergeReport:
    """Writes the base model with an adapter merged into it.

    The adapter may be any of peft's that merges into weights. The output is written beside its place and
    renamed when it is whole, measured, and loadable.

    Args:
        adapter_dir: as `save_pretrained` of peft writes it, safetensors only.
        output_dir: new or empty.
        base: folder or hub name of the base model; None: as the adapter names it.
        dtype: of the merged weights: "auto" for the base's own, or "float32", "bfloat16", ... They are formed in the
            wider of the two types and rounded once.

    Returns:
        The measured difference and the files copied.

    Raises:
        UserError: the adapter cannot be merged or does not fit, it has weights that are not finite, a file is
            missing or damaged, output_dir is not empty, or the merged model's outputs are not the adapter's. Nothing
            is left in output_dir then.
    """
    folder, output = check_folder(adapter_dir).resolve(), Path(output_dir).expanduser().resolve()
    config = read_json(folder / CONFIG)
    peft_type = _check_type(folder, config)
    check_new_or_empty(output)
    if output == folder or folder in output.parents:
        raise UserError(f"the output folder {output} is inside the adapter's; choose another")
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}; save the adapter with safe_serialization=True")
    tensor_names(folder / WEIGHTS)
    check_hashes(folder)
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UserError(f"unknown dtype {dtype!r}; use auto, float32, bfloat16 or float16")
    named = base_of(folder, base)

    adapted = _adapted(folder, config, named, dtype)
    inputs = random_inputs(adapted.get_base_model())
    before, measured = first_output(adapted, inputs)
    untied = _untie(adapted, folder)
    try:
        model = adapted.merge_and_unload(safe_merge=True)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    except (ValueError, NotImplementedError, AttributeError) as error:  # peft's, in many words
        raise UserError(f"a {peft_type} adapter cannot be merged here: {one_line(error)[:300]}") from error
    needs_package = _mark_ours(model)
    if dtype != "auto" and not _is_quantized(model):
        model.to(getattr(torch, dtype))
    rounded, quantized = model.dtype, _is_quantized(model)
    with staged_output(output, {}) as place:
        model.save_pretrained(place)
        del model, adapted
        theirs = copy_companions(Path(named), place) if Path(named).is_dir() else ()
        copied = {*theirs, *copy_companions(folder, place, without=CONFIG)}  # a tokenizer with added tokens wins
        after, _ = first_output(load_model(place), inputs)
        difference, scale = (after.double() - before.double()).abs().max().item(), before.double().abs().max().item()
        if not quantized and not difference <= _BOUND * torch.finfo(rounded).eps ** 0.5 * scale:
            raise UserError(
                f"the merged model's outputs are up to {difference:.2g} away from the adapter's, of outputs up to "
                f"{scale:.2g}: more than rounding; use the adapter unmerged"
            )
        write_card(place, _origin(config, named, measured, difference, scale))
    return MergeReport(
        output=output,
        peft_type=peft_type,
        base=named,
        difference=difference,
        scale=scale,
        measured=measured,
        copied=tuple(sorted(copied)),
        needs_package=needs_package,
        untied=untied,
    )


def _origin(config: Mapping[str, Any], base: str, measured: str, difference: float, scale: float) -> Origin:
    adapter = {name: config[name] for name in ("peft_type", "r", "target_modules", "omega") if config.get(name)}
    return Origin(
        title=f"{shown_name(base)} with a merged {config['peft_type']} adapter",
        summary="A base model with an adapter folded into its weights.",
        command="nlr merge ADAPTER OUT",
        base=base,
        sections={
            "Adapter": table(adapter),
            "Results": f"{measured} adapted and merged, on random inputs, one measurement (n = 1): max |difference| "
            f"{difference:.3e}, outputs up to {scale:.3g}.",
        },
    )


def _check_type(folder: Path, config: Mapping[str, Any]) -> str:
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    peft_type = config.get("peft_type")
    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(peft_type)  # type: ignore[arg-type]
    if not isinstance(peft_type, str) or tuner is None:
        raise UserError(f"{folder / CONFIG}: peft knows no peft_type {peft_type!r}")
    if peft_type == "NLR_NOBLE":
        raise UserError(
            f"{folder} is a NOBLE adapter, which cannot be merged: its branch is not linear in the input, so no weight "
            "can take it in; load it with peft's AutoPeftModel classes"
        )
    if not (isinstance(tuner, type) and issubclass(tuner, BaseTuner)):
        raise UserError(f"{folder} is a {peft_type} adapter, which has no weights to merge into the base's")
    return peft_type


def _adapted(folder: Path, config: Mapping[str, Any], named: str, dtype: str) -> Any:
    """The base model with the adapter on it, in evaluation mode."""
    import transformers
    from peft import PeftModel

    task, mapping = config.get("task_type"), config.get("auto_mapping") or {}
    class_name = _AUTO.get(task or "") or mapping.get("base_model_class")
    options: dict[str, Any] = {"dtype": "auto", "use_safetensors": True, "trust_remote_code": False}
    if revision := config.get("revision"):
        options["revision"] = revision
    if (labels := _labels(folder)) is not None:
        options |= {"num_labels": labels, "ignore_mismatched_sizes": True}  # the adapter brings the head
    try:
        with quiet_loading(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # see _untie
            if class_name is None or not hasattr(transformers, class_name):
                model = load_model(named, dtype="auto")
            else:
                model = getattr(transformers, class_name).from_pretrained(named, **options)
            if dtype != "auto" and not _is_quantized(model):
                model.to(torch.promote_types(model.dtype, getattr(torch, dtype)))
            return PeftModel.from_pretrained(model, str(folder)).eval()
    except UserError as error:
        raise UserError(f"{folder} does not fit {named}: {error}") from error
    except BUILD_ERRORS as error:
        raise UserError(f"{folder} does not fit {named}, or {named} is not there: {one_line(error)[:300]}") from error


def _is_quantized(model: Any) -> bool:
    return getattr(model.config, "quantization_config", None) is not None


def _untie(adapted: Any, folder: Path) -> bool:
    """Gives layers that are merged a weight of their own where another module has the same one: it stays as it is.

    Returns:
        Whether there was any.

    Raises:
        UserError: the model's config cannot say so, for it is no output head that shares the embedding's weight.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    model: Any = adapted.get_base_model()
    bases: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            bases[name] = module.get_base_layer()
    owners: dict[int, list[tuple[str, Any]]] = {}
    for name, module in model.named_modules():
        if isinstance(weight := module._parameters.get("weight"), torch.Tensor):
            owners.setdefault(id(weight), []).append((name, module))
    ends = {id(_unwrapped(end)) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end}
    found = False
    for name, base in bases.items():
        sharing = owners.get(id(base._parameters.get("weight")), [])
        if len(sharing) < 2:
            continue
        if not {id(module) for _, module in sharing} <= ends:
            others = ", ".join(other.removesuffix(".base_layer") for other, module in sharing if module is not base)
            raise UserError(f"{folder} changes {name}, whose weight {others} has too; use the adapter unmerged")
        base.weight = torch.nn.Parameter(base.weight.detach().clone(), requires_grad=base.weight.requires_grad)
        for part in (model.config, model.config.get_text_config()):
            part.tie_word_embeddings = False
        owners = {key: [each for each in value if each[1] is not base] for key, value in owners.items()}
        found = True
    return found


def _unwrapped(module: Any) -> Any:
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _labels(folder: Path) -> int | None:
    """How many outputs the classification head has that an adapter brings; None where it brings none."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name in sorted(file.keys()):
            if name.removeprefix("base_model.model.") in {f"{head}.weight" for head in _HEADS}:
                return file.get_slice(name).get_shape()[0]
    return None


def _mark_ours(model: Any) -> bool:
    """Makes layers of ours that stay in the model saveable; returns whether there are any."""
    from . import make_saveable

    listed = {name for entry in getattr(model.config, FIELD, None) or [] for name in entry["modules"]}
    entries: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        method = method_of_layer(module)
        if method is None or name in listed:
            continue
        layer_config = getattr(module, f"{method.name}_config")
        values = config_to_dict(layer_config)
        key = f"{method.name} {sorted(values.items())}"
        entry = entries.setdefault(key, {"method": method.name, "config": values, "modules": []})
        entry["modules"].append(name)
    for entry in entries.values():
        make_saveable(model, entry)
    return bool(entries or listed)
