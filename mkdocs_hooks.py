"""The site's front page is README.md; links that leave docs/ do not leave the site.

A link to a picture outside docs/ takes the picture along; to another file, it becomes the file's path. A link named by
a page's file gets the page's title. A block of ```math is LaTeX, which becomes MathML. A notebook is a page as it was
run, and a file beside it. No page fetches anything: the theme's one foreign script is replaced by our own.
"""

import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent
DOCS = ROOT / "docs"
FRONT = "index.md"
_SHIM = "https://unpkg.com/iframe-worker/shim"
_MATH = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?\[([^\]]*)\])\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the front page, the notebooks' pages, and the pictures that pages show from outside docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, FRONT, content=readme))
    for notebook in sorted(DOCS.rglob("*.ipynb")):
        uri = notebook.relative_to(DOCS).with_suffix(".md")
        names = {"unique_key": notebook.stem, "output_files_dir": f"{notebook.stem}_files"}
        text, resources = MarkdownExporter().from_filename(str(notebook), resources=names)
        files.append(File.generated(config, uri.as_posix(), content=text))
        for name, picture in resources["outputs"].items():
            files.append(File.generated(config, (uri.parent / name).as_posix(), content=picture))
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
                return text if text.strip("`") in outside else f"{text} (`{outside}`)"
            place = DOCS / outside
        elif here == FRONT and (ROOT / target).exists():
            place = ROOT / target
        elif target.endswith(".ipynb"):
            place = (DOCS / here).parent / target
        elif text == target:  # a file's name, for readers of the repository
            title = ((DOCS / here).parent / target).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            return f"[{title}]({target}{anchor or ''})"
        else:
            return found[0]
        if place.suffix == ".ipynb":
            place = place.with_suffix(".md")
        return f"{head}({os.path.relpath(place, (DOCS / here).parent)}{anchor or ''})"

    return _MATH.sub(_formulas, _LINK.sub(rewrite, markdown))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Puts our own script in the place of a fetched one."""
    return output.replace(_SHIM, os.path.relpath(DOCS / "file-search.js", (DOCS / page.file.src_uri).parent))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Does so on the page for what is not found."""
    return output_content.replace(_SHIM, "file-search.js")


def _formulas(block: re.Match[str]) -> str:
    """MathML, a line for each line of LaTeX."""
    lines = [line for line in block[1].splitlines() if line.strip()]
    return "".join(f"<p>{convert(line, display='block')}</p>\n" for line in lines)


def _outside(page: str, target: str) -> str | None:
    """The path from the repository's root of a file outside docs/ that a page links to; None: it is something else."""
    place = ((ROOT if page == FRONT else (DOCS / page).parent) / target).resolve()
    if not place.exists() or place.is_relative_to(DOCS) or not place.is_relative_to(ROOT):
        return None
    return str(place.relative_to(ROOT))
