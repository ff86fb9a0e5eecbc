"""`nlr watch`: what files say of runs, the table, and the page in a browser."""

import json
import math
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest

from cli_helpers import refused, succeed
from nlr_lab.runtime.log import LOG
from nlr_lab.watch.runs import Watched
from nlr_lab.watch.view import served
from refusals import assert_refused

NOW = 1000.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def write_run(folder, *, begun=800.0, steps=100, done=60, tokens=1024, result=None, kind="recipe.json"):
    """Write the files of a run that takes a step in two seconds and has taken `done`; a curve falls by 1 a step."""
    folder.mkdir(parents=True)
    (folder / kind).write_text("{}")
    entries = [{"time": begun, "step": 0, "of": steps, "tokens": tokens}]
    for step in range(10, done + 1, 10):
        entries += [{"time": begun + 2 * step, "step": step, "loss": 100.0 - step, "learning_rate": 1e-3}]
        entries += [{"time": begun + 2 * step, "step": step, "eval_loss": 110.0 - step, "eval_bits_per_byte": 1.0}]
    (folder / LOG).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def comparison(folder, *, left=3, to_go=500.0):
    """Write a comparison whose baseline was tuned, is done on one seed, and whose other arm runs."""
    folder.mkdir(parents=True)
    (folder / "compare.json").write_text("{}")
    (folder / LOG).write_text(json.dumps({"time": 900.0, "left": left, "to_go": to_go, "tuning_seed": 0}) + "\n")
    over = {"status": "done", "steps": 100}
    write_run(folder / "runs/baseline/lr-0.001/seed-0", done=100, begun=100.0, result=over)
    write_run(folder / "runs/baseline/lr-0.001/seed-1", done=100, begun=400.0, result=over)
    write_run(folder / "runs/noble-r4/lr-0.001/seed-1", begun=870.0)
    return folder


def look(folder, now=NOW):
    return Watched(folder, clock=lambda: now).look()


def test_a_run_that_runs(tmp_path):
    (run,) = look(write_run(tmp_path / "run", begun=878.0)).runs
    assert (run.arm, run.state, run.step, run.steps, run.silent) == ("run", "running", 60, 100, 2.0)
    assert (run.steps_per_second, run.tokens_per_second) == (0.5, 512.0)
    assert run.seconds_to_go == 40 / 0.5 - 2.0
    assert run.curves["evaluation loss"] == [(step, 110.0 - step) for step in range(10, 70, 10)]
    assert run.curves.keys() == {"training loss", "learning rate", "evaluation loss", "bits per byte"}
    view = look(tmp_path / "run")
    assert str(view) == "run: 0 of 1 runs over, 1 running; about 78 s left"


def test_steps_that_were_taken_again_count_once(tmp_path):
    folder = write_run(tmp_path / "run", begun=500.0)
    with (folder / LOG).open("a") as file:
        file.write('{"time": 700, "step": 70, "lo')  # cut off by a kill
        file.write('\n{"time": 900, "step": 30, "of": 100}\n{"time": 990, "step": 40, "loss": 7}\n')
    (run,) = look(folder).runs
    assert run.curves["training loss"] == [(10, 90.0), (20, 80.0), (30, 70.0), (40, 7)]
    assert run.steps_per_second == pytest.approx(10 / 90), "the pause counts for nothing"


def test_a_run_that_says_nothing_any_more_is_silent(tmp_path):
    folder = write_run(tmp_path / "run", begun=0.0)
    assert look(folder, now=120 + 99).runs[0].state == "running"
    (run,) = look(folder, now=120 + 101).runs  # five times the 20 s between entries
    assert (run.state, run.silent, run.seconds_to_go) == ("silent", 101.0, None)


def test_a_run_without_an_entry_starts_until_it_is_silent(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / LOG).unlink()
    os.utime(folder / "recipe.json", (NOW - 30, NOW - 30))
    assert look(folder).runs[0].state == "starting"
    assert look(folder, now=NOW + 60).runs[0].state == "silent"


@pytest.mark.parametrize(
    ("kind", "result", "state", "curves"),
    [
        ("recipe.json", {"status": "done", "steps": 9, "curve": [[9, 1.0]]}, "done", {"evaluation loss": [(9, 1.0)]}),
        ("recipe.json", {"status": "diverged", "steps": 9}, "diverged", {}),
        ("fit.json", {"steps": 9, "curve": [{"step": 9, "loss": 1.0, "psnr": 3.0}]}, "done", {"psnr": [(9, 3.0)]}),
        ("fit.json", {"diverged": 9}, "diverged", {}),
    ],
)
def test_runs_whose_logs_did_not_come_along(tmp_path, kind, result, state, curves):
    folder = write_run(tmp_path / "run", kind=kind, result=result)
    (folder / LOG).unlink()
    (run,) = look(folder).runs
    assert (run.state, run.step) == (state, 9)
    assert curves.items() <= run.curves.items()


def test_a_comparison_counts_what_is_planned(tmp_path):
    view = look(comparison(tmp_path / "out"))
    assert [(run.arm, run.details, run.tuning, run.state) for run in view.runs] == [
        ("baseline", "lr-0.001 seed-0", True, "done"),
        ("baseline", "lr-0.001 seed-1", False, "done"),
        ("noble-r4", "lr-0.001 seed-1", False, "running"),
    ]
    assert (view.planned, view.seconds_to_go) == (5, 400.0), "500 s when it was written, 100 s ago"
    assert str(view) == "out: 2 of 5 runs over, 1 running; about 7 min left"
    above = look(tmp_path)
    assert {run.group for run in above.runs} == {"out"}
    assert json.loads(above.to_json())["line"] == str(above)


def test_folders_named_runs_above_a_run_are_no_comparison(tmp_path):
    comparison(tmp_path / "runs" / "out")
    view = look(tmp_path)
    assert {(run.group, run.arm) for run in view.runs} == {("runs/out", "baseline"), ("runs/out", "noble-r4")}
    write_run(tmp_path / "one" / "runs")
    (run,) = look(tmp_path / "one").runs
    assert (run.group, run.arm) == ("", "runs")


def test_what_is_over_has_nothing_to_go(tmp_path):
    folder = comparison(tmp_path / "out", left=0, to_go=0.0)
    (folder / "runs/noble-r4/lr-0.001/seed-1/result.json").write_text('{"status": "done", "steps": 100}')
    view = look(folder)
    assert (view.planned, view.seconds_to_go, str(view)) == (3, None, "out: 3 of 3 runs over")


def test_curves_are_thinned_to_their_end_and_hold_no_nan(tmp_path):
    folder = write_run(tmp_path / "run", done=0)
    lines = [
        {"time": 900 + step / 100, "step": step, "loss": math.nan if step == 5 else 1.0} for step in range(1, 1002)
    ]
    (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = json.loads(look(folder).to_json())["runs"][0]["curves"]["training loss"]
    assert (len(curve) <= 400, curve[-1]) == (True, [1001, 1.0])
    assert [5, None] in curve


def test_a_folder_is_read_anew_where_it_changed(tmp_path):
    folder, now = write_run(tmp_path / "run", begun=870.0), [NOW]
    watched = Watched(folder, clock=lambda: now[0])
    assert watched.look().runs[0].step == 60
    with (folder / LOG).open("a") as file:
        file.write('{"time": 1010, "step": 70, "loss": 1}\n')
    now[0] = 1011.0
    assert watched.look().runs[0].step == 70


def test_what_cannot_be_watched_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert_refused("holds no run; name what nlr train", Watched, tmp_path / "empty")
    assert "no such folder" in refused(capsys, "watch", tmp_path / "none")
    assert "is a file; name a folder" in refused(capsys, "watch", tmp_path / "file")
    assert "--port must be from 0 to 65535" in refused(capsys, "watch", tmp_path / "empty", "--port", "70000")


def test_once_prints_the_table(tmp_path, capsys):
    out = succeed(capsys, "watch", comparison(tmp_path / "out"), "--once")
    assert out.startswith("out: 2 of 5 runs over")
    assert re.search(r"^baseline lr-0.001 seed-1 +done +100/100 +10\.0000", out, re.MULTILINE)


def test_the_page_is_for_this_machine(tmp_path):
    watched = Watched(comparison(tmp_path / "out"), clock=lambda: NOW)
    with served(watched) as address:
        with urllib.request.urlopen(address + "runs.json") as answer:
            assert json.load(answer) == json.loads(watched.look().to_json())
        foreign = urllib.request.Request(address, headers={"Host": "example.org:80"})
        for wrong in (foreign, address + "page.html", address + "../result.json"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(wrong)
        taken = int(address.rstrip("/").rpartition(":")[2])
        with pytest.raises(Exception, match=f"--port {taken} cannot be used"), served(watched, taken):
            pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [500, 1280])
def test_a_browser_draws_the_curves(tmp_path, width):
    watched = Watched(comparison(tmp_path / "out"), clock=lambda: NOW)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--virtual-time-budget=3000", f"--window-size={width},900", "--dump-dom"]
    with served(watched) as address:
        done = subprocess.run(
            [str(CHROMIUM), *options, address], capture_output=True, text=True, check=True, timeout=120
        )
    page = done.stdout
    assert "2 of 5 runs over, 1 running; about 7 min left" in page
    assert re.findall(r'<td class="(\w+)">', page)[::2] == ["done", "done", "running"]
    assert re.findall(r'<path class="(curve[ \w]*)"', page) == ["curve tuning", "curve", "curve"]
    curves = re.findall(r' d="M([^"]*)"', page)
    assert [len(curve.split("L")) for curve in curves] == [10, 10, 6]
    across = [float(each.split()[0]) for each in curves[1].split("L")]
    assert across == sorted(across)
    assert across[-1] <= width
    assert 'aria-valuenow="52"' in page, "2.6 of 5 runs"
