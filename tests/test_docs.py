"""The documentation builds without a warning, and its reference has every public name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nonlinear_lowrank
from nonlinear_lowrank import analysis, hub

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a process of its own, since the builder changes logging and warnings."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    # The theme's note on its own future is no warning of ours.
    settings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return out


@pytest.mark.slow
def test_every_page_and_public_name_is_in_the_site(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    for module in (nonlinear_lowrank, analysis, hub):
        short = module.__name__.rpartition(".")[2]
        text = (site / "api" / f"{short}.html").read_text(encoding="utf-8")
        for name in module.__all__:
            if name not in ("analysis", "hub"):  # pages of their own
                assert re.search(rf'id="{module.__name__}\.(\w+\.)?{name}"', text), (module.__name__, name)


@pytest.mark.slow
def test_notebooks_are_pages_with_code_output_and_pictures(site):
    notebooks = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
    assert notebooks
    for notebook in notebooks:
        text = (site / "tutorials" / f"{notebook.stem}.html").read_text(encoding="utf-8")
        assert 'class="language-python highlight"' in text or 'class="highlight"' in text
        pictures = re.findall(r'<img[^>]* src="([^"]+\.png)"', text)
        assert pictures
        for picture in pictures:
            assert (site / "tutorials" / picture).is_file(), picture


@pytest.mark.slow
def test_the_front_page_is_the_readme_with_its_picture_and_links(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    assert "Two commands" in text
    for picture in re.findall(r'<img[^>]* src="([^"]+\.png)"', text):
        assert (site / picture).is_file(), picture
    assert 'href="training.html"' in text
    assert "studies/llm_small/README.md</code>" in text  # outside of the site: its path, no link
    assert 'href="docs/' not in text


@pytest.mark.slow
def test_pages_fetch_nothing_and_formulas_are_mathml(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="?(https?:[^" >]*)', text) == [], page
        assert "unpkg" not in text, page
    assert "<math" in (site / "noble.html").read_text(encoding="utf-8")
