"""Record of the data a run read: what each of its settings names, file by file with sizes and hashes.

    {"fingerprint": ...,                                       of the data as trained on
     "sources": {"text.source": {"name": "corpus", "bytes": ..., "sha256": ...,
                                 "files": {"a.txt": {"bytes": ..., "sha256": ...}}},
                 "text.tokenizer": {"name": "bpe"}}}           embedded, learned, or by its name on the hub

Paths are written relative to what the setting names, never absolute. The sha256 of a source is that of its files'
names and hashes. Of the embedded text only that is kept; of a name on the hub, the fingerprint of what came of it.
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nlr_lab.runtime.settings import flatten
from nlr_lab.tasks.text.corpus import Corpus
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import hash_file

_NAMING = ("source", "valid_source", "tokenizer", "checkpoint")  # ends of the settings that may name files
_OURS = ("stdlib", "digits", "digits-vit", "minilm", "bpe", "wordpiece", "patches")
_MOST_BYTES = 64 << 30  # of a source that is hashed; reading more would delay the first step by minutes


def data_record(task: Any, fingerprint: str) -> dict[str, Any]:
    """Return what a task's settings name, as this file's docstring shows it.

    Args:
        task: a recipe's.
        fingerprint: of its prepared data.

    Raises:
        UserError: a file cannot be read.
    """
    sources = {}
    for name, value in flatten(task).items():
        if name.rpartition(".")[2] in _NAMING and isinstance(value, str) and value:
            sources[name] = _describe(value, fingerprint)
    return {"fingerprint": fingerprint, "sources": sources}


def changed_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each source and file that is not the same in two records; none for what was not hashed."""
    lines = []
    for name, former in before.get("sources", {}).items():
        present = now.get("sources", {}).get(name)
        if present is None:
            lines.append(f"{name} named {former.get('name')} and names nothing now")
            continue
        old, new = former.get("files", {}), present.get("files", {})
        differing = [file for file in sorted(old.keys() | new.keys()) if _differs(old.get(file), new.get(file))]
        for file in differing[:3]:
            how = "is new" if file not in old else "is missing" if file not in new else "has changed"
            lines.append(f"{name}: {present['name']}, {file} {how}")
        if len(differing) > 3:
            lines.append(f"{name}: {present['name']}, {len(differing) - 3:,} more files differ")
        if not differing and _differs(former, present):
            lines.append(f"{name}: {present['name']} has changed")
    return lines


def _differs(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> bool:
    if old is None or new is None:
        return True
    unhashed = old.get("sha256") is None or new.get("sha256") is None
    return old.get("bytes") != new.get("bytes") or (not unhashed and old["sha256"] != new["sha256"])


def _describe(value: str, fingerprint: str) -> dict[str, Any]:
    if value == "stdlib":
        whole = _hashed(Path(), Corpus(source="stdlib").files())
        return {"name": value, "bytes": whole["bytes"], "sha256": whole["sha256"]}
    if value in _OURS:
        return {"name": value}
    path = Path(value).expanduser()
    if path.is_file():
        return {"name": path.name, **_hashed(path.parent, [path])}
    if path.is_dir():
        if (path / "recipe.json").is_file() and (path / "model").is_dir():
            path = path / "model"  # of a run folder that is what is read
        visible = (file for file in path.rglob("*") if not any(part[0] == "." for part in file.relative_to(path).parts))
        return {"name": path.name, **_hashed(path, sorted(file for file in visible if file.is_file()))}
    return {"name": value, "fingerprint": fingerprint}


def _hashed(root: Path, files: Iterable[Path]) -> dict[str, Any]:
    try:
        found = {file: file.stat() for file in files}
        total = sum(each.st_size for each in found.values())
        entries: dict[str, dict[str, Any]] = {}
        digest = hashlib.sha256()
        for file, about in found.items():
            name = str(file.relative_to(root)) if root != Path() else file.name
            content = None if total > _MOST_BYTES else _sha256(file, about.st_size, about.st_mtime_ns)
            entries[name] = {"bytes": about.st_size, "sha256": content}
            digest.update(f"{name}\n{content}\n".encode())
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    return {"bytes": total, "sha256": None if total > _MOST_BYTES else digest.hexdigest(), "files": entries}


@functools.lru_cache(maxsize=1 << 16)
def _sha256(file: Path, size: int, modified: int) -> str:
    """Return the hash of a file's content; the runs of a comparison share one reading."""
    return hash_file(file)
