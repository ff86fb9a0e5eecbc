"""`digits-vit`: a tiny pretrained ViT for demos and tests, trained here on first use and kept in the cache.

A vision transformer of 4 layers and width 64 on scikit-learn's 8 x 8 digits, classes 0 to 4, with patches of
2 x 2; about 200,000 parameters, some seconds on one CPU core. Tasks adapt it to the digits 5 to 9, which it
has never seen.
"""

import os
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from nlr_lab.runtime.environment import cpu_threads
from nlr_lab.tasks.text.data import cache_folder
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.pooled import quiet_loading
from nonlinear_lowrank.hub.storage import staged_folder

NAME = "digits-vit"
CLASSES = (0, 1, 2, 3, 4)
_VERSION = 1  # of the recipe below; part of the folder's name
_STEPS, _BATCH, _RATE = 200, 64, 2e-3


def config() -> Any:
    """The architecture."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "vit",
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=len(CLASSES),
    )


def folder(cache: str | None = None) -> Path:
    """The checkpoint's folder, trained first if it is not there.

    Args:
        cache: the folder of all caches; None: $NLR_CACHE, else the user's.

    Raises:
        UserError: the cache cannot be written.
    """
    path = cache_folder(cache) / "checkpoints" / f"{NAME}-{_VERSION}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not (path / "config.json").is_file():
                model = _train()
                with staged_folder(path) as staged, quiet_loading():
                    model.save_pretrained(staged)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror or error}); set NLR_CACHE to a folder of yours"
        ) from error
    return path


def digits(classes: tuple[int, ...] | None = None) -> tuple[Any, Any]:
    """scikit-learn's digits: images (N, 8, 8, 1) uint8 of 0 to 255, labels (N,) int64.

    Args:
        classes: only these digits; None: all.
    """
    import numpy as np
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    kept = np.isin(labels, classes) if classes is not None else np.ones(len(labels), dtype=bool)
    return images[kept], labels[kept]


def _train() -> Any:
    """Plain supervised training, AdamW with a linear decay, from a fixed seed."""
    from transformers import ViTForImageClassification

    images, labels = digits(CLASSES)
    pixels = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    targets = torch.from_numpy(labels)
    threads = os.environ.get("OMP_NUM_THREADS")
    with cpu_threads(None if threads is None else int(threads)), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViTForImageClassification(config()).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
        for step in range(_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = _RATE * min((step + 1) / 20, 1 - step / _STEPS)
            chosen = torch.randint(len(targets), (_BATCH,))
            loss = model(pixel_values=pixels[chosen], labels=targets[chosen]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model.eval()
