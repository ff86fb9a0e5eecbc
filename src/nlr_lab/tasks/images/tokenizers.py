"""Images <-> grids of codes, of two kinds with one interface: "patches", the nearest of K mean patches by
scikit-learn's MiniBatchKMeans on the training images, or a VQModel of diffusers (amused-512: 8192 codes, 32 x 32 of 512
x 512 pixels).

Images are (N, H, W, C) uint8, C = 1 or 3; codes are (N, rows, columns) int64. A saved tokenizer is image_tokenizer.json
and its weights as safetensors beside it; a VQModel is saved whole, so that a model's folder draws pictures anywhere.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import hash_file
from nonlinear_lowrank.validation import one_line, require

CONFIG = "image_tokenizer.json"
_MEANS = "image_tokenizer.safetensors"
_VQ_FOLDER = "image_tokenizer"
_VQ_FILES = ("config.json", "diffusion_pytorch_model.safetensors")
_FIT_PATCHES = 100_000  # patches that the means are fitted on; more change the error by hundredths of a dB
_CHUNK = 16_384  # patches whose distances are held at once
_VQ_BATCH = 16  # images that a VQModel takes at once


class PatchTokenizer:
    """A patch becomes the nearest of the mean patches, (K, patch x patch x C) float32 of 0 to 255, by squared error."""

    kind = "patches"

    def __init__(self, means: np.ndarray, patch: int, channels: int) -> None:
        self.means, self.patch, self.channels, self.codes = means, patch, channels, len(means)

    @classmethod
    def fit(cls, images: np.ndarray, *, codes: int, patch: int, seed: int = 0) -> "PatchTokenizer":
        """Fit means of the patches of some images; the same images and seed give the same means. Raise UserError where
        the images have fewer different patches than codes."""
        from sklearn.cluster import MiniBatchKMeans
        from threadpoolctl import threadpool_limits

        patches = _to_patches(images, patch).reshape(-1, patch * patch * images.shape[-1])
        if len(patches) > _FIT_PATCHES:
            chosen = np.random.default_rng(seed).choice(len(patches), _FIT_PATCHES, replace=False)
            patches = patches[np.sort(chosen)]
        different = len(np.unique(patches, axis=0))
        if different < codes:
            raise UserError(
                f"the images have {different} different patches, fewer than the {codes} codes; choose --codes of at "
                f"most {different}"
            )
        settings: Any = {"batch_size": 4096, "max_iter": 20, "n_init": 1, "max_no_improvement": None}
        means = MiniBatchKMeans(codes, **settings, random_state=seed)
        with threadpool_limits(1):  # sums over threads would depend on their number
            means.fit(patches.astype(np.float32))
        return cls(np.ascontiguousarray(means.cluster_centers_, dtype=np.float32), patch, images.shape[-1])

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Return codes: (N, H, W, C) uint8 -> (N, H / patch, W / patch) int64."""
        patches = _to_patches(images, self.patch)
        grid, flat = patches.shape[:3], patches.reshape(-1, self.means.shape[1])
        norms = (self.means**2).sum(1)
        nearest = np.empty(len(flat), dtype=np.int64)
        for start in range(0, len(flat), _CHUNK):
            part = flat[start : start + _CHUNK].astype(np.float32)
            # The patch's own norm is the same for every mean.
            nearest[start : start + _CHUNK] = (norms - 2 * (part @ self.means.T)).argmin(1)
        return nearest.reshape(grid)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return pixels: (N, rows, columns) -> (N, rows x patch, columns x patch, C) uint8."""
        pixels = np.rint(self.means).clip(0, 255).astype(np.uint8)[codes]
        count, rows, columns, _ = pixels.shape
        pixels = pixels.reshape(count, rows, columns, self.patch, self.patch, self.channels).transpose(0, 1, 3, 2, 4, 5)
        return pixels.reshape(count, rows * self.patch, columns * self.patch, self.channels)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the weights and return what CONFIG says of it beside its kind."""
        save_file({"means": self.means}, folder / _MEANS)
        return {"patch": self.patch, "channels": self.channels}

    @classmethod
    def load(cls, folder: Path, facts: dict[str, Any]) -> "PatchTokenizer":
        """Reverse `save`."""
        means, patch, channels = load_file(folder / _MEANS)["means"], int(facts["patch"]), int(facts["channels"])
        return cls(means.reshape(-1, patch * patch * channels), patch, channels)


def _to_patches(images: np.ndarray, patch: int) -> np.ndarray:
    """(N, H, W, C) -> (N, rows, columns, patch x patch x C)."""
    count, height, width, channels = images.shape
    rows, columns = height // patch, width // patch
    split = images.reshape(count, rows, patch, columns, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    return split.reshape(count, rows, columns, -1)


class VQTokenizer:
    """A VQGAN in diffusers' form. Its weights are read when something is encoded or decoded.

    Pixels go in and come out as 0 to 1, as amused's own pipelines have it. Raise UserError where a folder has none.
    """

    kind = "vq"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            config = json.loads((folder / _VQ_FILES[0]).read_text(encoding="utf-8"))
            self.codes, self.channels = int(config["num_vq_embeddings"]), int(config["in_channels"])
            # Every block but the last halves the sides.
            self.patch = 2 ** (len(config["block_out_channels"]) - 1)
            if self.channels not in (1, 3):
                raise ValueError(f"{self.channels} channels are not an image")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} holds no VQModel of diffusers: {one_line(error)}") from error
        if not (folder / _VQ_FILES[1]).is_file():
            raise UserError(f"{folder} has no {_VQ_FILES[1]}; pickled weights are never read")

    @cached_property
    def model(self) -> Any:
        """The VQModel, in float32 on the GPU where there is one."""
        kind = require("images", "diffusers").VQModel
        settings = {"use_safetensors": True, "low_cpu_mem_usage": False, "torch_dtype": torch.float32}
        try:
            model = kind.from_pretrained(str(self.folder), **settings)
        except (OSError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
            raise UserError(f"{self.folder} cannot be loaded as a VQModel: {one_line(error)}") from error
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return model.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def encode(self, images: np.ndarray) -> np.ndarray:
        """Return codes as `PatchTokenizer.encode` does."""
        found = []
        for part in torch.from_numpy(images).split(_VQ_BATCH):
            pixels = part.to(self.model.device).permute(0, 3, 1, 2).float() / 255
            latents = self.model.encode(pixels).latents
            codes = self.model.quantize(latents)[2][2]
            found.append(codes.reshape(len(part), *latents.shape[2:]).cpu())
        return torch.cat(found).numpy().astype(np.int64)

    @torch.no_grad()
    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return pixels as `PatchTokenizer.decode` does."""
        found = []
        for part in torch.from_numpy(codes).split(_VQ_BATCH):
            shape = (*part.shape, self.model.quantize.vq_embed_dim)
            latents = self.model.quantize.get_codebook_entry(part.reshape(-1).to(self.model.device), shape)
            # Given the codebook's own vectors, decode() finds the same codes again; this skips the search.
            norms = latents if self.model.config.norm_type == "spatial" else None
            pixels = self.model.decoder(self.model.post_quant_conv(latents), norms)
            found.append((pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu())
        return torch.cat(found).numpy()

    def identity(self) -> str:
        """Return a hash of its files."""
        hashes = [bytes.fromhex(hash_file(self.folder / name)) for name in _VQ_FILES]
        return hashlib.sha256(b"".join(hashes)).hexdigest()

    def save(self, folder: Path) -> dict[str, Any]:
        """Copy the files."""
        (folder / _VQ_FOLDER).mkdir(exist_ok=True)
        for name in _VQ_FILES:
            shutil.copyfile(self.folder / name, folder / _VQ_FOLDER / name)
        return {}

    @classmethod
    def load(cls, folder: Path, facts: dict[str, Any]) -> "VQTokenizer":
        """Reverse `save`."""
        return cls(folder / _VQ_FOLDER)


def find_vq(name: str) -> VQTokenizer:
    """Find a VQModel by folder or hub name, where it may lie in the folder `vqvae`, as amused's does; raise UserError
    where there is none."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise UserError(f"no such image tokenizer: {name!r}; give patches, a folder with a VQModel, or a hub name")
        from huggingface_hub import snapshot_download

        wanted = [place + file for place in ("", "vqvae/") for file in _VQ_FILES]
        try:
            folder = Path(snapshot_download(name, allow_patterns=wanted))
        except Exception as error:  # the hub, the network and the cache each have errors of their own
            why = f"cannot get the image tokenizer {name!r} ({one_line(error, 200)})"
            raise UserError(f"{why}; give a folder that holds the VQModel (--tokenizer)") from error
    return VQTokenizer(folder / "vqvae" if (folder / "vqvae").is_dir() else folder)


ImageTokenizer = PatchTokenizer | VQTokenizer


@dataclass(frozen=True)
class ImageCodec:
    """A tokenizer, the grid that a model was trained on, and the names of its classes; saved beside the model."""

    tokenizer: ImageTokenizer
    rows: int
    columns: int
    classes: tuple[str, ...]

    def save_pretrained(self, folder: Any) -> None:
        """Write CONFIG and the weights; the folder is made if it is not there."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        facts = {"kind": self.tokenizer.kind, "codes": self.tokenizer.codes, **self.tokenizer.save(place)}
        facts |= {"rows": self.rows, "columns": self.columns, "classes": list(self.classes)}
        (place / CONFIG).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "ImageCodec":
        """Reverse `save_pretrained`; raise UserError where a file is missing, damaged, or does not fit the others."""
        try:
            facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            kinds: dict[str, type[ImageTokenizer]] = {"patches": PatchTokenizer, "vq": VQTokenizer}
            tokenizer = kinds[facts["kind"]].load(folder, facts)
            if int(facts["codes"]) != tokenizer.codes:
                raise ValueError(f"{tokenizer.codes} codes, and {CONFIG} says {facts['codes']}")
            return cls(tokenizer, int(facts["rows"]), int(facts["columns"]), tuple(map(str, facts["classes"])))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            reason = one_line(error)
            raise UserError(f"the image tokenizer in {folder} cannot be read ({reason}); copy it again") from error

    def find_class(self, name: str) -> int:
        """Return the number of a class, given by name or by number; raise UserError where there is none."""
        if name in self.classes:
            return self.classes.index(name)
        if name.isdecimal() and int(name) < len(self.classes):
            return int(name)
        some = ", ".join(self.classes[:12]) + (", ..." if len(self.classes) > 12 else "")
        raise UserError(f"there is no class {name!r}; the model has {len(self.classes)}: {some}")
