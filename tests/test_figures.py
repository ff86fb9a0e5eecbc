"""The figures of README and documentation are those of the studies, and studies/ stays small."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import figures  # noqa: E402
import front_picture  # noqa: E402

STUDIES = sorted(path.parent for path in (ROOT / "studies").glob("*/README.md"))


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_pages_state_what_the_studies_found(page):
    text = page.read_text(encoding="utf-8")
    assert figures.fill(text) == text, "run `make figures`"


def test_every_template_is_used_and_a_changed_figure_is_found():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert figures.fill(readme.replace("nats a token below", "points a token below")) == readme
    used = {name for page in figures.PAGES for _, name, *_ in figures.BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert used == set(figures.templates())


def test_grades_are_those_of_the_records(monkeypatch):
    record = {"against": {"low": {"one": {"grade": ["seeds"]}, "two": {"grade": ["seeds", "tuned"]}}}}
    monkeypatch.setattr(figures, "templates", lambda: {"x": "{grade s/against/low/one:} {grade s/against/low/*:}"})
    monkeypatch.setattr(figures, "look_up", lambda path: figures._inside(record, path.split("/")[1:]))
    assert figures.fill("<!-- figures: x -->\n<!-- end -->") == "<!-- figures: x -->\n1/7 1/7 to 2/7<!-- end -->"


def test_the_front_picture_is_drawn_from_what_its_study_keeps(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(front_picture, "ROOT", tmp_path)
    front_picture.main()
    drawn, kept = (np.asarray(Image.open(root / "docs" / "front.png"), float) for root in (tmp_path, ROOT))
    assert np.abs(drawn - kept).mean() < 1


def test_unknown_paths_raise():
    with pytest.raises(KeyError, match="noble-r9"):
        figures.look_up("llm_small/cpu-table/arms/noble-r9/final_loss")


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_studies_keep_their_page_results_and_two_pictures(study):
    page = (study / "README.md").read_text(encoding="utf-8")
    if "**State.**" in page:  # it is being run
        assert "no\nfinding here yet" in page
        assert not list(study.glob("*.webp"))
        return
    results = json.loads((study / "results.json").read_text(encoding="utf-8"))
    for name, part in results.items():
        if name not in ("joint", "command") and "arms" in part:  # a ladder's laws have arms, and its command may
            assert {"n", "seeds", "versions", "machine", "command"} <= part.keys()
            assert "settings" in part or "settings" in part["recipe"]
    assert not list(study.glob("*.png"))
    assert len(list(study.glob("*.webp"))) <= 2
    assert "a0e2d46" in page or study.name in ("branch", "compression", "ladder", "moe", "rank", "recipe", "smollm2")


def test_collecting_drops_curves_and_keeps_figures(tmp_path):
    record = {"n": 2, "arms": [{"name": "a", "final_loss": {"mean": 1 / 3}, "curve": [[1, 2.0]], "note": ""}]}
    record["against"] = {"a": {"cautions": {}, "seeds": {}}}
    (tmp_path / "part.json").write_text(json.dumps(record))
    picture = Image.effect_noise((9, 7), 50).convert("RGB")
    picture.save(tmp_path / "part-curves.png")
    figures.collect(tmp_path)
    assert Image.open(tmp_path / "part-curves.webp").tobytes() == picture.tobytes()
    assert not (tmp_path / "part-curves.png").exists()
    found = json.loads((tmp_path / "results.json").read_text())
    arms = [{"name": "a", "final_loss": {"mean": 0.333333333}}]
    assert found == {"part": {"n": 2, "arms": arms, "against": {"a": {"cautions": {}}}}}
    figures.collect(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == found


def test_a_rerun_part_replaces_its_own_results_alone(tmp_path):
    (tmp_path / "results.json").write_text('{"old": {"n": 1}, "new": {"n": 1}}')
    (tmp_path / "new.json").write_text('{"n": 3}')
    figures.collect(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == {"old": {"n": 1}, "new": {"n": 3}}
