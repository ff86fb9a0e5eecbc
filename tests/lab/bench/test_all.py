"""`nlr bench all` at toy sizes: every row beside its least, and the page that states them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from nlr_lab.bench.all import PARTS, bench_all
from nlr_lab.bench.settings import RIVALS, AllBenchConfig, Parts
from nonlinear_lowrank.errors import UserError

TINY = AllBenchConfig(tiny=True, rounds=2, warmup=1, clock="wall")
EAGER = ("step-256", "step-128", "call-64", "call-256", "decode-512", "adapters-512", "rational")


def test_parts_are_those_of_the_settings():
    assert tuple(PARTS) == get_args(Parts) == TINY.parts
    with pytest.raises(UserError, match="rounds must be"):
        AllBenchConfig(rounds=0)


def test_the_page_states_every_part():
    root = Path(__file__).parents[3]
    committed = json.loads((root / "benchmarks" / "results" / "performance.json").read_text(encoding="utf-8"))
    assert {name.split("/")[0] for name in committed["rows"]} == set(PARTS)
    templates = (root / "tools" / "figures.md").read_text(encoding="utf-8")
    for name in committed["rows"]:
        ours = not name.rpartition("/")[2].startswith((*RIVALS, "plain", "official", "KAT"))
        assert not ours or f"performance/rows/{name}/time" in templates or name.startswith("call"), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("parts", [EAGER, pytest.param(("step-512",), marks=pytest.mark.slow)], ids=["eager", "512"])
def test_rows_stand_beside_their_least(parts, tmp_path):
    lines = []
    summary = bench_all(replace(TINY, parts=parts), progress=lines.append)
    assert {name.split("/")[0] for name in summary.rows} == set(parts)
    for name, row in summary.rows.items():
        assert row["time"]["n"] == 2
        assert row["over_least"] == pytest.approx(row["time"]["median"] / row["least"], rel=1e-4)
        part, panel, arm = name.split("/")
        ours = not arm.startswith(
            ("noble-formula", "noble-official", "noble-visible", "plain", "official", "dora", "KAT")
        )
        assert bool(row["against"]) == ours
        if part.startswith("step"):
            assert set(row["against"]) <= {f"{rival}-r4" for rival in RIVALS}
            assert row["least"] > 1
        if part.startswith("call"):
            official = summary.rows[f"{part}/{panel}/official-layer-r4"]
            assert row["least"] == official["time"]["median"]
        if part == "rational":
            assert row["least"] == 1
    assert json.loads(summary.to_json())["rows"] == summary.rows
    assert summary.machine["versions"]["torch"]
    assert all(name in str(summary) for name in summary.rows)
    summary.draw(tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes()[:4] == b"\x89PNG"
    assert lines
