"""The site's front page is README.md; links that leave docs/ do not leave the site.

A link to a picture outside docs/ takes the picture along; to another file, it becomes the file's path.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent
DOCS = ROOT / "docs"
FRONT = "index.md"
_LINK = re.compile(r"(!?\[([^\]]*)\])\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the front page and the pictures that pages show from outside docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, FRONT, content=readme))
    for page in files.documentation_pages():
        for _, _, target, _ in _LINK.findall(page.content_string):
            if (
                (outside := _outside(page.src_uri, target))
                and outside.endswith(".png")
                and outside not in files.src_uris
            ):
                files.append(File.generated(config, outside, abs_src_path=str(ROOT / outside)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites a page's links; what names no file stays, and the strict build complains of it."""

    def rewrite(found: re.Match[str]) -> str:
        head, text, target, anchor = found.groups()
        here = page.file.src_uri
        if outside := _outside(here, target):
            if not outside.endswith(".png"):
                return text if text.strip("`") == outside else f"{text} (`{outside}`)"
            place = DOCS / outside
        elif here == FRONT and (ROOT / target).exists():
            place = ROOT / target
        else:
            return found[0]
        return f"{head}({os.path.relpath(place, (DOCS / here).parent)}{anchor or ''})"

    return _LINK.sub(rewrite, markdown)


def _outside(page: str, target: str) -> str | None:
    """The path from the repository's root of a file outside docs/ that a page links to; None: it is something else."""
    place = ((ROOT if page == FRONT else (DOCS / page).parent) / target).resolve()
    if not place.exists() or place.is_relative_to(DOCS) or not place.is_relative_to(ROOT):
        return None
    return str(place.relative_to(ROOT))
