"""Data of any source: text (`packed`), token files that are mapped in place, and mixtures of both."""

import hashlib
import itertools
import json
import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nlr_lab.tasks.task import Prepared, cache_folder, cached, fingerprint
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import staged_folder

from .data import LEARNED, NO_TOKENIZER, TextData, visible_files
from .packed import Blocks, TokenBlocks, hashes_of, prepare_text
from .shards import Shard, TokenFiles, check_ids, mixture_of, open_shard, token_files
from .tokenizers import boundary_id, byte_lengths, load_tokenizer, tokenizer_hash, vocabulary_size

_MOST_SCANNED = 64 << 30  # bytes; of a longer source the ends of each file are, and every id when it is read
_ENDS = 1 << 20  # ids
_CHUNK = 1 << 24  # ids
_SAMPLES, _SAMPLE = 16, 1 << 16  # parts of a file by which other ids of its size and time are known, and ids of each


def prepare_source(config: TextData, *, progress: bool = True) -> Prepared:
    """Return packed sequences of any source; see `prepare_text`.

    Raises:
        UserError: the source, its weights or its tokenizer cannot be used; the message says what to change.
    """
    if parts := mixture_of(config.source):
        return _prepare_mixture(config, parts, progress)
    tokens = token_files(config.source)
    if progress and (unread := _unread(config, tokens)):
        print(f"note: not read in {config.source}: {unread}", file=sys.stderr)
    return prepare_text(config, progress=progress) if tokens is None else prepare_tokens(config)


def _unread(config: TextData, tokens: Sequence[Path] | None) -> str:
    """Return how many files of a folder are of no kind that is read, by suffix; "" for none."""
    folder, read = Path(config.source).expanduser(), config.files() if tokens is None else tokens
    if not folder.is_dir() or not read:  # of a dataset, its own library reads what it knows
        return ""
    others = {*visible_files(folder)}.difference(read, (each.with_suffix(".idx") for each in tokens or ()))
    counts = Counter(each.suffix or each.name for each in sorted(others)).most_common()
    return ", ".join([f"{count:,} {kind}" for kind, count in counts[:5]] + ["..."] * (len(counts) > 5))


def prepare_tokens(config: TextData) -> Prepared:
    """Return sequences of token files, which stay where they are.

    Without a `valid_source` the end of the source is held out, from the end of a document on. `valid_bytes_per_token`
    is known where the tokenizer is byte-level.

    Raises:
        UserError: no tokenizer is named, ids are outside its vocabulary, or files cannot be used.
    """
    _check_given(config, config.source)
    if config.max_bytes is not None:
        raise UserError(f"max_bytes counts text, and {config.source} holds tokens; add --task.text.max-bytes None")
    tokenizer = None if config.tokenizer == NO_TOKENIZER else load_tokenizer(config.tokenizer)
    size = config.vocab_size if tokenizer is None else vocabulary_size(tokenizer)
    end = None if tokenizer is None else boundary_id(tokenizer)
    train, hashes = _open(config, config.source, size, end)
    start, stop, length = 0, len(train), config.sequence_length
    if config.valid_source is None:
        valid, start = train, _cut(config, train, end)
        stop = start
    else:
        valid, others = _open(config, config.valid_source, size, end)
        if both := [name for name, held in others.items() if held in hashes.values()]:
            raise UserError(f"{both[0]} is in source and in valid_source; hold out other tokens")
        hashes |= others
    blocks = TokenBlocks(train, length, stop=stop)
    held_out = TokenBlocks(valid, length, config.eval_sequences, start=start)
    for side, each, count in (("train", blocks, stop), ("valid", held_out, len(valid) - start)):
        if len(each) < 1:
            fault = f"the {side} part of {config.source} has {count:,} tokens, fewer than one sequence of {length}"
            raise UserError(f"{fault}; give more tokens or lower sequence_length")
    shape: dict[str, Any] = {"vocab_size": size}
    if tokenizer is not None and (sizes := byte_lengths(tokenizer)) is not None:
        total = sum(int(sizes[held_out.block(row)[1:]].sum()) for row in range(len(held_out)))
        shape["valid_bytes_per_token"] = total / (len(held_out) * (length - 1))
    made_by = f"none, {size}" if tokenizer is None else tokenizer_hash(tokenizer)
    made_of = [sorted(hashes.values()), made_by, stop, length, len(held_out)]
    documents = [each.documents for each in train.shards]
    known = {"documents": sum(filter(None, documents))} if None not in documents else {}
    marks = sum(len(each.marks) for each in train.shards)
    facts = {
        "source": config.source,
        "valid_source": config.valid_source,
        "train": {"files": len(train.shards), **known, "ends_of_text_added": marks, "tokens": stop},
        "valid": {"tokens": len(valid) - start},
        "tokenizer_sha256": made_by,
        "sequence_length": length,
        "train_sequences": len(blocks),
        "evaluated_sequences": len(held_out),
        **shape,
    }
    return Prepared(
        train=blocks, valid=held_out, tokenizer=tokenizer, fingerprint=fingerprint(made_of), facts=facts, **shape
    )


def _check_given(config: TextData, what: str) -> None:
    if config.tokenizer in LEARNED:
        raise UserError(
            f"{what} needs the tokenizer that made its tokens: give --tokenizer, such as gpt2 or a folder, or none"
        )


def _open(config: TextData, source: str, vocab_size: int, end: int | None) -> tuple[TokenFiles, dict[str, str]]:
    """Return the files of a source, with a hash for each, after a look at their ids."""
    paths = token_files(source)
    if paths is None:
        raise UserError(f"{source} holds no .bin files, and {config.source} does; give token files for both")
    shards = [open_shard(path, vocab_size, end) for path in paths]
    whole = sum(each.stored * each.dtype.itemsize for each in shards) <= _MOST_SCANNED
    hashes: dict[str, str] = {}
    for shard in shards:
        found = _scan(shard, cache_folder(config.cache_dir), whole=whole)
        check_ids(shard.path, found["lowest"], found["highest"], vocab_size)
        hashes[str(shard.path)] = found["sha256"]
    return TokenFiles(shards, None if whole else vocab_size), hashes


def _scan(shard: Shard, cache: Path, *, whole: bool) -> dict[str, Any]:
    """Return the lowest and highest id and a hash of a file, or of its two ends; cached by path, size and time, and
    by samples of its ids, the ends among them: a copy may keep the time."""
    about, sample = shard.path.stat(), hashlib.sha256()
    for start in np.linspace(0, max(0, shard.stored - _SAMPLE), _SAMPLES, dtype=int):
        sample.update(shard.ids[start : start + _SAMPLE].tobytes())
    key = [str(shard.path.resolve()), about.st_size, about.st_mtime_ns, shard.dtype.str, shard.offset, whole]
    key.append(sample.hexdigest())
    folder = cache / "tokens" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    def read(place: Path) -> dict[str, Any] | None:
        facts: dict[str, Any] = json.loads((place / "scan.json").read_text(encoding="utf-8"))
        return facts if facts.keys() == {"lowest", "highest", "sha256"} else None

    def build(place: Path) -> None:
        places = range(0, shard.stored, _CHUNK)
        spans = [(start, start + _CHUNK) for start in places] if whole else [(0, _ENDS), (-_ENDS, shard.stored)]
        digest, lowest, highest = hashlib.sha256(f"{shard.dtype} {shard.stored} {whole}".encode()), 0, 0
        for start, stop in spans:
            ids = shard.ids[start:stop]
            digest.update(ids.tobytes())
            lowest, highest = min(lowest, int(ids.min())), max(highest, int(ids.max()))
        with staged_folder(place) as staged:
            facts = {"lowest": lowest, "highest": highest, "sha256": digest.hexdigest()}
            (staged / "scan.json").write_text(json.dumps(facts), encoding="utf-8")

    return cached(folder, read, build)


def _cut(config: TextData, files: TokenFiles, end: int | None) -> int:
    """Return the place where the held-out tokens begin: behind an end of text, where one is near."""
    total, length = len(files), config.sequence_length
    wanted = max(0, total - max(length, round(config.valid_fraction * total)))
    near = files.read(wanted, max(wanted, min(total - length, wanted + _ENDS))) if total > length else np.empty(0)
    ends = np.flatnonzero(near == end)
    return wanted + (int(ends[0]) + 1 if len(ends) else 0)


# --- mixtures -------------------------------------------------------------------------------------------------


class JoinedBlocks(Blocks):
    """Sequences of one source after those of another."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)
        self.starts = np.cumsum([0, *map(len, parts)]).tolist()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def block(self, index: int) -> np.ndarray:
        index %= len(self)
        number = bisect_right(self.starts, index) - 1
        found: np.ndarray = self.parts[number].block(index - self.starts[number])
        return found


class MixedBlocks(Blocks):
    """Sequences of several sources by their weights, which add up to 1.

    An index tells the pass too: each pass has as many sequences as all sources together, in each the share of its
    weight (largest remainders). A source continues in the next pass where it stopped, by strides that visit all of it,
    evenly spread, before it starts over.
    """

    counts_passes = True

    def __init__(self, parts: Sequence[Any], names: Sequence[str], weights: Sequence[float], seed: int = 0) -> None:
        self.parts, self.names, self.weights, self.seed = tuple(parts), tuple(names), tuple(weights), seed
        self.counts = shares(weights, sum(map(len, parts)))  # of each source in a pass
        self.starts = np.cumsum([0, *self.counts]).tolist()

    def seeded(self, seed: int) -> "MixedBlocks":
        """Return the same sources in the order of a run."""
        return MixedBlocks(self.parts, self.names, self.weights, seed)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def block(self, index: int) -> np.ndarray:
        number, row = self.locate(index)
        found: np.ndarray = self.parts[number].block(row)
        return found

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source and its sequence."""
        done, place = divmod(index, len(self))
        number = bisect_right(self.starts, place) - 1
        size = len(self.parts[number])
        lap, use = divmod(done * self.counts[number] + place - self.starts[number], size)
        first = int(np.random.default_rng([self.seed, number, lap]).integers(size))
        return number, (first + use * _stride(size)) % size

    def drawn(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return what these indices draw from each source."""
        counts = np.zeros(len(self.parts), dtype=np.int64)
        order = iter(indices)
        while some := list(itertools.islice(order, _ENDS)):
            numbers = np.searchsorted(self.starts, np.array(some) % len(self), side="right") - 1
            counts += np.bincount(numbers, minlength=len(counts))
        return [
            {"source": name, "sequences": int(count), "passes": round(int(count) / len(part), 4)}
            for name, count, part in zip(self.names, counts, self.parts, strict=True)
        ]


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Split a number by weights that add up to 1: largest remainders, the first of equal ones."""
    exact = [weight * total for weight in weights]
    counts = [math.floor(each) for each in exact]
    order = sorted(range(len(exact)), key=lambda number: counts[number] - exact[number])
    for number in order[: total - sum(counts)]:
        counts[number] += 1
    return counts


def _stride(size: int) -> int:
    """Return a number without a divisor in common with `size`, near its golden section."""
    stride = max(1, round(size * 0.6180339887))
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def _prepare_mixture(config: TextData, parts: tuple[tuple[str, float], ...], progress: bool) -> Prepared:
    _check_given(config, f"the mixture {config.source}")
    names, weights = zip(*parts, strict=True)
    sizes = [max(1, each) for each in shares(weights, config.eval_sequences)]
    own = config.valid_source is not None
    each_config = [
        replace(config, source=name, eval_sequences=config.eval_sequences if own else size)
        for name, size in zip(names, sizes, strict=True)
    ]
    prepared = [prepare_source(each, progress=progress) for each in each_config]
    if not own:
        prepared = _without_held_out(each_config, prepared, progress)
    first = prepared[0]
    if own and any(each.facts.get("held_out_documents_dropped_as_also_in_train") for each in prepared):
        raise UserError(f"documents of {config.valid_source} are also in the mixture; give other held-out text")
    few = [name for name, size, each in zip(names, sizes, prepared, strict=True) if len(each.valid) < size]
    if few and not own and progress:
        what = f"{', '.join(few)}: fewer held-out sequences than the weight asks for; the evaluation has them all"
        print(f"note: {what}", file=sys.stderr)
    valid = first.valid if own else JoinedBlocks([each.valid for each in prepared])
    train = MixedBlocks([each.train for each in prepared], names, weights)
    shape: dict[str, Any] = {"vocab_size": first.vocab_size}
    held = prepared[:1] if own else prepared
    if all(each.valid_bytes_per_token is not None for each in held):
        nbytes = sum((each.valid_bytes_per_token or 0.0) * len(each.valid) for each in held)
        shape["valid_bytes_per_token"] = nbytes / len(valid)
    facts = {
        "source": config.source,
        "valid_source": config.valid_source,
        "tokenizer_sha256": first.facts["tokenizer_sha256"],
        "sources": [
            {"weight": round(weight, 6), "sequences_in_a_pass": count, **each.facts}
            for weight, count, each in zip(weights, train.counts, prepared, strict=True)
        ],
        "sequence_length": config.sequence_length,
        "train_sequences": len(train),
        "evaluated_sequences": len(valid),
        **shape,
    }
    made_of = fingerprint(*(each.fingerprint for each in prepared), weights, len(valid))
    return Prepared(train=train, valid=valid, tokenizer=first.tokenizer, fingerprint=made_of, facts=facts, **shape)


def _without_held_out(configs: Sequence[TextData], prepared: Sequence[Prepared], progress: bool) -> list[Prepared]:
    """Return the sources of a mixture; no text among them trains on a document that another one holds out."""
    kept = list(prepared)
    texts = [number for number, config in enumerate(configs) if token_files(config.source) is None]
    hashes = {number: hashes_of(prepared[number]) for number in texts}
    for number, (train, _) in hashes.items():
        shared = [np.intersect1d(train, held_out) for other, (_, held_out) in hashes.items() if other != number]
        without = frozenset(itertools.chain.from_iterable(each.tolist() for each in shared))
        if not without:
            continue
        config = configs[number]
        if len(without) == len(train):
            what = f"all documents that {config.source} would train on are held out of other sources of the mixture"
            raise UserError(f"{what}; leave it out, or give a valid_source")
        apart = prepare_text(config, without=without, progress=progress)
        dropped = prepared[number].facts["train"]["documents"] - apart.facts["train"]["documents"]
        facts = {**apart.facts, "training_documents_dropped_as_held_out_of_another_source": dropped}
        kept[number] = replace(apart, facts=facts)
        if progress:
            print(f"{config.source}: {dropped:,} training documents dropped, which another source holds out")
    return kept
