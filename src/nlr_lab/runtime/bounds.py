"""Files that a user gives, read within bounds, and pictures of any depth as 8 bits a channel.

What their headers claim is checked against their sizes and the free memory before anything is allocated.
No pickle is ever read.
"""

import io
import lzma
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

RESERVE = 100_000_000
"""Bytes of memory that are left free."""
_PIECE = 16 << 20  # bytes read at a time
# For each version of control groups: limit, use, and the prefix of the whole group's parts of it.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", ""),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "total_"),
)


def check_room(nbytes: int, what: str) -> None:
    """Raise UserError where something would take more memory than is free."""
    free = free_memory()
    if nbytes > free:
        raise UserError(f"{what} takes {nbytes:,} bytes of memory, and {free:,} are free; give a smaller one")


def read_array(path: Path) -> np.ndarray:
    """Return the array of an .npy file; UserError where it is cut off, holds Python objects, or is too large."""
    with _refused(path, ".npy"):
        check_room(path.stat().st_size, str(path))
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, also of an .npz.xz, by name; UserError as of `read_array`."""
    with _refused(path, ".npz"):
        source: Any = io.BytesIO(read_bytes(path)) if path.suffix.lower() == ".xz" else path
        with zipfile.ZipFile(source) as archive:
            members = [each for each in archive.infolist() if each.filename.endswith(".npy")]
            check_room(sum(each.file_size for each in members), f"{path}, unpacked,")
            arrays = {}
            for each in members:
                with archive.open(each) as file:
                    arrays[each.filename.removesuffix(".npy")] = np.lib.format.read_array(file, allow_pickle=False)
            return arrays


@contextmanager
def _refused(path: Path, suffix: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # zip, lzma, numpy and Python's parser, which reads headers, have classes of their own
        raise UserError(f"{path} is not a readable {suffix} file: {one_line(error)}") from error


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; unpacked if it is .xz; UserError where it takes half of the memory that is free."""
    with lzma.open(path) if path.suffix.lower() == ".xz" else path.open("rb") as file:
        return b"".join(bounded(file, str(path)))


def bounded(file: IO[bytes], what: str) -> Iterator[bytes]:
    """Yield the pieces of a stream whose length nobody knows; raise UserError where half of the memory is taken."""
    total, most = 0, half_of_free()
    while piece := file.read(_PIECE):
        total += len(piece)
        check_held(total, most, what)
        yield piece


def half_of_free() -> int:
    """Return the bytes that a file's content may take at once."""
    return free_memory() // 2


def check_held(nbytes: int, most: int, what: str) -> None:
    """Raise UserError where more than `most` bytes, which `half_of_free` gave, have been read."""
    if nbytes > most:
        raise UserError(f"{what} unpacks to more than {most:,} bytes, half of the memory that is free")


def open_image(file: Any) -> Any:
    """Open a picture by PIL; UserError for EPS, whatever the file is called: loading it would start Ghostscript."""
    from PIL import Image

    image = Image.open(file)
    if image.format == "EPS":
        image.close()
        raise UserError("it is EPS, a program and no picture; convert it to PNG")
    return image


def eight_bits(image: Any) -> Any:
    """Return a PIL image of 8 bits a channel, of a PIL image or an array (H, W) or (H, W, C) uint8.

    Grey of 16 bits is divided by 257, so that white stays white: Pillow's own conversion cuts it off at 255. UserError
    where there is no image, or nothing says which value is white: integers of 32 bits, or real ones.
    """
    from PIL import Image

    if image is None:
        raise UserError("there is no image")
    if isinstance(image, np.ndarray):
        return Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image)
    # Pillow before 11 has 16-bit PNGs in 32-bit integers.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray(((np.asarray(image).astype(np.int64) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UserError(
            f"its values are 32-bit (mode {image.mode}), and nothing says which is white; save it with 8 or 16 bits"
        )
    return image


def free_memory() -> int:
    """Return the bytes that this process may still take: the machine's, or its group's where that is less."""
    free = psutil.virtual_memory().available
    for limit, used, prefix in _CGROUPS:
        try:
            most, now = int(Path(limit).read_text()), int(Path(used).read_text())
            parts = dict(line.split() for line in Path(used).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or no limit
            continue
        cached = sum(int(parts.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))  # given up on demand
        free = min(free, max(0, most - now + cached))
    return free
