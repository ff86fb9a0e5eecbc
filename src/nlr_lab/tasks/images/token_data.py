"""Images encoded once: a source and a tokenizer -> files of token sequences, cached by their content.

A cache folder, <cache>/image-tokens/<key>, holds

    train.npy, valid.npy    sequences of 1 + rows x columns tokens one after the other, the class token first;
                            one axis, uint16 or uint32
    tokenizer/              the image tokenizer (see `tasks.image_tokenizers`)
    images.json             what they were made of, and how well pictures survive it

The key is a hash of the images' content, of the tokenizer and of what is chosen. Encoding is done in parts, which
stay in <key>.parts: a run that is killed goes on behind the last one. An image that cannot be read is left out,
named and counted.
"""

import hashlib
import json
import math
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from nlr_lab.runtime.pictures import eight_bits
from nlr_lab.tasks.task import fingerprint
from nlr_lab.tasks.text.data import TokenBlocks, cache_folder
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import staged_folder
from nonlinear_lowrank.validation import check_integer

from . import digits_vit
from .files import Images, ImageSplits, read_images
from .tokenizers import ImageCodec, ImageTokenizer, PatchTokenizer, VQTokenizer, check_side, find_vq

_VERSION = 2  # of what a source gives and of the cache's layout; part of the key
_PART = 4096  # images that are encoded before they are written
_BATCH = 256  # images that are held in pixels
_FIT_IMAGES = 20_000  # that the means of patches are fitted on
_PICTURES = 2048  # held-out images whose decoded pictures are compared with them
_NAMED = 5  # unreadable images that are named


@dataclass(frozen=True, kw_only=True)
class ImageTokenData:
    """Which images, and how they become tokens."""

    source: str = "digits"
    """"digits" (scikit-learn's), a .npz file (also .npz.xz), a folder of classes, or a dataset's name."""
    size: int = 8
    """Pixels of a side: the shorter one is scaled to it, of the longer one the middle is kept."""
    tokenizer: str = "patches"
    """"patches" (the nearest of mean patches, fitted on the training images), or a VQModel of diffusers: a folder or
    a hub name such as amused/amused-512."""
    patch: int = 4
    """Pixels of a token's side; a VQModel has its own, which this must be."""
    codes: int = 512
    """Different tokens; a VQModel has its own number, which this must be."""
    classes: int | None = None
    """Classes that the source must have; None: as many as it has."""
    train_images: int | None = None
    """Use so many of the training images, a random choice that is always the same; None: all."""
    eval_images: int = 1024
    """Held-out images that are evaluated, chosen likewise; fewer where there are fewer."""
    cache_dir: str | None = None
    """Where tokens are cached; None: $NLR_CACHE, else the user's cache folder."""

    def __post_init__(self) -> None:
        for name, least in (
            *(("size", 1), ("patch", 1), ("codes", 2), ("eval_images", 1)),
            *(("classes", 1), ("train_images", 1)),
        ):
            value = getattr(self, name)
            if value is None and name in ("classes", "train_images"):
                continue
            check_integer(name, value, minimum=least)
        check_side(self.size, self.patch)

    @property
    def side(self) -> int:
        """Tokens in a row, and rows."""
        return self.size // self.patch

    @property
    def sequence_length(self) -> int:
        """Tokens of an image, the class token included."""
        return 1 + self.side**2


@dataclass(frozen=True)
class EncodedImages:
    """Images that are ready for training, as tokens."""

    train: TokenBlocks
    valid: TokenBlocks
    tokenizer: ImageCodec
    """What is saved beside the model, so that it can draw."""
    vocab_size: int
    """Codes, which is what a model predicts; class c is token vocab_size + c."""
    fingerprint: str
    facts: dict[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by number."""
        return self.tokenizer.classes

    def describe(self) -> dict[str, Any]:
        """What the data are, for the record."""
        return {
            **self.facts,
            "train_sequences": len(self.train),
            "evaluated_sequences": len(self.valid),
            "fingerprint": self.fingerprint,
        }


def prepare_images(config: ImageTokenData, *, progress: bool = True) -> EncodedImages:
    """Encodes images, or finds them in the cache. Safe to call from several processes at once.

    Args:
        config: which images and how.
        progress: say on stderr how far it is.

    Raises:
        UserError: the source or the tokenizer cannot be used; the message says why and what to change.
    """
    splits = read_images(config.source)
    _check(config, splits)
    vq = None if config.tokenizer == "patches" else _vq(config)
    key = _key(config, splits, vq)
    folder = cache_folder(config.cache_dir) / "image-tokens" / key[:32]
    found = _read(folder)
    if found is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                found = _read(folder)
                if found is None:
                    facts = _Encoding(config, splits, vq, folder, progress).build()
                    found = facts, ImageCodec.load(folder / "tokenizer")
        except OSError as error:
            raise UserError(
                f"cannot write the cache {folder.parent} ({error.strerror or error}); set cache_dir or NLR_CACHE"
            ) from error
    length = config.sequence_length
    facts, codec = found
    made_of = json.dumps([facts["train"]["sha256"], facts["valid"]["sha256"], facts["codes"], list(codec.classes)])
    return EncodedImages(
        train=TokenBlocks(folder / "train.npy", length),
        valid=TokenBlocks(folder / "valid.npy", length),
        tokenizer=codec,
        vocab_size=codec.tokenizer.codes,
        fingerprint=hashlib.sha256(made_of.encode()).hexdigest()[:32],
        facts=facts,
    )


def as_square(image: Any, size: int, channels: int) -> np.ndarray:
    """A PIL image or an array (H, W[, C]) -> (size, size, channels) uint8; scaled, and its middle kept.

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
    count = len(splits.classes)
    if config.classes not in (None, count):
        raise UserError(f"{config.source} has {count} classes, not {config.classes}; set --classes {count}")
    if config.train_images is not None and config.train_images < count <= len(splits.train):
        raise UserError(
            f"train_images {config.train_images} is fewer than the {count} classes of {config.source}; set {count} "
            "or more"
        )
    if len(splits.train) < count:
        raise UserError(f"{config.source} has {len(splits.train)} training images, fewer than its {count} classes")
    if len(splits.test) < 1:
        raise UserError(f"{config.source} has no image to evaluate on")


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
    parts = [_VERSION, _identity(config.source), how, chosen]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _identity(source: str) -> str:
    """A hash of a source's content; a dataset is known by the fingerprints of its splits."""
    path = Path(source).expanduser()
    digest = hashlib.sha256()
    if source == "digits":
        return fingerprint(*digits_vit.digits())
    if path.exists():
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            try:
                with file.open("rb") as stream:
                    content = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror}") from error
            digest.update(f"{file.relative_to(path)}\n{content}\n".encode())
        return digest.hexdigest()
    from datasets import load_dataset

    data: Any = load_dataset(source)  # `read_images` has just done so
    return json.dumps([source, {name: getattr(side, "_fingerprint", None) for name, side in data.items()}])


def _read(folder: Path) -> tuple[dict[str, Any], ImageCodec] | None:
    """What the cache says of itself, and its tokenizer; None where it is absent or not whole."""
    try:
        facts = json.loads((folder / "images.json").read_text(encoding="utf-8"))
        # A file that is shorter than its header says cannot be mapped.
        whole = all(
            len(np.load(folder / f"{name}.npy", mmap_mode="r")) == facts[name]["tokens"] for name in ("train", "valid")
        )
        codec = ImageCodec.load(folder / "tokenizer")
        if isinstance(codec.tokenizer, VQTokenizer):
            codec.tokenizer.check_weights()
        same = codec.tokenizer.codes == facts["codes"]
    except (OSError, ValueError, KeyError, TypeError, EOFError):  # among them UserError
        return None
    return (facts, codec) if whole and same else None


class _Encoding:
    """Fills a folder of the cache; see the file's documentation."""

    def __init__(
        self, config: ImageTokenData, splits: ImageSplits, vq: VQTokenizer | None, folder: Path, progress: bool
    ) -> None:
        self.config, self.splits, self.vq, self.folder, self.progress = config, splits, vq, folder, progress
        self.train = _some(splits.train, config.train_images, 1)
        self.valid = _some(splits.test, config.eval_images, 2)
        self.parts = folder.with_name(f"{folder.name}.parts")

    def build(self) -> dict[str, Any]:
        """Encodes what is not encoded yet, and puts the folder in its place."""
        self.parts.mkdir(exist_ok=True)
        tokenizer = self._tokenizer()
        codec = ImageCodec(tokenizer, self.config.side, self.config.side, self.splits.classes)
        with staged_folder(self.folder) as staged:
            codec.save_pretrained(staged / "tokenizer")
            facts: dict[str, Any] = {
                "source": self.config.source,
                "classes": len(codec.classes),
                "size": self.config.size,
                "channels": tokenizer.channels,
                "tokenizer": self.config.tokenizer,
                "codes": tokenizer.codes,
                "grid": [codec.rows, codec.columns],
            }
            for name, images in (("train", self.train), ("valid", self.valid)):
                facts[name] = self._side(name, images, tokenizer, staged)
            facts["psnr_db"] = facts["valid"].pop("psnr_db")
            (staged / "images.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        shutil.rmtree(self.parts)
        return facts

    def _tokenizer(self) -> ImageTokenizer:
        """The VQModel, or means of patches, which are kept beside the parts that are encoded with them."""
        if self.vq is not None:
            return self.vq
        place = self.parts / "tokenizer"
        if place.is_dir():
            try:
                return ImageCodec.load(place).tokenizer
            except UserError:  # damaged: what it encoded goes with it
                shutil.rmtree(self.parts)
                self.parts.mkdir()
        self._say("fitting the mean patches")
        some = _some(self.train, _FIT_IMAGES, 3)
        pixels = [each for batch, _ in self._pixels(some, 0, len(some), self._channels(some)) for each in batch]
        if not pixels:
            raise UserError(f"no image of {self.config.source} can be read")
        fitted = PatchTokenizer.fit(np.stack(pixels), codes=self.config.codes, patch=self.config.patch)
        with staged_folder(place) as staged:
            ImageCodec(fitted, self.config.side, self.config.side, self.splits.classes).save_pretrained(staged)
        return ImageCodec.load(place).tokenizer

    @staticmethod
    def _channels(images: Images) -> int:
        """1 where the first image that can be read is grey."""
        for index in range(len(images)):
            try:
                image = eight_bits(images.read(index))
            except (OSError, ValueError, SyntaxError):  # among them UserError
                continue
            return 1 if image.mode in ("1", "L") else 3
        return 3

    def _side(self, name: str, images: Images, tokenizer: ImageTokenizer, staged: Path) -> dict[str, Any]:
        """Encodes one side into <name>.npy; returns what there is to say of it."""
        unreadable: list[str] = []
        error, compared, used = 0.0, 0, np.zeros(tokenizer.codes, dtype=bool)
        files = []
        for start in range(0, len(images), _PART):
            file = self.parts / f"{name}-{start:09d}.npz"
            if not zipfile.is_zipfile(file):  # absent, or cut short
                self._say(f"encoding {name}: {start:,} of {len(images):,} images")
                self._part(file, images, start, tokenizer, pictures=_PICTURES if name == "valid" else 0)
            with np.load(file, allow_pickle=False) as part:
                files.append((file, len(part["tokens"])))
                unreadable += part["unreadable"].tolist()
                error, compared = error + float(part["error"]), compared + int(part["compared"])
                used[np.unique(part["tokens"][:, 1:])] = True
        count, length = sum(rows for _, rows in files), self.config.sequence_length
        _report(unreadable, count, self.config.source, name)
        kind = np.uint16 if tokenizer.codes + len(self.splits.classes) <= 2**16 else np.uint32
        array = np.lib.format.open_memmap(staged / f"{name}.npy", mode="w+", dtype=kind, shape=(count * length,))
        at, digest = 0, hashlib.sha256()
        for file, rows in files:
            with np.load(file, allow_pickle=False) as part:
                tokens = part["tokens"].astype(kind).reshape(-1)
            array[at : at + rows * length] = tokens
            digest.update(tokens.tobytes())
            at += rows * length
        array.flush()
        facts = {
            "images": count,
            "tokens": count * length,
            "unreadable": len(unreadable),
            "codes_used": int(used.sum()),
            "sha256": digest.hexdigest(),
        }
        if compared:
            facts["psnr_db"] = round(10 * math.log10(255**2 / max(error / compared, 1e-9)), 3)
        return facts

    def _part(self, file: Path, images: Images, start: int, tokenizer: ImageTokenizer, pictures: int) -> None:
        """Encodes up to _PART images from `start` into a file, which appears when it is whole."""
        end = min(start + _PART, len(images))
        sequences: list[np.ndarray] = []
        unreadable: list[str] = []
        error, compared, seen = 0.0, 0, start
        for pixels, places in self._pixels(images, start, end, tokenizer.channels, unreadable):
            codes = tokenizer.encode(pixels)
            classes = tokenizer.codes + images.labels[places]
            sequences.append(np.concatenate((classes[:, None], codes.reshape(len(codes), -1)), axis=1))
            if seen < pictures:
                drawn = tokenizer.decode(codes).astype(np.float64)
                error, compared = error + float(((drawn - pixels) ** 2).sum()), compared + pixels.size
            seen += len(pixels)
        empty = np.zeros((0, self.config.sequence_length), dtype=np.int64)
        tokens = np.concatenate([empty, *sequences]).astype(np.uint32)
        temporary = file.with_name(f".tmp-{file.name}")
        with temporary.open("wb") as stream:
            np.savez(stream, tokens=tokens, unreadable=np.array(unreadable, dtype=str), error=error, compared=compared)
        temporary.replace(file)

    def _pixels(
        self, images: Images, start: int, end: int, channels: int, unreadable: list[str] | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches of (pixels (B, size, size, C), their places in `images`), without those that cannot be read."""

        def one(index: int) -> np.ndarray | str:
            try:
                return as_square(images.read(index), self.config.size, channels)
            except UserError as error:
                return str(error)
            except (OSError, ValueError, SyntaxError) as error:  # Pillow's own, out of a dataset
                return f"image {index}: {' '.join(str(error).split())}"

        # Decoding a file frees the interpreter, so that threads share the work.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for first in range(start, end, _BATCH):
                places = range(first, min(first + _BATCH, end))
                found = list(zip(places, threads.map(one, places), strict=True))
                if unreadable is not None:
                    unreadable += [each for _, each in found if isinstance(each, str)]
                good = [(place, each) for place, each in found if not isinstance(each, str)]
                if good:
                    yield np.stack([each for _, each in good]), np.array([place for place, _ in good])

    def _say(self, text: str) -> None:
        if self.progress:
            from rich.console import Console

            console = Console(stderr=True)
            if console.is_terminal:
                console.print(text, highlight=False)


def _report(unreadable: list[str], readable: int, source: str, name: str) -> None:
    """Warns of images that were left out.

    Raises:
        UserError: none is left.
    """
    if not readable:
        raise UserError(f"no image of {source} ({name}) can be read: {unreadable[0]}")
    if unreadable:
        more = f", and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
        warnings.warn(
            f"{len(unreadable)} of {readable + len(unreadable)} {name} images of {source} cannot be read and are left "
            f"out: {'; '.join(unreadable[:_NAMED])}{more}",
            stacklevel=2,
        )


def _some(images: Images, most: int | None, seed: int) -> Images:
    """A random choice of at most so many images, always the same, in their order."""
    if most is None or most >= len(images):
        return images
    return images.select(np.sort(np.random.default_rng(seed).permutation(len(images))[:most]))
