"""Images encoded once: a source and a tokenizer -> files of token sequences, cached by their content.

A cache folder, <cache>/image-tokens/<key>, holds

    train.npy, valid.npy    sequences of 1 + rows x columns tokens one after the other, the class token first;
                            one axis, uint16 or uint32
    tokenizer/              the image tokenizer (see `tokenizers`)
    images.json             what they were made of, and how well pictures survive it
    manifest.json           sizes and hashes of these

The key is a hash of the images' content, of the tokenizer and of what is chosen. What is encoded so far lies in
<key>.parts: a run that is killed resumes there. An image that cannot be read is skipped, named and counted.
"""

import hashlib
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from nlr_lab.runtime.bounds import eight_bits
from nlr_lab.runtime.storage import is_whole
from nlr_lab.tasks.task import MOST_HASHED, Prepared, cache_folder, cached, choose, fingerprint
from nlr_lab.tasks.text.packed import NpyWriter, TokenBlocks
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import hash_file, staged_folder

from .sources import Images, ImageSplits, read_digits, read_images
from .tokenizers import ImageCodec, ImageTokenizer, PatchTokenizer, VQTokenizer, find_vq
from .tokens import ImageTokenData

_VERSION = 3  # of what a source gives and of the cache's layout; part of the key
_BATCH = 256  # images that are held in pixels
_UNREADABLE = np.iinfo(np.uint32).max  # in place of the class token
_FIT_IMAGES = 20_000  # that the means of patches are fitted on
_PICTURES = 2048  # held-out images whose decoded pictures are compared with them


def prepare_images(config: ImageTokenData, *, progress: bool = True) -> Prepared:
    """Encode images, or find them in the cache; safe to call from several processes at once. `vocab_size` is the number
    of codes, which is what a model predicts, and class c is token vocab_size + c. The tokenizer is an `ImageCodec`,
    saved beside the model so that it can draw. Raise UserError where the source or the tokenizer cannot be used."""
    source, splits = config.source, read_images(config.source)
    count, used = len(splits.classes), min(len(splits.train), config.train_images or len(splits.train))
    if config.classes not in (None, count):
        raise UserError(f"{source} has {count} classes, not {config.classes}; set --classes {count}")
    if used < count:
        few = f"{used} training images are fewer than the {count} classes of {source}"
        raise UserError(f"{few}; give more images, or raise train_images")
    vq = None if config.tokenizer == "patches" else find_vq(config.tokenizer)
    if vq is not None and (vq.patch, vq.codes) != (config.patch, config.codes):
        own = f"the VQModel {config.tokenizer} has {vq.codes} codes of {vq.patch} pixels"
        raise UserError(f"{own}; set --codes {vq.codes} --patch {vq.patch}")
    folder = cache_folder(config.cache_dir) / "image-tokens" / _key(config, splits, vq)[:32]
    facts, codec = cached(folder, _read, lambda place: _build(config, splits, vq, place, progress))
    made_of = json.dumps([facts["train"]["sha256"], facts["valid"]["sha256"], facts["codes"], list(codec.classes)])
    train, valid = (TokenBlocks(folder / f"{side}.npy", config.sequence_length) for side in ("train", "valid"))
    return Prepared(
        train=train,
        valid=valid,
        tokenizer=codec,
        vocab_size=codec.tokenizer.codes,
        classes=codec.classes,
        fingerprint=hashlib.sha256(made_of.encode()).hexdigest()[:32],
        facts={**facts, "train_sequences": len(train), "evaluated_sequences": len(valid)},
    )


def as_square(image: Any, size: int, channels: int) -> np.ndarray:
    """Return a PIL image or an array (H, W[, C]) as (size, size, channels) uint8; scaled, and its middle kept. Raise
    UserError where it cannot be shown in 8 bits."""
    image = eight_bits(image).convert("L" if channels == 1 else "RGB")
    if min(image.size) != size:
        scale = size / min(image.size)
        sides = tuple(max(size, round(side * scale)) for side in image.size)
        image = image.resize(sides, Image.Resampling.BICUBIC)
    left, top = ((side - size) // 2 for side in image.size)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.uint8)
    return pixels[..., None] if channels == 1 else pixels


def _key(config: ImageTokenData, splits: ImageSplits, vq: VQTokenizer | None) -> str:
    how = [config.size, config.patch, config.codes] if vq is None else [config.size, vq.identity()]
    chosen = [config.train_images, config.eval_images, list(splits.classes)]
    return hashlib.sha256(json.dumps([_VERSION, _identity(config.source), how, chosen]).encode()).hexdigest()


def _identity(source: str) -> str:
    """Return a hash of a source's content; a dataset is known by the fingerprints of its splits."""
    path = Path(source).expanduser()
    if source == "digits":
        return fingerprint(*read_digits())
    if path.exists():
        digest = hashlib.sha256()
        for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
            digest.update(f"{file.relative_to(path)}\n{hash_file(file)}\n".encode())
        return digest.hexdigest()
    from datasets import load_dataset

    data: Any = load_dataset(source)  # `read_images` has just done so
    return json.dumps([source, {name: getattr(side, "_fingerprint", None) for name, side in data.items()}])


def _read(folder: Path) -> tuple[dict[str, Any], ImageCodec] | None:
    """Return what the cache says of itself, and its tokenizer; None where it is not whole."""
    facts = json.loads((folder / "images.json").read_text(encoding="utf-8"))
    codec = ImageCodec.load(folder / "tokenizer")
    return (facts, codec) if is_whole(folder, MOST_HASHED) and codec.tokenizer.codes == facts["codes"] else None


def _build(config: ImageTokenData, splits: ImageSplits, vq: VQTokenizer | None, folder: Path, progress: bool) -> None:
    """Encode what is not encoded yet, and put the folder in its place."""
    train = splits.train.select(choose(len(splits.train), config.train_images, 1))
    valid = splits.test.select(choose(len(splits.test), config.eval_images, 2))
    valid.first_readable()
    parts = folder.with_name(f"{folder.name}.parts")
    parts.mkdir(exist_ok=True)
    tokenizer: ImageTokenizer = vq or _fit(config, train)
    side, rows = config.side, {}
    facts: dict[str, Any] = {
        "source": config.source,
        "classes": len(splits.classes),
        "size": config.size,
        "channels": tokenizer.channels,
        "tokenizer": config.tokenizer,
        "codes": tokenizer.codes,
        "grid": [side, side],
    }
    with staged_folder(folder, {}) as staged:
        ImageCodec(tokenizer, side, side, splits.classes).save_pretrained(staged / "tokenizer")
        for name, images in (("train", train), ("valid", valid)):
            rows[name] = _encode(config, images, tokenizer, parts / f"{name}.npy", progress)
            facts[name] = _write(staged / f"{name}.npy", rows[name], tokenizer.codes + len(splits.classes))
        facts["psnr_db"] = _psnr(config, valid, rows["valid"], tokenizer)
        (staged / "images.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    shutil.rmtree(parts)


def _fit(config: ImageTokenData, images: Images) -> PatchTokenizer:
    """Fit the mean patches; a run that resumes gets the same ones again."""
    some = images.select(choose(len(images), _FIT_IMAGES, 3))
    channels = 1 if some.first_readable().mode in ("1", "L") else 3
    _, pixels = _read_squares(some, range(len(some)), config.size, channels)
    return PatchTokenizer.fit(pixels, codes=config.codes, patch=config.patch)


def _encode(
    config: ImageTokenData, images: Images, tokenizer: ImageTokenizer, file: Path, progress: bool
) -> np.ndarray:
    """Return the sequence of each image, (N, L) uint32, in a file that a killed run may have begun: a batch's class
    tokens, which are never 0, are written when its codes are on disk."""
    try:
        rows = np.load(file, mmap_mode="r+")  # extends a truncated file
    except (OSError, ValueError, EOFError):
        rows = np.lib.format.open_memmap(file, "w+", np.uint32, (len(images), config.sequence_length))
    quiet = not progress or not sys.stderr.isatty()
    for start in tqdm(range(0, len(images), _BATCH), desc=f"encoding {file.stem}", disable=quiet):
        batch = rows[start : start + _BATCH]
        if batch[:, 0].all():
            continue
        places = range(start, start + len(batch))
        read, pixels = _read_squares(images, places, config.size, tokenizer.channels)
        if read.any():
            batch[read, 1:] = tokenizer.encode(pixels).reshape(len(pixels), -1)
        rows.flush()
        batch[:, 0] = np.where(read, tokenizer.codes + images.labels[places], _UNREADABLE)
    return rows


def _read_squares(images: Images, places: Sequence[int], size: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the images can be read, (N,) bool, and the pixels of these, (M, size, size, C)."""

    def one(index: int) -> np.ndarray | UserError:
        try:
            return as_square(images.read(index), size, channels)
        except UserError as error:
            return error

    # Decoding a file frees the interpreter, so that threads share the work.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        found = list(threads.map(one, places))
    pixels = [each for each in found if isinstance(each, np.ndarray)]
    for each in found:
        if isinstance(each, UserError):
            warnings.warn(f"{each}; skipped", stacklevel=2)
    return np.array([isinstance(each, np.ndarray) for each in found]), np.stack(pixels) if pixels else np.empty(0)


def _write(file: Path, rows: np.ndarray, tokens: int) -> dict[str, Any]:
    """Write the sequences of the images that could be read; return what there is to say of them."""
    readable = rows[:, 0] != _UNREADABLE
    with NpyWriter(file, tokens) as written:
        for start in range(0, len(rows), _BATCH):
            part = slice(start, start + _BATCH)
            written.append(rows[part][readable[part]].reshape(-1))
    count = int(readable.sum())
    facts = {"images": count, "tokens": written.count, "unreadable": len(rows) - count}
    return {**facts, "sha256": written.digest.hexdigest()}


def _psnr(config: ImageTokenData, images: Images, rows: np.ndarray, tokenizer: ImageTokenizer) -> float:
    """Return the PSNR of the first held-out images after encoding and decoding, in dB."""
    error, compared = 0.0, 0
    for start in range(0, min(len(images), _PICTURES), _BATCH):
        places = range(start, min(start + _BATCH, len(images)))
        read, pixels = _read_squares(images, places, config.size, tokenizer.channels)
        if read.any():
            codes = rows[places][read, 1:].astype(np.int64).reshape(-1, config.side, config.side)
            error += float(((tokenizer.decode(codes).astype(np.float64) - pixels) ** 2).sum())
            compared += pixels.size
    return round(10 * math.log10(255**2 / max(error / max(compared, 1), 1e-9)), 3)
