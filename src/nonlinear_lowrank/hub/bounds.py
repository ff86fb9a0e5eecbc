"""Files that a user gives, read within bounds: what their headers claim is held against their sizes, and against the
memory that is free, before any of it is taken. No pickle is ever read."""

import io
import json
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

_PIECE = 16 << 20  # bytes read at a time
_MOST_HEADER = 100_000_000  # of a safetensors file: the format's own limit
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor as the header of a safetensors file describes it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, from the end of the header."""
    end: int


def check_room(nbytes: int, what: str) -> None:
    """Raises UserError where something would take more memory than is free.

    Args:
        nbytes: that it takes.
        what: what it is, for the message.
    """
    free = psutil.virtual_memory().available
    if nbytes > free:
        raise UserError(f"{what} takes {nbytes:,} bytes of memory, of which {free:,} are free; give a smaller one")


def read_array(path: Path) -> np.ndarray:
    """The array of an .npy file.

    Raises:
        UserError: it is no such file, is shorter than its header says, holds Python objects, or is too large.
    """
    try:
        with path.open("rb") as file:
            return _array(file, path.stat().st_size, "the array")
    except UserError:
        raise
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise UserError(f"{path} is no .npy file that can be read: {one_line(error)}") from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, also of an .npz.xz, by name.

    Raises:
        UserError: it is no such file, an array is shorter than its header says or holds Python objects, or all
            together are too large.
    """
    try:
        source: Any = io.BytesIO(read_bytes(path)) if path.suffix.lower() == ".xz" else path
        with zipfile.ZipFile(source) as archive:
            members = [each for each in archive.infolist() if each.filename.endswith(".npy")]
            check_room(sum(each.file_size for each in members), f"{path}, unpacked,")
            found = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as file:
                    found[name] = _array(file, member.file_size, name)
            return found
    except UserError:
        raise
    except (
        *(OSError, ValueError, EOFError, SyntaxError, RuntimeError, NotImplementedError),
        *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    ) as error:
        raise UserError(f"{path} is no .npz file that can be read: {one_line(error)}") from error


def read_bytes(path: Path) -> bytes:
    """The content of a file; of an .xz file, unpacked.

    Raises:
        UserError: it, or what it unpacks to, is larger than the memory that is free.
        OSError: it cannot be read.
        lzma.LZMAError: it is no whole .xz file.
    """
    with lzma.open(path) if path.suffix.lower() == ".xz" else path.open("rb") as file:
        return b"".join(bounded(file, str(path)))


def bounded(file: IO[bytes], what: str) -> Iterator[bytes]:
    """The pieces of a stream whose length nobody knows, for as long as they leave half of the memory free.

    Raises:
        UserError: it is longer than that.
    """
    total, most = 0, half_of_free()
    while piece := file.read(_PIECE):
        total += len(piece)
        check_held(total, most, what)
        yield piece


def half_of_free() -> int:
    """Bytes that what is read from a file may take at once."""
    return psutil.virtual_memory().available // 2


def check_held(nbytes: int, most: int, what: str) -> None:
    """Raises UserError where more than `most` bytes, which `half_of_free` gave, have been read."""
    if nbytes > most:
        raise UserError(f"{what} unpacks to more than {most:,} bytes, half of the memory that is free")


def safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, by name; its header is checked whole, and no tensor is read.

    Raises:
        UserError: the header claims more than there is, is no JSON, or a tensor's type, shape and place do not fit.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(f"{path} is not whole: its header claims {length:,} bytes and the file has {size:,}")
        if length > _MOST_HEADER:
            raise UserError(f"{path} has a header of {length:,} bytes; the format allows {_MOST_HEADER:,}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} has a header that is no JSON: {one_line(error)}") from error
    if not isinstance(header, dict):
        raise UserError(f"{path} has a header that is no JSON object")
    header.pop("__metadata__", None)
    room = size - 8 - length
    entries = {name: _entry(f"{path}: tensor {name!r}", about, room) for name, about in header.items()}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise UserError(f"{path}: tensor {name!r} begins at byte {entry.begin:,}, where {at:,} is next")
        at = entry.end
    if at != room:
        raise UserError(f"{path} is not whole: its tensors end at byte {at:,} of {room:,}")
    return entries


def _entry(what: str, about: Any, room: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
        whole = all(type(each) is int and each >= 0 for each in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise UserError(f"{what} has no dtype, shape and data_offsets that can be read")
    if dtype not in _BITS:
        raise UserError(f"{what} is of an unknown type {dtype!r}")
    if not begin <= end <= room:
        raise UserError(f"{what} claims bytes {begin:,} to {end:,} of {room:,}")
    if (wanted := math.prod(shape) * _BITS[dtype]) != 8 * (end - begin):
        raise UserError(f"{what}: {dtype} {list(shape)} takes {wanted / 8:,.0f} bytes and has {end - begin:,}")
    return TensorEntry(dtype=dtype, shape=shape, begin=begin, end=end)


def _array(file: IO[bytes], size: int, name: str) -> np.ndarray:
    """One array out of a stream of `size` bytes; ValueError where it is none, UserError where it is too large."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read_header(file)
    except ValueError:
        raise
    except Exception as error:  # numpy has tokenize and the parser of Python look at it
        raise ValueError(f"the header of {name} cannot be read: {one_line(error)}") from error
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are never read; save it as numbers")
    claimed, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if claimed != there:
        raise ValueError(f"{name} claims {tuple(shape)} of {dtype}, {claimed:,} bytes, and has {there:,}")
    check_room(claimed, name)
    data, at = bytearray(claimed), 0  # which takes memory as it is written to
    while at < claimed:
        if not (count := file.readinto(memoryview(data)[at : at + _PIECE])):  # type: ignore[attr-defined]
            raise ValueError(f"{name} is cut off: {at:,} bytes of {claimed:,}")
        at += count
    return np.ndarray(shape, dtype, data, order="F" if fortran else "C")
