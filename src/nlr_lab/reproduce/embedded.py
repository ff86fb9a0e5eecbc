"""Data for demos that no package has."""

import ast
import itertools
from pathlib import Path

from nlr_lab.tasks.task import cache_folder, cached
from nlr_lab.tasks.text.data import library_sources, read_text

_SENTENCES, _HELD = 1500, 300


def acceptability() -> str:
    """Return a folder with a task in the form of GLUE's CoLA, made on first use: is the first sentence of a docstring
    of Python's library in its own order, or are two neighbouring words exchanged?"""
    place = cache_folder() / "acceptability-1"
    return str(cached(place, lambda found: found if (found / "CoLA" / "dev.tsv").is_file() else None, _write))


def _write(place: Path) -> None:
    sentences: dict[str, None] = {}
    for file in library_sources():
        for node in ast.walk(ast.parse(read_text(file))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                sentence = " ".join(text.partition("\n\n")[0].split())
                if sentence.isascii() and 6 <= sentence.count(" ") <= 20:
                    sentences[sentence] = None
        if len(sentences) >= _SENTENCES:
            break
    lines = []
    for number, sentence in enumerate(itertools.islice(sentences, _SENTENCES)):
        words, right = sentence.split(), number % 2
        if not right:
            at = 1 + number % (len(words) - 2)
            words[at], words[at + 1] = words[at + 1], words[at]
        lines.append(f"stdlib\t{right}\t\t{' '.join(words)}\n")
    (place / "CoLA").mkdir(parents=True, exist_ok=True)
    (place / "CoLA" / "train.tsv").write_text("".join(lines[_HELD:]), encoding="utf-8")
    (place / "CoLA" / "dev.tsv").write_text("".join(lines[:_HELD]), encoding="utf-8")
