"""The header of a safetensors file, held against the file before anything is read of it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

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
