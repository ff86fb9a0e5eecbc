"""A ladder's page and picture, of the record of studies/ladder."""

from copy import deepcopy
from pathlib import Path

from nlr_lab.runtime.storage import read_json
from nlr_lab.scale.record import build_record
from nlr_lab.scale.report import draw, tables

STUDY = Path(__file__).parents[3] / "studies" / "ladder" / "results.json"


def results():
    found = read_json(STUDY)
    last = [rung for rung in found["rungs"] if rung["tokens"] == 20][:2]
    return build_record(last, {}, {}, "")


def test_speed_in_flops_has_the_interval_of_the_steps():
    found = results()
    plain, noble = (found["rungs"][0]["arms"][name] for name in ("plain", "noble"))
    share = plain["flops_per_token"] / noble["flops_per_token"]
    value, low, high = (share * noble["against"]["matched_speedup"][key] for key in ("value", "low", "high"))
    assert share < 1
    assert f" / {value:.3f}x [{low:.3f}, {high:.3f}] / " in "\n".join(tables(found))
    noble["flops_per_token"] = None
    assert " / - / " in "\n".join(tables(found))


def test_laws_of_arms_with_fewer_rungs_are_told_apart():
    found = read_json(STUDY)["rungs"]
    own = [rung for rung in found if rung["tokens"] == 20]
    said = "Two rungs do not tell E, which is 0 in their rows."

    def page(rungs):
        return "\n".join(tables(build_record(rungs, {}, {}, "")))

    assert said not in page(own[:3])
    assert said in page(own[:2])
    mixed = page([*own[:2], {**own[2], "arms": {name: own[2]["arms"][name] for name in ("plain", "noble")}}])
    assert said in mixed
    assert "the law of `plain`, over the rungs that both have, has the arm's loss" in mixed


def test_the_picture_shows_differences_and_speeds_with_their_intervals(tmp_path):
    pictures, found = [], results()
    for shown in (None, "delta", "matched_speedup", "matched_wall_clock_speedup"):
        changed = deepcopy(found)
        if shown:
            estimate = changed["rungs"][0]["arms"]["noble"]["against"][shown]
            estimate["low"] -= 0.1 * (estimate["value"] - estimate["low"])
            changed["rungs"][1]["arms"]["noble"]["against"][shown]["value"] = None  # as of a run that diverged
        draw(tmp_path / "ladder.png", changed)
        pictures.append((tmp_path / "ladder.png").read_bytes())
    assert len({*pictures}) == 4
