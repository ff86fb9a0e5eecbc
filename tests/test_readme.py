"""The documents do what they say: snippets run, commands parse, files and links exist, figures agree."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest

from nlr_lab.cli import COMMANDS
from nlr_lab.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.name for page in PAGES]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


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
def test_what_pages_name_exists_and_they_are_ascii(page):
    text = page.read_text(encoding="utf-8")
    assert text.isascii()
    links = [page.parent / link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    files = re.findall(r"\b(?:tests|docs|studies|benchmarks|tools|src)/[\w./-]+\.\w+", text)
    assert [path for path in (*links, *map(ROOT.joinpath, files)) if not path.exists()] == []
    commands = re.findall(r"(?:^|`|^\| `)nlr ([a-z]+)", text, re.MULTILINE)
    recipes = re.findall(r"\bllm-(?!adapters)[a-z]+(?:-[a-z]+)*\b", text)  # that is the name of a prompt
    assert {*commands} <= {*COMMANDS}
    assert {*recipes} <= {*RECIPES}
    for target in re.findall(r"\bmake ([a-z-]+)\b`", text):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_readme_and_documentation_stay_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert sum(any(map(str.isalnum, word)) for word in pages.split()) <= 15_000


def test_every_command_is_in_the_documentation():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"| `nlr {name}" not in text] == []


def test_the_lock_pins_every_dependency_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *itertools.chain(*extras.values())]
    wanted = {re.split(r"[<>=\[ ]", line)[0].lower() for line in lines}
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


def test_troubleshooting_quotes_what_the_code_says():
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a message may go over lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quotes = [quote for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for quote in re.findall(r"`(.+?)`", row)]
    parts = [part.strip() for quote in quotes for part in quote.split("...") if len(part.strip()) > 12]
    elsewhere = {"KeyError: 'NLR_SINE_LORA'", "contains custom code which must be executed"}  # transformers' and peft's
    assert len(parts) > 25
    assert [part for part in parts if part not in code and part not in elsewhere] == []


@pytest.mark.slow
def test_the_first_commands_run(tmp_path, monkeypatch):
    from nlr_lab.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NLR_CACHE", str(tmp_path / "cache"))
    commands = [line for block in blocks(ROOT / "docs" / "start.md", "sh") for line in block.splitlines()]
    assert len(commands) == 3
    for command in commands:
        assert main(command.split()[1:]) == 0, command
    assert {"report.md", "curves.png", "results.json"} <= {path.name for path in (tmp_path / "first").iterdir()}
