"""Operators in C++ for float32 on a CPU, `native.cpp`: built on first use and cached; PyTorch's run where that fails.

The build needs a C++ compiler (`CXX`, else `c++`) and takes twenty seconds, once for a version of torch, a compiler
and a kind of processor; the result lies in `$NLR_CACHE`, else `~/.cache/nonlinear-lowrank`. Without a compiler, with
`NLR_NATIVE=0` in the environment, and inside `use_kernels(False)`, operators are PyTorch's; a build is logged, and one
that fails is named in a warning. A NOBLE layer's backward follows its forward.
"""

import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import warnings
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_tracing as _tracing
from torch._C import _len_torch_dispatch_stack as _modes

from nonlinear_lowrank.hub.storage import sync

from .kernels import enabled

LOG = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("native.cpp")
_VECTORS = {
    "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"],
    "AVX2": ["-mavx2", "-mfma"],
}
_TYPES, _FLOAT = (Tensor, torch.nn.Parameter), torch.float32


def native(*tensors: Tensor | None) -> Any:
    """Return the operators, `torch.ops.nonlinear_lowrank_native`, or None where these tensors are not theirs to read.

    Those are plain float32 tensors (None: any) on a CPU, that neither a dispatch mode nor `torch.jit.trace` watches.
    """
    for each in tensors:
        if each is not None and not (each.is_cpu and each.dtype is _FLOAT and type(each) in _TYPES):
            return None
    return None if _modes() or _tracing() or not enabled() else _load()


@functools.cache
def _load() -> Any:
    """Return the operators, built if need be; None where they cannot be."""
    vectors = _VECTORS.get(torch.backends.cpu.get_cpu_capability())
    if vectors is None and platform.machine() not in ("aarch64", "arm64"):  # without fused products it would be slow
        return None
    if os.environ.get("NLR_NATIVE") == "0":
        return None
    try:
        torch.ops.load_library(_built(vectors or []))
    except (OSError, subprocess.SubprocessError) as error:
        if isinstance(error, FileNotFoundError) and error.filename == _compiler():
            return None
        output = (getattr(error, "stderr", None) or "").splitlines()
        why = shorten(next((line for line in output if "error" in line), str(error)), 160)
        warnings.warn(
            f"operators in C++ were not built, so PyTorch's run (NLR_NATIVE=0 chooses those): {why}", stacklevel=2
        )
        return None
    return torch.ops.nonlinear_lowrank_native


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _built(vectors: list[str]) -> Path:
    """Return the library's path."""
    torch_path = Path(torch.__file__).parent
    includes = [f"-I{torch_path / 'include'}", f"-I{torch_path / 'include/torch/csrc/api/include'}"]
    # Functions that set errno, and traps, keep loops from becoming vectors.
    how = ["-O3", "-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    links = [f"-L{torch_path / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = [_compiler(), *how, *vectors, *includes]
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    parts = [*map(Path.read_bytes, sources), repr((torch.__version__, platform.machine(), command)).encode()]
    mark = hashlib.sha256(b"".join(parts))
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "nonlinear-lowrank")
    folder = Path(os.environ.get("NLR_CACHE") or user).expanduser()
    name = f"native-{mark.hexdigest()[:16]}"
    for path in folder.glob(f"{name}-*.so"):
        if path.name == _sized(name, path):  # loading a truncated one would kill the process
            return path
    folder.mkdir(parents=True, exist_ok=True)
    LOG.info("building the operators in C++, once: some twenty seconds, minutes on a busy machine")
    with tempfile.TemporaryDirectory(dir=folder) as own:  # of this process: others may build at the same time
        made = Path(own) / f"{name}.so"
        subprocess.run([*command, str(SOURCE), "-o", str(made), *links], check=True, capture_output=True, text=True)
        sync(made)
        path = made.replace(folder / _sized(name, made))
    sync(folder)
    return path


def _sized(name: str, library: Path) -> str:
    """Return the name of a library in the cache, which tells its size."""
    return f"{name}-{library.stat().st_size}.so"
