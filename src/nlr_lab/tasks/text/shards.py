"""Files of token ids, mapped in place and read as one axis; and how a source names them.

| format   | layout, little-endian                                                                             |
|----------|---------------------------------------------------------------------------------------------------|
| nanoGPT  | x.bin: ids alone, uint16; uint32 where the vocabulary exceeds 65,536 or every other uint16 is 0    |
| llm.c    | x.bin: 256 int32 (magic, version, count, zeros), then ids: uint16 (magic 20240520, version 1) or  |
|          | uint32 (20240801, version 7)                                                                      |
| Megatron | x.bin: ids alone; x.idx: "MMIDIDX\\0\\0", uint64 version 1, uint8 type of the ids, uint64 S, uint64 D,|
|          | int32 lengths (S), int64 byte offsets (S), int64 first sequence of each document, and S (D in all) |
"""

import functools
import glob
import math
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nonlinear_lowrank.errors import UserError

from .data import Corpus, visible_files

_HEADER = 1024  # bytes
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
_INDEX = struct.Struct("<9sQBQQ")
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LOOK = 1 << 20  # ids in which the zeros of uint32 show
_MIXTURE = "give each source a weight above 0, as in a.bin:0.7,b.bin:0.3"


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """One file of ids, with an end-of-text id after each place of `marks`. It is mapped, never read whole; each process
    maps it itself."""

    path: Path
    dtype: np.dtype
    offset: int = 0
    """Bytes before the first id."""
    stored: int
    """Number of ids in the file."""
    documents: int | None = None
    """Number of documents, where the format tells."""
    marks: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Ends of the documents that lack an end of text, ascending."""
    end: int = 0
    """The end-of-text id."""

    @classmethod
    def of_npy(cls, path: Path) -> "Shard":
        """Return the shard of an .npy file of one axis."""
        mapped: Any = np.load(path, mmap_mode="r")
        return cls(path=path, dtype=mapped.dtype, offset=mapped.offset, stored=len(mapped))

    @functools.cached_property
    def ids(self) -> np.ndarray:
        """The ids of the file, mapped."""
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.stored,))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "ids"}

    def __len__(self) -> int:
        return self.stored + len(self.marks)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids from `start` to before `stop`."""
        if not len(self.marks):
            return self.ids[start:stop]
        first, last = np.searchsorted(self._passed, (start, stop), side="right")
        ids = self.ids[start - first : stop - last].astype(np.int64)
        return np.insert(ids, self.marks[first:last] - (start - first), self.end)

    @functools.cached_property
    def _passed(self) -> np.ndarray:
        return self.marks + np.arange(1, len(self.marks) + 1)  # places behind each added id


class TokenFiles:
    """Shards as one axis of ids; with a vocabulary, each id that is read must be in it."""

    def __init__(self, shards: Sequence[Shard], vocab_size: int | None = None) -> None:
        self.shards, self.vocab_size = tuple(shards), vocab_size
        self.starts = np.cumsum([0, *map(len, shards)]).tolist()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids from `start` to before `stop`; UserError where one is outside the vocabulary."""
        if start >= stop:
            return np.empty(0, np.int64)
        parts = []
        for number in range(bisect_right(self.starts, start) - 1, len(self.shards)):
            base = self.starts[number]
            if base >= stop:
                break
            part = self.shards[number].read(max(start - base, 0), min(stop, self.starts[number + 1]) - base)
            if self.vocab_size is not None:
                check_ids(self.shards[number].path, int(part.min()), int(part.max()), self.vocab_size)
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_ids(holder: Path | str, lowest: int, highest: int, vocab_size: int) -> None:
    """Raise UserError where a file, or what else holds them, has ids outside the vocabulary."""
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise UserError(
            f"{holder} has the id {wrong:,} and the tokenizer's vocabulary has {vocab_size:,}; name the tokenizer that "
            "made it (with --tokenizer none: --vocab-size)"
        )


def mixture_of(source: str) -> tuple[tuple[str, float], ...]:
    """Return the sources of "a:0.7,b:0.3" with their weights, which add up to 1; () for one source alone.

    Raises:
        UserError: a weight is missing, no number or not above 0, or a source is there twice.
    """
    if "," not in source or Path(source).expanduser().exists():
        return ()
    parts: dict[str, float] = {}
    for part in source.split(","):
        name, _, weight = part.strip().rpartition(":")
        try:
            value = float(weight) if name else math.nan
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise UserError(f"cannot read {part.strip()!r} in the mixture {source!r}; {_MIXTURE}")
        if name in parts:
            raise UserError(f"{name!r} occurs twice in the mixture {source!r}; add its weights up")
        parts[name] = value
    total = sum(parts.values())
    return tuple((name, value / total) for name, value in parts.items())


def token_files(source: str) -> list[Path] | None:
    """Return the .bin files that a source names, sorted; None where it names no token files.

    It is a file, a pattern that ends in .bin, a folder without more text, or Megatron's prefix of a .bin and an .idx.

    Raises:
        UserError: there is no such file, a folder holds text too or files of both train and val, or an .idx is missing.
    """
    path = Path(source).expanduser()
    if source == "stdlib":
        return None
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    beside = [path.parent / f"{path.name}{suffix}" for suffix in (".bin", ".idx")]
    if path.suffix == ".bin":
        found = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not found:
            raise UserError(f"there is no file {source!r}; give a .bin file, a folder of them, or a pattern")
        return [each for each in found if each.is_file()]
    if not path.exists() and any(each.is_file() for each in beside):
        if not all(each.is_file() for each in beside):
            raise UserError(f"{source} needs both {beside[0].name} and {beside[1].name}; or name the .bin alone")
        return beside[:1]
    found = [each for each in visible_files(path) if each.suffix == ".bin"] if path.is_dir() else []
    if not found:
        return None
    names = [set(each.stem.replace("-", "_").replace(".", "_").split("_")) for each in found]
    if any("train" in name for name in names) and any(name & {"val", "valid", "validation"} for name in names):
        raise UserError(f"{path} holds files of train and of val; name each by a pattern: '{path}/*train*.bin'")
    try:
        texts = Corpus(source=source).files()
    except UserError:
        return found
    if sum(each.stat().st_size for each in found) < sum(each.stat().st_size for each in texts):
        return None  # a folder of text with something else in it
    what = f"{path} holds text and .bin files"
    raise UserError(f"{what}; name the latter by a pattern, '{path}/*.bin', or move them away to train on the text")


def open_shard(path: Path, vocab_size: int, end: int | None) -> Shard:
    """Return a file's ids, of whichever format it is; with an end-of-text id each document of Megatron's ends in it.

    Raises:
        UserError: the file is empty, cut off, of another kind, or does not fit its .idx.
    """
    index, size = path.with_suffix(".idx"), path.stat().st_size
    if index.is_file():
        return _megatron(path, index, end)
    if path.stem.endswith(("_document", "_sentence")):
        raise UserError(
            f"there is no {index}; put Megatron's .idx beside its .bin, or rename the .bin if it is another's"
        )
    with path.open("rb") as file:
        head = file.read(_HEADER)
    if head.startswith((b"PK\x03\x04", b"MMIDIDX", b"GGUF")):
        raise UserError(f"{path} is not a token file; give nanoGPT's, llm.c's or Megatron's")
    header = np.frombuffer(head, "<i4") if len(head) == _HEADER else np.ones(4, "<i4")
    if int(header[0]) in _LLM_C or not header[3:].any():
        return _llm_c(path, header, size)
    dtype = np.dtype("<u4" if vocab_size > 1 << 16 else "<u2")
    if dtype.itemsize == 2 and size % 4 == 0 and size >= 64:
        ids = np.fromfile(path, "<u2", count=_LOOK)
        dtype = np.dtype("<u4") if ids.any() and not ids[1::2].any() else dtype
    if not size or size % dtype.itemsize:
        fault = f"{path} has {size:,} bytes, not a number of {dtype} ids"
        raise UserError(f"{fault}; it is empty, cut off, or was made with another vocabulary")
    return Shard(path=path, dtype=dtype, stored=size // dtype.itemsize)


def _llm_c(path: Path, header: np.ndarray, size: int) -> Shard:
    magic, version, count = (int(each) for each in header[:3])
    if magic not in _LLM_C:
        known = " and ".join(map(str, _LLM_C))
        raise UserError(f"{path} has a header with the unknown magic {magic}; llm.c's token files have {known}")
    wanted, kind = _LLM_C[magic]
    dtype = np.dtype(kind)
    if version != wanted:
        raise UserError(f"{path} has version {version} of llm.c's magic {magic}; version {wanted} is known")
    if count < 1 or size != _HEADER + count * dtype.itemsize:
        held = (size - _HEADER) / dtype.itemsize
        raise UserError(f"{path} should hold {count:,} ids by its header and holds {held:,.10g}; make it again")
    return Shard(path=path, dtype=dtype, offset=_HEADER, stored=count)


def _megatron(path: Path, index: Path, end: int | None) -> Shard:
    hint = "make both again with Megatron's preprocess_data.py"
    with index.open("rb") as file:
        head = file.read(_INDEX.size)
    if len(head) < _INDEX.size or not head.startswith(b"MMIDIDX\0\0"):
        raise UserError(f"{index} is not a Megatron index (it does not begin with MMIDIDX); {hint}")
    _, version, code, sequences, bounds = _INDEX.unpack(head)
    if version != 1 or code not in _TYPES:
        raise UserError(f"{index} has version {version} and type code {code}; known are 1 and integer types; {hint}")
    if index.stat().st_size < _INDEX.size + 12 * sequences + 8 * bounds:
        raise UserError(f"{index} is cut off; {hint}")
    dtype, mapped = np.dtype(_TYPES[code]), np.memmap(index, np.uint8, "r")
    place, arrays = _INDEX.size, []
    for kind, count in (("<i4", sequences), ("<i8", sequences), ("<i8", bounds)):
        arrays.append(np.frombuffer(mapped, kind, count, place))
        place += arrays[-1].nbytes
    lengths, pointers, firsts = arrays
    ends = np.cumsum(np.concatenate([[0], lengths]), dtype=np.int64)
    fits = bool((lengths >= 0).all()) and np.array_equal(pointers, ends[:-1] * dtype.itemsize)
    fits = fits and ends[-1] * dtype.itemsize == path.stat().st_size and ends[-1] > 0
    ordered = bounds > 0 and firsts[0] == 0 and firsts[-1] == sequences and bool((np.diff(firsts) >= 0).all())
    if not fits or not ordered:
        raise UserError(f"{index} does not fit {path.name} ({path.stat().st_size:,} bytes); {hint}")
    closes = np.unique(ends[firsts[1:]])
    closes = closes[closes > 0]
    shard = Shard(path=path, dtype=dtype, stored=int(ends[-1]), documents=len(closes))
    if end is None:
        return shard
    # Megatron ends documents only when told to (--append-eod).
    return replace(shard, marks=closes[shard.ids[closes - 1] != end], end=end)
