"""Images encoded once: a source and a tokenizer -> files of token sequences, cached by their content.

A cache folder, <cache>/image-tokens/<key>, holds

    train.npy, valid.npy    sequences of 1 + rows x columns tokens one after the other, the class token first;
                            one axis, uint16 or uint32
    tokenizer/              the image tokenizer (see `tokenizers`)
    images.json             what they were made of, and how well pictures survive it

The key is a hash of the images' content, of the tokenizer and of what is chosen. Encoding is done in parts, which
stay in <key>.parts: a run that is killed resumes behind the last one. An image that cannot be read is skipped,
named and counted.
"""

import hashlib
import json
import math
import os
import shutil
import sys
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from nlr_lab.runtime.bounds import eight_bits
from nlr_lab.tasks.task import Prepared, are_whole, cache_folder, cached, choose, fingerprint
from nlr_lab.tasks.text.packed import NpyWriter, TokenBlocks
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import hash_file, staged_folder

from .sources import Images, ImageSplits, read_digits, read_images
from .tokenizers import ImageCodec, ImageTokenizer, PatchTokenizer, VQTokenizer, find_vq
from .tokens import ImageTokenData

_VERSION = 2  # of what a source gives and of the cache's layout; part of the key
_PART = 4096  # images that are encoded before they are written
_BATCH = 256  # images that are held in pixels
_FIT_IMAGES = 20_000  # that the means of patches are fitted on
_PICTURES = 2048  # held-out images whose decoded pictures are compared with them
_NAMED = 5  # unreadable images that are named


def prepare_images(config: ImageTokenData, *, progress: bool = True) -> Prepared:
    """Encode images, or find them in the cache. Safe to call from several processes at once.

    Returns:
        Sequences; `vocab_size` is the number of codes, which is what a model predicts, and class c is token
        vocab_size + c. The tokenizer is an `ImageCodec`, saved beside the model so that it can draw.

    Raises:
        UserError: the source or the tokenizer cannot be used; the message says why and what to change.
    """
    splits = read_images(config.source)
    _check(config, splits)
    vq = None if config.tokenizer == "patches" else _vq(config)
    folder = cache_folder(config.cache_dir) / "image-tokens" / _key(config, splits, vq)[:32]
    facts, codec = cached(folder, _read, lambda place: _Encoding(config, splits, vq, place, progress).build())
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
    """Return a PIL image or an array (H, W[, C]) as (size, size, channels) uint8; scaled, and its middle kept.

    Raises:
        UserError: it cannot be shown in 8 bits.
    """
    from PIL import Image

    image = eight_bits(image).convert("L" if channels == 1 else "RGB")
    if min(image.size) != size:
        scale = size / min(image.size)
        sides = tuple(max(size, round(side * scale)) for side in image.size)
        image = image.resize(sides, Image.Resampling.BICUBIC)
    left, top = ((side - size) // 2 for side in image.size)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.uint8)
    return pixels[..., None] if channels == 1 else pixels


def _check(config: ImageTokenData, splits: ImageSplits) -> None:
    source, count = config.source, len(splits.classes)
    if config.classes not in (None, count):
        raise UserError(f"{source} has {count} classes, not {config.classes}; set --classes {count}")
    if config.train_images is not None and config.train_images < count <= len(splits.train):
        raise UserError(
            f"train_images {config.train_images} is fewer than the {count} classes of {source}; set {count} or more"
        )
    if len(splits.train) < count:
        raise UserError(f"{source} has {len(splits.train)} training images, fewer than its {count} classes")
    if not len(splits.test):
        raise UserError(f"{source} has no image to evaluate on")


def _vq(config: ImageTokenData) -> VQTokenizer:
    found = find_vq(config.tokenizer)
    if found.patch != config.patch or found.codes != config.codes:
        raise UserError(
            f"the VQModel {config.tokenizer} has {found.codes} codes of {found.patch} pixels; set --codes "
            f"{found.codes} --patch {found.patch}"
        )
    return found


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
            try:
                digest.update(f"{file.relative_to(path)}\n{hash_file(file)}\n".encode())
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror}") from error
        return digest.hexdigest()
    from datasets import load_dataset

    data: Any = load_dataset(source)  # `read_images` has just done so
    return json.dumps([source, {name: getattr(side, "_fingerprint", None) for name, side in data.items()}])


def _read(folder: Path) -> tuple[dict[str, Any], ImageCodec] | None:
    """Return what the cache says of itself, and its tokenizer; None where it is not whole."""
    facts = json.loads((folder / "images.json").read_text(encoding="utf-8"))
    codec = ImageCodec.load(folder / "tokenizer")
    return (facts, codec) if are_whole(folder, facts) and codec.tokenizer.codes == facts["codes"] else None


class _Encoding:
    """Writer of a folder of the cache; see the file's documentation."""

    def __init__(
        self, config: ImageTokenData, splits: ImageSplits, vq: VQTokenizer | None, folder: Path, progress: bool
    ) -> None:
        self.config, self.vq, self.folder, self.progress = config, vq, folder, progress
        self.classes, self.parts = splits.classes, folder.with_name(f"{folder.name}.parts")
        self.train = splits.train.select(choose(len(splits.train), config.train_images, 1))
        self.valid = splits.test.select(choose(len(splits.test), config.eval_images, 2))

    def build(self) -> None:
        """Encode what is not encoded yet, and put the folder in its place."""
        self.parts.mkdir(exist_ok=True)
        tokenizer: ImageTokenizer = self.vq or self._fit()
        side = self.config.side
        with staged_folder(self.folder) as staged:
            ImageCodec(tokenizer, side, side, self.classes).save_pretrained(staged / "tokenizer")
            facts: dict[str, Any] = {
                "source": self.config.source,
                "classes": len(self.classes),
                "size": self.config.size,
                "channels": tokenizer.channels,
                "tokenizer": self.config.tokenizer,
                "codes": tokenizer.codes,
                "grid": [side, side],
                "train": self._side("train", self.train, tokenizer, staged),
                "valid": self._side("valid", self.valid, tokenizer, staged),
            }
            facts["psnr_db"] = facts["valid"].pop("psnr_db")
            (staged / "images.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        shutil.rmtree(self.parts)

    def _fit(self) -> PatchTokenizer:
        """Fit the mean patches; a run that resumes gets the same ones again."""
        self._say("fitting the mean patches")
        some = self.train.select(choose(len(self.train), _FIT_IMAGES, 3))
        pixels = [batch for batch, _ in self._pixels(some, 0, len(some), _channels(some), [])]
        if not pixels:
            raise UserError(f"no image of {self.config.source} can be read")
        return PatchTokenizer.fit(np.concatenate(pixels), codes=self.config.codes, patch=self.config.patch)

    def _side(self, name: str, images: Images, tokenizer: ImageTokenizer, staged: Path) -> dict[str, Any]:
        """Encode one side into <name>.npy; return what there is to say of it, and warn of images that were skipped."""
        source, unreadable = self.config.source, list[str]()
        error, compared = 0.0, 0
        with NpyWriter(staged / f"{name}.npy", tokenizer.codes + len(self.classes)) as written:
            for start in range(0, len(images), _PART):
                file = self.parts / f"{name}-{start:09d}.npz"
                if not zipfile.is_zipfile(file):  # absent, or cut short
                    self._say(f"encoding {name}: {start:,} of {len(images):,} images")
                    self._part(file, images, start, tokenizer, pictures=_PICTURES if name == "valid" else 0)
                with np.load(file, allow_pickle=False) as part:
                    written.append(part["tokens"].reshape(-1))
                    unreadable += part["unreadable"].tolist()
                    error, compared = error + float(part["error"]), compared + int(part["compared"])
        count = written.count // self.config.sequence_length
        if not count:
            raise UserError(f"no image of {source} ({name}) can be read: {unreadable[0]}")
        if unreadable:
            more = f", and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
            warnings.warn(
                f"{len(unreadable)} of {count + len(unreadable)} {name} images of {source} cannot be read and are "
                f"skipped: {'; '.join(unreadable[:_NAMED])}{more}",
                stacklevel=2,
            )
        facts: dict[str, Any] = {"images": count, "tokens": written.count, "unreadable": len(unreadable)}
        facts["sha256"] = written.digest.hexdigest()
        if compared:
            facts["psnr_db"] = round(10 * math.log10(255**2 / max(error / compared, 1e-9)), 3)
        return facts

    def _part(self, file: Path, images: Images, start: int, tokenizer: ImageTokenizer, pictures: int) -> None:
        """Encode up to _PART images from `start` into a file, which appears when it is whole."""
        sequences = [np.zeros((0, self.config.sequence_length), dtype=np.int64)]
        unreadable: list[str] = []
        error, compared, seen = 0.0, 0, start
        end = min(start + _PART, len(images))
        for pixels, places in self._pixels(images, start, end, tokenizer.channels, unreadable):
            codes = tokenizer.encode(pixels)
            classes = tokenizer.codes + images.labels[places]
            sequences.append(np.concatenate((classes[:, None], codes.reshape(len(codes), -1)), axis=1))
            if seen < pictures:
                drawn = tokenizer.decode(codes).astype(np.float64)
                error, compared = error + float(((drawn - pixels) ** 2).sum()), compared + pixels.size
            seen += len(pixels)
        tokens = np.concatenate(sequences).astype(np.uint32)
        temporary = file.with_name(f".tmp-{file.name}")
        with temporary.open("wb") as stream:
            np.savez(stream, tokens=tokens, unreadable=np.array(unreadable, dtype=str), error=error, compared=compared)
        temporary.replace(file)

    def _pixels(
        self, images: Images, start: int, end: int, channels: int, unreadable: list[str]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield batches of (pixels (B, size, size, C), their places); what cannot be read goes to `unreadable`."""

        def one(index: int) -> np.ndarray | str:
            try:
                return as_square(images.read(index), self.config.size, channels)
            except UserError as error:
                return str(error)

        # Decoding a file frees the interpreter, so that threads share the work.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for first in range(start, end, _BATCH):
                places = np.arange(first, min(first + _BATCH, end))
                found = list(threads.map(one, places.tolist()))
                unreadable += [each for each in found if isinstance(each, str)]
                good = [not isinstance(each, str) for each in found]
                if any(good):
                    yield np.stack([each for each in found if not isinstance(each, str)]), places[good]

    def _say(self, text: str) -> None:
        if self.progress and sys.stderr.isatty():
            print(text, file=sys.stderr)


def _channels(images: Images) -> int:
    """Return 1 where the first image that can be read is grey, else 3."""
    for index in range(len(images)):
        try:
            return 1 if eight_bits(images.read(index)).mode in ("1", "L") else 3
        except UserError:
            continue
    return 3
