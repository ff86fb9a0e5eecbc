"""`digits-vit`: a tiny pretrained ViT for demos and tests, trained here on first use and kept in the cache.

A vision transformer of 4 layers and width 64 on scikit-learn's 8 x 8 digits, classes 0 to 4, with patches of
2 x 2; about 200,000 parameters, some seconds on one CPU core. Tasks adapt it to the digits 5 to 9, which it
has never seen.
"""

import os
from pathlib import Path
from typing import Any

from nlr_lab.tasks.task import cache_folder, cached

from .files import read_digits

NAME = "digits-vit"
CLASSES = (0, 1, 2, 3, 4)
_VERSION = 1  # of the recipe below; part of the folder's name
_STEPS, _BATCH, _RATE = 200, 64, 2e-3


def config() -> Any:
    """Return the architecture."""
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


def folder() -> Path:
    """Return the checkpoint's folder, trained first if it is not there.

    Raises:
        UserError: the cache cannot be written.
    """
    path = cache_folder() / "checkpoints" / f"{NAME}-{_VERSION}"
    return cached(path, lambda place: place if (place / "config.json").is_file() else None, _save)


def _save(place: Path) -> None:
    from nonlinear_lowrank.hub.loading import quiet_loading
    from nonlinear_lowrank.hub.storage import staged_folder

    model = _train()
    with staged_folder(place) as staged, quiet_loading():
        model.save_pretrained(staged)


def _train() -> Any:
    """Train from a fixed seed: AdamW with a linear decay."""
    import numpy as np
    import torch
    from transformers import ViTForImageClassification

    from nlr_lab.runtime.environment import cpu_threads

    images, labels = read_digits()
    known = np.isin(labels, CLASSES)
    pixels = (torch.from_numpy(images[known]).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    targets = torch.from_numpy(labels[known])
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
