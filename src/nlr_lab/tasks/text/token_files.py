"""Files of tokens."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from nonlinear_lowrank.errors import UserError

from .tokenizers import backend_of, boundary_id, byte_lengths, encode, encode_with_bytes, vocabulary_size

PIECE = 65_536  # characters encoded at a time, so that one novel uses all cores
_BATCH = 4_000_000  # characters that are gathered before they are encoded
_UNFIT = 0.01  # part of a text that a fitting tokenizer may lose


def pieces(document: str, size: int) -> Iterator[str]:
    """Cut at ends of lines (of words, in a line that is too long), so that tokens rarely straddle a cut."""
    start = 0
    while start < len(document):
        end = start + size
        if end < len(document):
            cut = document.find("\n", end, end + size) + 1 or document.find(" ", end, end + size)
            end = cut if cut > 0 else end + size
        yield document[start:end]
        start = end


class TokenWriter:
    """Tokens of documents, each followed by the boundary, as one array on disk.

    Args:
        path: of the tokens.
        tokenizer: what makes them.
        bytes_path: where the bytes of each token go, for tokenizers whose tokens do not tell.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, bytes_path: Path | None = None) -> None:
        self._tokenizer, self._boundary = tokenizer, boundary_id(tokenizer)
        self._file = NpyWriter(path, vocabulary_size(tokenizer))
        self._lengths, backend = byte_lengths(tokenizer), backend_of(tokenizer)
        # A normalizer changes the text, so that its bytes need not come back.
        self._complete = self._lengths is not None and backend is not None and backend.normalizer is None
        offsets = self._lengths is None and backend is not None
        self._bytes = NpyWriter(bytes_path, 2**32) if bytes_path is not None and offsets else None
        self._batch: list[str] = []
        self._waiting = self._lost = self._size = self.documents = 0

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            for file in (self._file, self._bytes):
                if file is not None:
                    file.close()

    def add(self, document: str) -> None:
        """Append a document."""
        self._batch.append(document)
        self._waiting += len(document)
        if self._waiting > _BATCH:
            self._flush()

    def facts(self) -> dict[str, Any]:
        """Return what was written, after the end. The hash is of the tokens alone."""
        counts = {"documents": self.documents, "bytes": self._size, "tokens": self._file.count}
        return {**counts, "sha256": self._file.digest.hexdigest()}

    def _flush(self) -> None:
        texts = [piece for document in self._batch for piece in pieces(document, PIECE)]
        encoded: Iterator[tuple[list[int], np.ndarray | None]]
        if self._bytes is None:
            encoded = ((ids, None) for ids in encode(self._tokenizer, texts))
        else:
            encoded = iter(encode_with_bytes(self._tokenizer, texts))
        for document in self._batch:
            size = covered = 0
            for piece in pieces(document, PIECE):
                ids, sizes = next(encoded)
                tokens = np.array(ids, dtype=self._file.dtype)
                self._file.append(tokens)
                size += len(piece.encode())
                self._lost += self._losses(tokens, piece)
                if self._bytes is not None and sizes is not None:
                    self._bytes.append(sizes)
                    covered += int(sizes.sum())
            self._file.append(np.array([self._boundary]))
            if self._bytes is not None:
                self._bytes.append(np.array([size - covered]))
            self.documents += 1
            self._size += size
        self._batch, self._waiting = [], 0
        whole = self._size if self._complete else self._file.count
        if self._lost > _UNFIT * whole:
            what = "bytes are lost" if self._complete else "tokens are unknown"
            raise UserError(
                f"the tokenizer does not fit the text: {100 * self._lost / whole:.1f} % of its {what}; choose another "
                "tokenizer, or 'bpe' to train one"
            )

    def _losses(self, tokens: np.ndarray, text: str) -> int:
        """Count unknown tokens; of a byte-level tokenizer, which has none, the bytes that its tokens lack."""
        if self._complete and self._lengths is not None:
            return max(0, len(text.encode()) - int(self._lengths[tokens].sum()))
        unknown = self._tokenizer.unk_token_id
        return 0 if unknown is None or unknown == self._boundary else int((tokens == unknown).sum())


class NpyWriter:
    """An .npy file of one axis that grows; uint16, or uint32 where there are more than 2^16 values.

    Args:
        path: of the file.
        values: that there are: 0 to values - 1.
    """

    def __init__(self, path: Path, values: int) -> None:
        self.dtype = np.dtype("<u2" if values <= 2**16 else "<u4")
        self.count, self.digest = 0, hashlib.sha256()
        self._file = path.open("wb")
        self._write_header()

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def append(self, values: np.ndarray) -> None:
        """Append values."""
        data = values.astype(self.dtype, copy=False).tobytes()
        self._file.write(data)
        self.digest.update(data)
        self.count += len(values)

    def close(self) -> None:
        """Write the header again, now that the count is known: numpy pads it to one length."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, header)
