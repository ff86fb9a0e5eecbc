"""An adapter folder becomes a model folder: the base model with the adapter in its weights.

The result is a plain Hugging Face model that needs none of our code, but for NoRA, whose rational activations
stay: that one is an augmented model of the package (see `hub`).
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nonlinear_lowrank.errors import BUILD_ERRORS, UserError
from nonlinear_lowrank.methods.base import method_of_layer
from nonlinear_lowrank.surgery.augment import layer_entries
from nonlinear_lowrank.validation import one_line, require

from .adapter import CONFIG, base_of, check_weights, head_labels, is_mergeable
from .card import Origin, shown_name, table, write_card
from .conversion import copy_companions, first_output, random_inputs
from .files import check_folder, read_json
from .loading import load_model, quiet_loading
from .registration import FIELD
from .saving import make_saveable
from .storage import check_new_or_empty, staged_output

_AUTO = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
# Root mean square of a difference over that of the outputs, where both were computed in one type from the same weights:
# about 1e-6 in float32, more where a router's near tie goes the other way, and far more where a merge is wrong. In a
# narrower type the square root of its precision, where that is more: 0.03 in float16, 0.09 in bfloat16.
_BOUND = 5e-3


@dataclass(frozen=True)
class MergeReport:
    """Result of `merge_adapter`, and how far its outputs are from the base's with the adapter on it."""

    output: Path
    peft_type: str
    base: str
    difference: float
    """Largest absolute difference of the outputs on random inputs, after writing and loading again; the adapted ones
    are those in float32, so that what rounding to the weights' type does is in it."""
    scale: float
    """Largest absolute output."""
    measured: str
    """Name and shape of the output that was compared."""
    copied: tuple[str, ...]
    """Files that were copied from the base's folder and the adapter's."""
    needs_package: bool
    """True if loading it needs this package."""
    untied: bool
    """True if output head and embedding no longer share one weight."""

    def __str__(self) -> str:
        lines = [
            f"{self.peft_type} adapter merged into {self.base}",
            f"{self.measured} adapted and merged: max |difference| {self.difference:.3e} "
            f"(outputs up to {self.scale:.3g})",
            "the output head has a weight of its own now, no longer the embedding's" if self.untied else "",
            f"copied {', '.join(self.copied) or 'no other files'}",
            f"written to {self.output}; "
            + ("loading it needs `import nonlinear_lowrank`" if self.needs_package else "a plain model"),
        ]
        return "\n".join(filter(None, lines))


def merge_adapter(
    adapter_dir: str | Path, output_dir: str | Path, *, base: str | None = None, dtype: str = "auto"
) -> MergeReport:
    """Write the base model with an adapter merged into it; the adapter may be any of peft's that merges into weights.

    The output is written beside its place and renamed when it is whole, measured, and loadable. The base is held in
    float32 meanwhile, four bytes a parameter (float64 stays, quantized weights stay quantized), and rounded once.

    Args:
        adapter_dir: as `save_pretrained` of peft writes it, safetensors only.
        output_dir: new or empty.
        base: folder or hub name of the base model; None: as the adapter names it.
        dtype: of the merged weights: "auto" for the base's own, or "float32", "bfloat16", ...

    Raises:
        UserError: the adapter cannot be merged or does not fit, it has weights that are not finite, a file is
            missing or damaged, output_dir is not empty, or the merged model's outputs are not the adapter's. Nothing
            is left in output_dir then.
    """
    given = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise UserError(f"unknown dtype {dtype!r}; use auto, float32, bfloat16 or float16")
    folder, output = check_folder(adapter_dir).resolve(), Path(output_dir).expanduser().resolve()
    config = read_json(folder / CONFIG)
    peft_type = _check_type(folder, config)
    check_new_or_empty(output)
    if output == folder or folder in output.parents:
        raise UserError(f"the output folder {output} is inside the adapter's; choose another")
    check_weights(folder)
    named = base_of(folder, base)

    adapted, types = _adapted(folder, config, named, dtype)
    inputs = random_inputs(adapted.get_base_model())
    if types is not None:  # what the written model can be given too
        inputs = _floats_to(_floats_to(inputs, types.main), adapted.get_base_model().dtype)
    before, measured = first_output(adapted, inputs)
    was_tied = getattr(adapted.get_base_model().config, "tie_word_embeddings", False)
    untied = _untie(adapted, folder)
    try:
        with warnings.catch_warnings():
            # Of ties, which `_untie` has seen to; peft itself unties what modules_to_save holds, as the report says.
            warnings.filterwarnings("ignore", "Model with `tie_word_embeddings=True`|Input and output embeddings")
            model = adapted.merge_and_unload(safe_merge=True)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    except (ValueError, NotImplementedError, AttributeError) as error:  # peft's, in many words
        raise UserError(f"a {peft_type} adapter cannot be merged here: {one_line(error)}") from error
    untied |= was_tied and not model.config.tie_word_embeddings
    rounded = None
    if types is not None:  # quantizing again is no rounding, and is shown but not judged
        _check_same(first_output(model, inputs)[0], before, "the adapter's")
        types.give(model)
        inputs = _floats_to(inputs, types.main)
        rounded, _ = first_output(model, inputs)
    needs_package = _mark_ours(model)
    with staged_output(output, {}) as place:
        model.save_pretrained(place)
        del model, adapted
        theirs = copy_companions(Path(named), place) if Path(named).is_dir() else ()
        copied = {*theirs, *copy_companions(folder, place, without=CONFIG)}  # a tokenizer with added tokens wins
        after, _ = first_output(load_model(place), inputs)
        if rounded is not None:
            _check_same(after, rounded, "its own before it was written")
        difference, scale = (after.double() - before.double()).abs().max().item(), before.double().abs().max().item()
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
    peft_type = config.get("peft_type")
    tuner = require("peft", "peft.mapping").PEFT_TYPE_TO_TUNER_MAPPING.get(peft_type)
    if not isinstance(peft_type, str) or tuner is None:
        raise UserError(f"{folder / CONFIG}: peft knows no peft_type {peft_type!r}")
    if not is_mergeable(peft_type):
        raise UserError(
            f"{folder} is a {peft_type} adapter, which cannot be merged: it is not linear in its input, so no weight "
            "can take it in; load it with peft's AutoPeftModel classes"
        )
    if not hasattr(tuner, "merge_and_unload"):
        raise UserError(f"{folder} is a {peft_type} adapter, which has no weights to merge into the base's")
    return peft_type


@dataclass(frozen=True)
class _Types:
    """The types that merged weights are rounded to."""

    main: torch.dtype
    wider: Mapping[str, torch.dtype]
    """Types of tensors, by name, that are wider: transformers keeps some in float32 beside float16."""

    def give(self, model: Any) -> None:
        """Cast the model in place; rational coefficients keep their float32, as in every cast."""
        saved = model.state_dict()
        kept = {name: saved[name].to(dtype) for name, dtype in self.wider.items() if name in saved}
        # Rotary frequencies and their like: loading computes them anew, in float32.
        kept |= {name: buffer.detach() for name, buffer in model.named_buffers() if name not in saved}
        model.to(self.main)
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
            if name in kept:
                tensor.data = kept[name]


def _floats_to(inputs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def _check_same(outputs: torch.Tensor, wanted: torch.Tensor, whose: str) -> None:
    """Raise UserError where outputs are further apart than rounding within one type explains.

    Args:
        outputs: of the merged model, any shape.
        wanted: of the same shape.
        whose: these are, for the message.
    """
    got, right = outputs.double(), wanted.double()
    distance = torch.where(got == right, 0, got - right).square().mean().sqrt().item()  # equal infinities are no fault
    size = right[right.isfinite()].square().mean().sqrt().item()
    if not distance <= max(_BOUND, torch.finfo(outputs.dtype).eps ** 0.5) * size:  # NaN is refused too
        raise UserError(
            f"the merged model's outputs are {distance:.2g} away from {whose}, of outputs of {size:.2g} (root mean "
            "squares): more than rounding; use the adapter unmerged"
        )


def _adapted(folder: Path, config: Mapping[str, Any], named: str, dtype: str) -> tuple[Any, _Types | None]:
    """Return the base model, in float32 or wider, with the adapter on it, evaluating; and the types to round to.

    A quantized base stays as it is, and there are no types then.
    """
    import transformers
    from peft import PeftModel

    task, mapping = config.get("task_type"), config.get("auto_mapping") or {}
    class_name = _AUTO.get(task or "") or mapping.get("base_model_class")
    options: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
    if revision := config.get("revision"):
        options["revision"] = revision
    if (labels := head_labels(folder)) is not None:
        options |= {"num_labels": labels, "ignore_mismatched_sizes": True}  # the adapter brings the head
    try:
        with quiet_loading(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # see _untie
            if class_name is None or not hasattr(transformers, class_name):
                load = partial(load_model, named)
            else:
                load = partial(getattr(transformers, class_name).from_pretrained, named, **options)
            model = load(dtype="auto")
            types = None
            if getattr(model.config, "quantization_config", None) is not None:
                if dtype != "auto":  # of what is not quantized
                    del model
                    model = load(dtype=dtype)
            else:
                types = _types(model, dtype)
                model.to(torch.promote_types(torch.promote_types(model.dtype, types.main), torch.float32))
            return PeftModel.from_pretrained(model, str(folder)).eval(), types
    except UserError as error:
        raise UserError(f"{folder} does not fit {named}: {error}") from error
    except BUILD_ERRORS as error:
        raise UserError(f"{folder} does not fit {named}, or {named} is not there: {one_line(error)}") from error


def _types(model: Any, dtype: str) -> _Types:
    if dtype != "auto":
        return _Types(getattr(torch, dtype), {})
    own = {name: tensor.dtype for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    main = model.dtype
    return _Types(main, {name: each for name, each in own.items() if torch.promote_types(each, main) != main})


def _untie(adapted: Any, folder: Path) -> bool:
    """Give layers that are merged a weight of their own where another module has the same one: it stays as it is.

    Returns:
        True if there was any.

    Raises:
        UserError: the model's config cannot say so, for it is no output head that shares the embedding's weight.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    model: Any = adapted.get_base_model()
    layers = {name: each for name, each in model.named_modules() if isinstance(each, BaseTunerLayer)}
    bases: dict[str, Any] = {name: layer.get_base_layer() for name, layer in layers.items()}
    owners: dict[int, list[tuple[str, Any]]] = {}
    for name, module in model.named_modules():
        if name.endswith(".original_module"):
            continue  # of modules_to_save: the adapter's own copy takes its place
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


def _mark_ours(model: Any) -> bool:
    """Make layers of ours that stay in the model saveable; return whether there are any."""
    listed = {name for entry in getattr(model.config, FIELD, None) or [] for name in entry["modules"]}
    configs = {}
    for name, module in model.named_modules():
        method = method_of_layer(module)
        if method is not None and name not in listed:
            configs[name] = getattr(module, f"{method.name}_config")
    for entry in layer_entries(configs):
        make_saveable(model, entry)
    return bool(configs or listed)
