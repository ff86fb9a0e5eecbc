"""`nlr generate CHECKPOINT --prompt TEXT`, or `--classes NAME ...` for a model of image tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import FlagCreatePairsOff, Positional

from nonlinear_lowrank.errors import UserError

from .checkpoint import check_parent, find_model, open_language_model, open_tokenizer
from .options import parse

_SHOWN = 10  # classes that are drawn where none is named


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continue a prompt with a trained language model, or draw images with one of image tokens."""

    checkpoint: Positional[str]
    """A model folder, an adapter of peft, or the run folder that `nlr train` wrote."""
    base: str | None = None
    """Folder or name of an adapter's base model, if not the one that the adapter names."""
    prompt: str = ""
    """The text to continue; empty starts a new document."""
    chat: FlagCreatePairsOff[bool] = False
    """The prompt is a user's turn in the tokenizer's chat template, and the answer is generated."""
    max_new_tokens: int | None = None
    """Stop after this many tokens, or at the end-of-text token; none: 128, or as many as fit."""
    classes: tuple[str, ...] = ()
    """Image tokens: the classes to draw, by name or number; none: the first ten."""
    images: int | None = None
    """Image tokens: images of each class; none: 8."""
    out: str | None = None
    """Image tokens: the picture, a row for each class; none: samples.png."""
    temperature: float | None = None
    """Divisor of the logits; 0 takes the most likely token every time. None: 0.8 for text, 1 for images."""
    top_k: int | None = None
    """Draw from the k most likely tokens; 0: from all. None: 50 for text, 0 for images."""
    seed: int = 0
    """The same seed, model and prompt (or classes) give the same text (or picture) on the same machine."""
    device: str = ""
    """cpu, cuda or cuda:N; empty: the GPU, if there is one."""


def run_generate(arguments: list[str]) -> None:
    """Print the prompt and its continuation as it is generated, or write a picture."""
    options = parse(GenerateOptions, arguments, command="generate")
    folder = find_model(options.checkpoint, adapters=True)
    draws = (folder / "image_tokenizer.json").is_file()
    if draws and (options.prompt or options.chat):
        raise UserError(f"{folder} draws images and takes no --prompt; name classes with --classes")
    for name in () if draws else ("classes", "images", "out"):
        if getattr(options, name) not in ((), None):
            raise UserError(f"--{name} is for models of image tokens; {folder} has no image tokenizer")
    temperature, top_k = (1.0, 0) if draws else (0.8, 50)

    from nlr_lab.evaluation.generation import Sampling

    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=temperature if options.temperature is None else options.temperature,
        top_k=top_k if options.top_k is None else options.top_k,
        seed=options.seed,
        chat=options.chat,
    )
    (_draw if draws else _write)(folder, options, sampling)


def _write(folder: Path, options: GenerateOptions, sampling: Any) -> None:
    from transformers import TextStreamer

    from nlr_lab.evaluation.generation import encode_prompt, generate_text

    model = open_language_model(folder, options.device, options.base)
    tokenizer = open_tokenizer(folder, options.base)
    encode_prompt(model, tokenizer, options.prompt, sampling)  # refuses before anything is printed
    print(options.prompt, end="\n\n" if options.chat else "", flush=True)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        generate_text(model, tokenizer, options.prompt, sampling, streamer)
    except UserError:
        print()  # the error begins a line
        raise


def _draw(folder: Path, options: GenerateOptions, sampling: Any) -> None:
    out = Path("samples.png" if options.out is None else options.out)
    each = 8 if options.images is None else options.images
    check_parent(out, "--out")
    if out.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise UserError(f"--out must end in .png, .jpg or .webp, got {out.name}")

    from nlr_lab.evaluation.generation import picture, sample_images
    from nlr_lab.tasks.images.tokenizers import ImageCodec

    codec = ImageCodec.load(folder)
    classes = [codec.find_class(name) for name in options.classes] or list(range(len(codec.classes)))[:_SHOWN]
    model = open_language_model(folder, options.device, options.base)
    images = sample_images(model, codec, classes, each, sampling)
    names = [codec.classes[number] for number in classes]
    picture(images, names).save(out)
    print(f"{each} images of each of {', '.join(names)}: {out}")
