"""Conditions of a result beside its settings: versions, the machine, its devices, memory, kernels and threads."""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import versions
from nonlinear_lowrank.ops.native import native
from nonlinear_lowrank.validation import one_line

from .bounds import RESERVE, free_memory
from .processes import world_size

_FORMS = 4096  # more compiled forms of one function than a process has time to make
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_NO_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")
# On the CPU torch has no class for it.
_NO_MEMORY = re.compile("can't allocate memory|not enough memory|Storage size calculation overflowed|Overflow when")


class OutOfTimeError(UserError):
    """A run was stopped because it would not end within its time limit."""


def machine(threads: int | None = None, *, on_cpu: bool | None = None) -> dict[str, Any]:
    """Return the kind of machine, never its name, its user or a path on it; `threads` are those that the runs set.

    `native`: whether float32 is computed in C++ on its CPU (`ops.native`), whose last bits differ from PyTorch's.
    Asking builds it, so it is asked only for what runs `on_cpu`; None: for all where there is no GPU.
    """
    on_cpu = not torch.accelerator.is_available() if on_cpu is None else on_cpu
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "processes": world_size(),
        "native": on_cpu and native(torch.empty(0)) is not None,
    }


def provenance(threads: int | None = None) -> dict[str, Any]:
    """Return what the folder of a run records of its origin: `versions`, `machine` and `git_state`."""
    return {"versions": versions(), "machine": machine(threads), "git": git_state()}


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Return the commit of a folder's (or the working directory's) checkout, and whether a tracked file differs, those
    inside submodules left out.

    None where there is no git, no repository or no commit. Runs none of the repository's own programs, filters either.
    """

    def ask(*command: str) -> str:
        quiet = ["git", *(word for setting in off for word in ("-c", setting)), *command]
        lockless = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(quiet, cwd=folder, env=lockless, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    # A checkout's settings, and those of a submodule, may name programs that watch or filter files: not ours to start.
    off = ["core.fsmonitor=false", "core.hooksPath="]
    try:
        commit = ask("rev-parse", "--verify", "HEAD")
        names = ask("config", "--name-only", "--list").split("\n")
        filters = [name for name in names if name.startswith("filter.")]
        if any("=" in name for name in filters):  # could not be switched off
            return None
        off += [f"{name}={'false' if name.endswith('.required') else ''}" for name in filters]
        return {"commit": commit, "dirty": bool(ask("status", "--porcelain", "-uno", "--ignore-submodules=dirty"))}
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use only kernels that repeat their bits inside it, if wanted.

    Sets torch.use_deterministic_algorithms, cuDNN's deterministic mode without its search for fast kernels, and
    cuBLAS's workspace of a fixed size (unless the environment has chosen one). UserError names an operation in it that
    has no such kernel.
    """
    if not wanted:
        yield
        return
    exact = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    flags, workspace = (cudnn.deterministic, cudnn.benchmark), os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, ":4096:8")
    cudnn.deterministic, cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if (found := _NO_KERNEL.search(str(error))) is None:
            raise
        raise UserError(
            f"{found[1]} has no deterministic kernel on this device; omit --deterministic, or use another arm"
        ) from error
    finally:
        torch.use_deterministic_algorithms(exact[0], warn_only=exact[1])
        cudnn.deterministic, cudnn.benchmark = flags
        if workspace is None:
            os.environ.pop(_CUBLAS, None)


def determinism() -> dict[str, Any]:
    """Return the process's settings that decide whether kernels repeat their bits, for the record."""
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get(_CUBLAS),
    }


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Use so many of torch's CPU threads inside it; None leaves them."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def many_compiled(wanted: bool = True, *, lengths_vary: bool = False) -> Iterator[None]:
    """Compile every model that torch.compile meets inside it, for its own shapes, however many there are.

    torch keeps 8 compiled forms of a function, and runs further ones uncompiled. Arms of a comparison are models of one
    class, so of one function: arms from the eighth form on would be timed and trained uncompiled beside compiled ones.
    Nor are shapes made general once they have been seen to differ: what is compiled does not depend on what ran before,
    nor on where a run was resumed. Where `lengths_vary` one form serves batches of all lengths.

    Raises:
        UserError: a model that must be one graph is not.
    """
    if not wanted:
        yield
        return
    with torch._dynamo.config.patch(
        recompile_limit=_FORMS,
        accumulated_recompile_limit=_FORMS,
        automatic_dynamic_shapes=False,
        assume_static_by_default=not lengths_vary,
    ):
        try:
            yield
        except torch._dynamo.exc.Unsupported as error:  # without fullgraph the graph would be broken there
            what = str(error).partition("Developer debug context")[0]
            hint = "omit --train.compile-fullgraph, or change that code"
            raise UserError(f"the model does not compile to one graph: {one_line(ValueError(what))}; {hint}") from error


def _processor() -> str:
    # platform.processor() is empty or only the architecture on Linux.
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


# --- devices and memory ------------------------------------------------------------------------------------------


def choose_device(name: str, *, dtype: torch.dtype | None = None) -> torch.device:
    """Return the device of that name, as torch has it; where it is empty, the GPU if there is one.

    UserError where there is no such device here, or it holds no numbers of that dtype (None: torch's default).
    """
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros((), dtype=dtype, device=device).item()  # "meta" gives nothing back
    except Exception as error:  # each backend has errors of its own
        words = str(error).partition("\n")[0].partition(". ")[0]
        raise UserError(f"device {name} cannot be used here ({words}); use cpu, cuda or cuda:0") from error
    return device


def seeded_generator(seed: int, what: int | str) -> torch.Generator:
    """Return a generator of a seed's own draws for `what`, a step or a name.

    torch's CPU generator takes 32 bits of a seed: the two are hashed into those.
    """
    digest = hashlib.sha256(f"{seed} {what}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def check_bytes(needed: int, what: str, hint: str) -> None:
    """Raise UserError unless so many bytes fit the memory that is free."""
    free = free_memory()
    if needed + RESERVE > free:
        raise UserError(f"{what} takes {(needed + RESERVE) / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; {hint}")


@contextlib.contextmanager
def told_of_memory(what: str) -> Iterator[None]:
    """Turn a lack of memory inside it into a UserError that names what did not fit."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY.search(str(error))):
            raise
        raise UserError(f"{what} does not fit memory; choose a smaller width, or fewer points or rays") from error
