"""The wheel and the sdist: built without network, installed into an empty folder, imported from there."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import nonlinear_lowrank
from nlr_lab.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
_LEFT_OUT = shutil.ignore_patterns(".venv", ".git", "*.egg-info", "__pycache__", ".*_cache", "build", "dist", "site")

pytestmark = pytest.mark.slow


def python(*arguments, cwd, **environment):
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder of the sdist and of the wheel that was built from it, out of a copy of the sources."""
    place = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, place / "source", ignore=_LEFT_OUT)
    # First the sdist, then the wheel from the sdist alone: what it lacks shows.
    python("-m", "build", "--no-isolation", "--outdir", place / "dist", place / "source", cwd=place)
    return place / "dist"


def test_the_wheel_has_the_whole_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith(("nonlinear_lowrank/", "nlr_lab/"))}
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for package_folder in ("nonlinear_lowrank", "nlr_lab")
        for path in (ROOT / "src" / package_folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package == sources
    assert "nonlinear_lowrank/py.typed" in package
    assert all(".dist-info/" in name for name in names - package)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_installed_wheel_is_imported_and_has_recipes_and_command(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "installed"
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--quiet", "--target", target, wheel)
    python(*install, cwd=tmp_path)
    code = """
import importlib.resources, json
import nonlinear_lowrank as nlr
from nlr_lab.recipes import RECIPES
typed = importlib.resources.files("nonlinear_lowrank").joinpath("py.typed").is_file()
rank = nlr.NobleConfig(rank=4).rank
print(json.dumps([nlr.__file__, typed, sorted(RECIPES), rank]))
"""
    path = {"PYTHONPATH": str(target)}
    file, typed, recipes, rank = json.loads(python("-c", code, cwd=tmp_path, **path).splitlines()[-1])
    assert Path(file).is_relative_to(target)
    assert typed
    assert recipes == sorted(RECIPES)
    assert rank == 4
    assert (target / "bin" / "nlr").is_file()
    said = python(target / "bin" / "nlr", "--version", cwd=tmp_path, **path)
    assert nonlinear_lowrank.__version__ in said


def test_the_sdist_has_what_repeats_the_results(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml", "requirements.lock", "mkdocs.yml"}
    for pattern in ("tests/**/*.py", "docs/*.md", "docs/api/*.md", "studies/*/*.py", "studies/*/README.md"):
        wanted |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
    assert wanted <= names, wanted - names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "site/"))]
