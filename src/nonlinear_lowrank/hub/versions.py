"""Versions of the packages that a saved model or a result depends on."""

import platform
from importlib import metadata

_PACKAGES = (
    *("nonlinear-lowrank", "torch", "triton", "transformers", "accelerate", "peft", "trl", "tokenizers", "datasets"),
    *("safetensors", "numpy", "scipy", "scikit-learn", "scikit-image", "pillow"),
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages that a loss may depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
