"""Up-cycling: a plain checkpoint becomes an augmented one that starts from its weights.

Sine low-rank weights are fitted to the dense ones, which makes the checkpoint smaller and moves the outputs; all else
keeps them. NOBLE: with up_init="zero" the up projections start at zero, so the outputs are bit-equal;
with "paper" they are drawn as from scratch, N(0, (up_scale / sqrt(r))^2), which shifts the outputs. Rational
activations: bit-equal with anchor="exact", else the outputs move by the error of the fit. In every case the difference
is measured, between the input folder's model and the one that is loaded again from what was written.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.surgery.augment import augment, known_method
from nonlinear_lowrank.surgery.report import AugmentReport
from nonlinear_lowrank.validation import check_choice, one_line

from .card import shown_name, write_card
from .classes import augmented_layers
from .loading import load_model
from .registration import TYPE_PREFIX
from .storage import MANIFEST, check_folder, check_model_folder, check_output, staged_output

# What travels beside the weights: tokenizers, also those of images (as `nlr_lab.tasks.images.tokenizers` saves them),
# processors, chat templates and licences. Never code or pickles.
_COMPANIONS = (
    *("*.json", "*.txt", "*.model", "*.spm", "*.tiktoken", "bpe.codes", "*.jinja", "additional_chat_templates/*.jinja"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "*_Pooling/config.json"),
    *("image_tokenizer.safetensors", "image_tokenizer/*.json", "image_tokenizer/*.safetensors"),
)
_REWRITTEN = (MANIFEST, "config.json", "generation_config.json", "*.safetensors.index.json", "*.bin.index.json")
_SEQUENCES, _TOKENS = 2, 32


@dataclass(frozen=True)
class ConvertReport:
    """Result of `convert`: what was put in, and how far the outputs moved from the input model's."""

    output: Path
    augmented: AugmentReport
    up_init: str | None
    """"zero" or "paper"; None: there are no up projections to draw."""
    difference: float
    """Largest absolute difference of the outputs on random inputs, after writing and loading again."""
    bit_equal: bool
    measured: str
    """Name and shape of the output that was compared."""
    copied: tuple[str, ...]
    """Files that were copied unchanged."""

    @property
    def verdict(self) -> str:
        """The difference in words."""
        return "bit-equal" if self.bit_equal else f"max |difference| {self.difference:.3e}"

    def __str__(self) -> str:
        start = f"up init {self.up_init}: " if self.up_init is not None else ""
        return (
            f"{self.augmented}\n{start}{self.measured} before and after: {self.verdict}\n"
            f"copied {', '.join(self.copied) or 'no other files'}\nwritten to {self.output}"
        )


def convert(
    input_dir: str | Path,
    output_dir: str | Path,
    config: Any,
    *,
    up_init: Literal["zero", "paper"] = "zero",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    split_fused: bool = False,
    overwrite: bool = False,
    **load: Any,
) -> ConvertReport:
    """Put a method's layers into a plain checkpoint, and keep what it has learned.

    The output is written beside its place, and renamed once it is complete, measured and loadable.

    Args:
        input_dir: a plain model as save_pretrained writes it, safetensors only.
        output_dir: new or empty, or with overwrite a model's folder.
        config: a method's config that keeps weights, `NobleConfig(rank=64)`, whose `init` is set to "pretrained",
            `RationalConfig(groups=8)`, `NonlinearQueryConfig()`, whose `residual` is set to "linear", or
            `SineLowRankConfig(rank=64)`, whose `init` is set to "fit".
        up_init: "zero" for equal outputs, "paper" for the up projections of a model from scratch; NOBLE's alone.
        include: as in `augment`.
        exclude: as in `augment`.
        split_fused: as in `augment`; outputs are then equal up to rounding.
        overwrite: replace the model, and all else, that is in output_dir.
        **load: for from_pretrained (dtype, device_map, ...); default: the type of the saved weights.

    Raises:
        UserError: a folder or file is not as it must be, the model is augmented already, or the settings
            do not fit it. Nothing is left in output_dir then.
    """
    check_choice("up_init", up_init, ("zero", "paper"))
    method = known_method(config)
    if method.wraps:
        raise UserError(f"{method.name} changes what a trained model computes; augment the model and train it on")
    if method.replaces_weights and not method.keeps_weights_by:
        raise UserError(
            f"{method.name} discards trained weights; use NobleConfig, RationalConfig, NonlinearQueryConfig or "
            "SineLowRankConfig"
        )
    given, config = config, method.converted(config)
    for each in fields(config):
        if (value := getattr(given, each.name)) not in (each.default, getattr(config, each.name)):
            raise UserError(f"{each.name}={value!r} redraws the weights, which convert keeps; omit it")
    if up_init == "paper" and not method.draws_up:
        raise UserError("up_init='paper' is for NOBLE's up projections; omit it")
    source, output = check_folder(input_dir).resolve(), Path(output_dir).expanduser().resolve()
    if output == source or output in source.parents or source in output.parents:
        raise UserError(f"the output folder {output} overlaps the input {source}; choose another")
    check_output(output, overwrite=overwrite)
    if check_model_folder(source)["model_type"].startswith(TYPE_PREFIX):
        raise UserError(f"{source} is augmented already; convert the plain model that it came from")

    model = load_model(source, **load)
    inputs = random_inputs(model)
    before, measured = first_output(model, inputs)
    report = augment(model, config, include=include, exclude=exclude, split_fused=split_fused, verbose=False)
    if up_init == "paper":
        for layer in augmented_layers(model):
            method.draw_up(layer)
    with staged_output(output) as folder:
        model.save_pretrained(folder)
        del model
        copied = copy_companions(source, folder)
        after, _ = first_output(load_model(folder, **load), inputs)
        difference, bit_equal = (after.double() - before.double()).abs().max().item(), torch.equal(before, after)
        up = up_init if method.draws_up else None
        converted = ConvertReport(output, report, up, difference, bit_equal, measured, copied)
        start, what = f" (up init: {up})" if up else "", f"{report.method} layers"
        write_card(
            folder,
            title=f"{shown_name(str(source))} with {what}",
            summary=f"A trained plain checkpoint with {what}; not trained further.",
            command="nlr convert IN OUT",
            base=str(source),
            sections={
                "Results": f"Parameters {report.parameters_added:+,}{start}. {measured} before and after, on random "
                f"inputs, one measurement (n = 1): {converted.verdict}."
            },
        )
    return converted


def random_inputs(model: Any) -> dict[str, Tensor]:
    """Return random tokens or pixels that fit the model; both where it compares the two, as CLIP does."""
    config, text = model.config, model.config.get_text_config()
    image_token = getattr(config, "image_token_id", None)
    names = {model.main_input_name}
    if hasattr(config, "vision_config"):
        names = {"input_ids"} if image_token is not None else {"input_ids", "pixel_values"}
    inputs: dict[str, Tensor] = {}
    # A decoder's classifier reads the last token before the padding; without a padding token it takes one row.
    unpadded = getattr(text, "pad_token_id", None) is None
    rows = 1 if unpadded and type(model).__name__.endswith("ForSequenceClassification") else _SEQUENCES
    if "input_ids" in names:
        length = min(_TOKENS, getattr(text, "max_position_embeddings", _TOKENS))
        tokens = torch.randint(text.vocab_size, (rows, length), device=model.device)
        inputs["input_ids"] = tokens.masked_fill(tokens == image_token, 0) if image_token is not None else tokens
        if config.is_encoder_decoder:
            if isinstance(end := config.eos_token_id, int) and end < text.vocab_size:
                # Classifiers read the state of the one end token that each sequence has.
                tokens[tokens == end] = (end + 1) % text.vocab_size
                tokens[:, -1] = end
            inputs["decoder_input_ids"] = inputs["input_ids"].flip(0)
    if "input_features" in names:  # of speech: twice as many frames as positions, in Whisper behind the frequencies
        frames, bins = 2 * getattr(config, "max_source_positions", 512), getattr(config, "num_mel_bins", None)
        sizes = (bins, frames) if bins else (frames, getattr(config, "input_feat_per_channel", 80))
        inputs["input_features"] = torch.randn(rows, *sizes, device=model.device, dtype=model.dtype)
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(text.vocab_size, (rows, 4), device=model.device)
    if "pixel_values" in names:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        shape = (rows, getattr(vision, "num_channels", 3), height, width)
        inputs["pixel_values"] = torch.randn(shape, device=model.device, dtype=model.dtype)
    return inputs


@torch.no_grad()
def first_output(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, str]:
    """Return the model's first output on the inputs, with its name and shape."""
    try:
        outputs = model(**inputs)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        given = " and ".join(inputs) or "nothing: its input is neither tokens nor pixels"
        raise UserError(f"cannot measure {type(model).__name__} on random {given}: {one_line(error)}") from error
    name, value = next((name, value) for name, value in outputs.items() if isinstance(value, Tensor))
    return value.cpu(), f"{name} {tuple(value.shape)}"


def copy_companions(source: Path, folder: Path, *, without: str = "") -> tuple[str, ...]:
    """Copy what belongs to a model beside its weights (tokenizer, licence, ...) except `without`; return the names."""
    found = {path for pattern in _COMPANIONS for path in source.glob(pattern) if path.is_file()}
    rewritten = {path for pattern in _REWRITTEN for path in source.glob(pattern)}
    names = sorted({path.relative_to(source).as_posix() for path in found - rewritten} - {without})
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    return tuple(names)
