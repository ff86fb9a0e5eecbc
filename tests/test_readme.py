"""The documents do what they say: snippets run, commands parse, files and links exist, figures agree."""

import re
from pathlib import Path

import pytest

from adapter_helpers import PEFT_WARNINGS
from nlr_lab.cli import COMMANDS
from nlr_lab.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.name for page in PAGES]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_snippets_run_from_top_to_bottom(page, tmp_path, monkeypatch):
    snippets = blocks(page, "python")
    if page.name in ("torchtitan.md", "add-a-method.md"):
        pytest.skip("run by a test of its own")
    if not snippets:
        pytest.skip("no snippets")
    monkeypatch.chdir(tmp_path)  # they write to relative folders
    names: dict = {}
    for snippet in snippets:
        exec(compile(snippet, f"{page.name} snippet", "exec"), names)
    if page.name == "README.md":
        assert names["report"].parameters_added > 0
        for name, tensor in names["model"].state_dict().items():
            assert tensor.equal(names["same"].state_dict()[name]), name


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_named_in_the_text_exist(page):
    named = re.findall(r"\b(?:tests|docs|studies|benchmarks|tools|src)/[\w./-]+\.\w+", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_and_recipes_named_in_the_text_exist(page):
    text = page.read_text(encoding="utf-8")
    for command in re.findall(r"(?:^|`|^\| `)nlr ([a-z]+)", text, re.MULTILINE):
        assert command in COMMANDS, command
    for recipe in re.findall(r"\bllm-(?!adapters)[a-z]+\b", text):  # that is the name of a prompt
        assert recipe in RECIPES, recipe
    for target in re.findall(r"\bmake ([a-z-]+)\b`", text):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_pages_are_ascii(page):
    assert page.read_text(encoding="utf-8").isascii()


def test_every_command_is_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"| `nlr {name}" not in text] == []


def test_the_lock_pins_every_dependency_of_the_project():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        re.split(r"[<>=\[ ]", line)[0].lower()
        for line in [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    }
    wanted.discard(project["name"])  # extras may name other extras
    locks = ROOT.glob("requirements*.lock")
    pinned = {}
    for line in [line for lock in locks for line in lock.read_text().splitlines()]:
        if line and not line.startswith("#"):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line
            name, version = line.split("==")
            pinned[name.lower().replace("_", "-")] = version
    assert wanted <= set(pinned), wanted - set(pinned)
    assert pinned["torch"] == "2.13.0"
