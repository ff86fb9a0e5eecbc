"""An adapter folder becomes a model folder: the base model with the adapter in its weights.

The result is a plain Hugging Face model that needs none of our code, except with NoRA, whose rational activations
stay: that one is an augmented model of the package (see `hub`).
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from nonlinear_lowrank.errors import BUILD_ERRORS, UserError
from nonlinear_lowrank.methods.base import method_of_layer
from nonlinear_lowrank.methods.matrix import holders
from nonlinear_lowrank.surgery.augment import layer_entries
from nonlinear_lowrank.validation import one_line, require

from .card import shown_name, table, write_card
from .classes import make_saveable, quiet_loading
from .conversion import copy_companions, first_output, random_inputs
from .loading import (
    ADAPTER_CONFIG,
    BASE,
    base_class,
    base_of,
    check_weights,
    embedding_of,
    head_labels,
    is_mergeable,
    load_model,
    make_room,
)
from .registration import FIELD
from .storage import check_folder, check_output, read_json, staged_output

# Root mean square of a difference over that of the outputs, where both were computed in one type from the same weights:
# about 1e-6 in float32, more where a router's near tie goes the other way, and far more where a merge is wrong. In a
# narrower type the square root of its precision, where that is more: 0.03 in float16, 0.09 in bfloat16.
_BOUND = 5e-3


@dataclass(frozen=True)
class MergeReport:
    """Result of `merge_adapter`, and how far its outputs are from the base's with the adapter on it."""

    difference: float
    """Largest absolute difference of the outputs on random inputs, after writing and loading again; the adapted
    outputs are in float32, so it includes the rounding to the weights' type."""
    scale: float
    """Largest absolute output."""
    text: str
    """Report of the merge: what was merged, measured and written, a line each."""

    def __str__(self) -> str:
        return self.text


def merge_adapter(
    adapter_dir: str | Path,
    output_dir: str | Path,
    *,
    base: str | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
) -> MergeReport:
    """Write the base model with an adapter merged into it; the adapter may be any of peft's that merges into weights.

    The output is written beside its place, and renamed once it is complete, measured and loadable. The base is held in
    float32 meanwhile, four bytes a parameter (float64 stays, quantized weights stay quantized), and rounded once.

    Args:
        adapter_dir: as `save_pretrained` of peft writes it, safetensors only.
        output_dir: new or empty, or with overwrite a model's folder.
        base: folder or hub name of the base model; None: as the adapter names it.
        dtype: of the merged weights: "auto" for the base's own, or "float32", "bfloat16", ...
        overwrite: replace the model, and all else, that is in output_dir.

    Raises:
        UserError: the adapter cannot be merged or does not fit, it has weights that are not finite, a file is
            missing or damaged, output_dir is not empty or holds what is read, or the merged model's outputs are not the
            adapter's. Nothing is left in output_dir then.
    """
    given = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise UserError(f"unknown dtype {dtype!r}; use auto, float32, bfloat16 or float16")
    folder, output = check_folder(adapter_dir).resolve(), Path(output_dir).expanduser().resolve()
    if (folder / "config.json").is_file() and not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder} holds a whole model and no adapter: there is nothing to merge; use it as it is")
    config = read_json(folder / ADAPTER_CONFIG)
    peft_type = _check_type(folder, config)
    check_output(output, overwrite=overwrite)
    if folder in output.parents:
        raise UserError(f"the output folder {output} is inside the adapter's; choose another")
    check_weights(folder)
    named = base_of(folder, base)
    if any(output in (read, *read.parents) for read in (folder, Path(named).expanduser().resolve())):
        raise UserError(f"the output folder {output} holds what is merged; choose another")
    origin = base or config.get("base_model_name_or_path") or named
    shown = shown_name(origin)

    adapted, main, types = _adapted(folder, config, named, dtype)
    plain: Any = adapted.get_base_model()
    inputs = random_inputs(plain)
    if main is not None:  # the written model takes these too
        inputs = _floats_to(_floats_to(inputs, main), plain.dtype)
    before, measured = first_output(adapted, inputs)
    was_tied = getattr(plain.config, "tie_word_embeddings", False)
    untied = _untie(plain, folder)
    try:
        with warnings.catch_warnings():
            # About ties, which `_untie` has undone; peft itself unties what modules_to_save holds, as the report says.
            warnings.filterwarnings("ignore", "Model with `tie_word_embeddings=True`|Input and output embeddings")
            model = adapted.merge_and_unload(safe_merge=True)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    except (ValueError, NotImplementedError, AttributeError) as error:  # peft's are long
        raise UserError(f"a {peft_type} adapter cannot be merged here: {one_line(error)}") from error
    untied |= was_tied and not model.config.tie_word_embeddings
    rounded = None
    if main is not None:  # requantizing is not rounding: shown but not judged
        _check_same(first_output(model, inputs)[0], before, "the adapter's")
        _round(model, main, types)
        inputs = _floats_to(inputs, main)
        rounded, _ = first_output(model, inputs)
    needs_package = _mark_ours(model)
    with staged_output(output) as place:
        model.save_pretrained(place)
        del model, adapted, plain
        plain_base = Path(named).is_dir() and not (folder / BASE).is_dir()  # an encoder's would name no classifier
        copied = set(copy_companions(Path(named), place) if plain_base else ())
        copied |= {*copy_companions(folder, place, without=ADAPTER_CONFIG)}  # added tokens win
        after, _ = first_output(load_model(place), inputs)
        if rounded is not None:
            _check_same(after, rounded, "its own before it was written")
        difference, scale = (after.double() - before.double()).abs().max().item(), before.double().abs().max().item()
        numbers = f"max |difference| {difference:.3e}, outputs up to {scale:.3g}"
        settings = {name: config[name] for name in ("peft_type", "r", "target_modules", "omega") if config.get(name)}
        results = f"{measured} adapted and merged, on random inputs, one measurement (n = 1): {numbers}."
        write_card(
            place,
            title=f"{shown} with a merged {peft_type} adapter",
            summary="A base model with an adapter folded into its weights.",
            command="nlr merge ADAPTER OUT",
            base=origin,
            sections={"Adapter": table(settings), "Results": results},
        )
    lines = [f"{peft_type} adapter merged into {shown}", f"{measured} adapted and merged: {numbers}"]
    if untied:
        lines.append("the output head has a weight of its own now, no longer the embedding's")
    lines.append(f"copied {', '.join(sorted(copied)) or 'no other files'}")
    lines.append(
        f"written to {output}; {'loading it needs `import nonlinear_lowrank`' if needs_package else 'a plain model'}"
    )
    return MergeReport(difference, scale, "\n".join(lines))


def _check_type(folder: Path, config: Mapping[str, Any]) -> str:
    peft_type = config.get("peft_type")
    tuner = require("peft", "peft.mapping").PEFT_TYPE_TO_TUNER_MAPPING.get(peft_type)
    if not isinstance(peft_type, str) or tuner is None:
        raise UserError(f"{folder / ADAPTER_CONFIG}: peft knows no peft_type {peft_type!r}")
    if not is_mergeable(peft_type):
        raise UserError(f"{folder} is a {peft_type} adapter, which cannot be merged: it is not linear in its input")
    if not hasattr(tuner, "merge_and_unload"):
        raise UserError(f"{folder} is a {peft_type} adapter, which has no weights to merge into the base's")
    return peft_type


def _floats_to(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def _round(model: Any, main: torch.dtype, types: Mapping[str, torch.dtype]) -> None:
    """Cast merged weights in place; rational coefficients keep their float32, as in every cast."""
    saved = model.state_dict()
    kept = {name: saved[name].to(dtype) for name, dtype in types.items() if name in saved}
    # Rotary frequencies and their like: loading recomputes them, in float32.
    kept |= {name: buffer.detach() for name, buffer in model.named_buffers() if name not in saved}
    del saved  # the weights before, which would stay beside the cast ones
    model.to(main)
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if name in kept:
            tensor.data = kept[name]


def _check_same(outputs: Tensor, wanted: Tensor, whose: str) -> None:
    """Raise UserError where outputs are further from those of `whose` than rounding within one type explains."""
    got, right = outputs.double(), wanted.double()
    distance = torch.where(got == right, 0, got - right).square().mean().sqrt().item()  # equal infinities are fine
    size = right[right.isfinite()].square().mean().sqrt().item()
    if not distance <= max(_BOUND, torch.finfo(outputs.dtype).eps ** 0.5) * size:  # NaN is refused too
        far = f"{distance:.2g} away from {whose}, of outputs of {size:.2g} (root mean squares)"
        raise UserError(f"the merged model's outputs are {far}: more than rounding; use the adapter unmerged")


def _adapted(
    folder: Path, config: Mapping[str, Any], named: str, dtype: str
) -> tuple[Any, torch.dtype | None, dict[str, torch.dtype]]:
    """Return the base model, in float32 or wider, with the adapter on it, evaluating; and the types to round to.

    These are the main type, and those of tensors by name that are wider: transformers keeps some in float32 beside
    float16. A quantized base stays as it is, and there are none then.
    """
    from peft import PeftModel

    options: dict[str, Any] = {}
    if (known := getattr(transformers, base_class(config), None)) is not None:
        options = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
        options |= {"revision": config["revision"]} if config.get("revision") else {}
        if (labels := head_labels(folder)) is not None:
            options |= {"num_labels": labels, "ignore_mismatched_sizes": True}  # the adapter brings the head

    def load(dtype: str) -> tuple[Any, Mapping[str, Any]]:
        if known is None:
            return load_model(named, dtype=dtype, **options), {}
        loaded: tuple[Any, Mapping[str, Any]] = known.from_pretrained(named, dtype=dtype, **options)
        return loaded

    if (folder / BASE).is_dir() and Path(named) != folder / BASE:  # --base names the encoder of a mean-pooled model
        options["encoder_checkpoint"], named = named, str(folder / BASE)
    try:
        with quiet_loading(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # see _untie
            model, info = load("auto")
            main, types = None, {}
            if getattr(model.config, "quantization_config", None) is None:
                main = model.dtype if dtype == "auto" else getattr(torch, dtype)
                if dtype == "auto":
                    own = {name: each.dtype for name, each in model.state_dict().items() if each.is_floating_point()}
                    types = {name: each for name, each in own.items() if torch.promote_types(each, main) != main}
                model.to(torch.promote_types(torch.promote_types(model.dtype, main), torch.float32))
            elif dtype != "auto":  # of what is not quantized
                del model
                model, info = load(dtype)
            make_room(model, folder)
            adapted = PeftModel.from_pretrained(model, str(folder)).eval()
    except UserError as error:
        raise UserError(f"{folder} does not fit {named}: {error}") from error
    except BUILD_ERRORS as error:
        what = f"{folder} does not fit {named}, or {named} is not there (pass --base)"
        raise UserError(f"{what}: {one_line(error)}") from error
    _check_complete(adapted, info, named)
    return adapted, main, types


def _check_complete(adapted: Any, info: Mapping[str, Any], named: str) -> None:
    """Raise UserError for tensors that loading drew at random, and that the adapter did not bring."""
    drawn = {*info.get("missing_keys", ()), *(key for key, *_ in info.get("mismatched_keys", ()))}
    kept = (name.replace(".base_layer.", ".") for name, _ in adapted.get_base_model().named_parameters())
    if lost := sorted(drawn.intersection(kept)):
        module = lost[0].partition(".")[0]
        raise UserError(
            f"the base {named} has no {lost[0]}, and the adapter does not bring it: tune with "
            f"{module!r} in modules_to_save too"
        )


def _untie(model: Any, folder: Path) -> bool:
    """Give merged layers a weight of their own where another module shares it; return whether any did.

    Raises:
        UserError: the sharing is not that of output head and embedding, so the config cannot record the untying.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners = holders(model)
    both = (embedding_of(model), model.get_output_embeddings())
    ends = {id(end.get_base_layer() if hasattr(end, "get_base_layer") else end) for end in both if end}
    found = False
    for name, layer in list(model.named_modules()):
        base: Any = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else None
        sharing = owners.get(id(base._parameters.get("weight")), []) if base is not None else []
        if len(sharing) < 2 or isinstance(layer, TrainableTokensLayer):  # peft ties those of tied weights itself
            continue
        if not {id(module) for _, module in sharing} <= ends:
            others = ", ".join(other.removesuffix(".base_layer") for other, module in sharing if module is not base)
            raise UserError(f"{folder} changes {name}, whose weight {others} shares; use the adapter unmerged")
        base.weight = torch.nn.Parameter(base.weight.detach().clone(), requires_grad=base.weight.requires_grad)
        for part in (model.config, model.config.get_text_config()):
            part.tie_word_embeddings = False
        owners = {key: [each for each in value if each[1] is not base] for key, value in owners.items()}
        found = True
    return found


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
