"""CPU threads of runs: the cores that other processes leave free."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from compare_helpers import BASE, NOBLE, STEPS, FakeTraining, StubTask, compare_stub, gain
from nlr_lab.runtime import processes as cores_module
from nlr_lab.runtime.environment import cpu_threads
from nlr_lab.training import Recipe, TrainConfig


@pytest.fixture
def cores(monkeypatch):
    """Four cores of which others take what the test says, read at each look."""
    load = SimpleNamespace(now=0.0, seconds=0.0, clock=0.0, own=0.0, quota=float("inf"), looks=0)

    def times(percpu):
        load.looks += 1
        idle = {"idle": 9.0 * load.looks, "iowait": 1, "guest": load.seconds / 4}
        return [SimpleNamespace(_asdict=lambda: {"user": load.seconds / 8, "nice": load.seconds / 8, **idle})] * 6

    def sleep(seconds):
        load.seconds += load.now * seconds
        load.clock += seconds

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: load.clock, process_time=lambda: load.own)
    monkeypatch.setattr(cores_module, "_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(cores_module, "_quota", lambda: load.quota)
    monkeypatch.setattr(cores_module.psutil, "cpu_times", times)
    monkeypatch.setattr(cores_module, "time", clock)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with cpu_threads(4):
        yield load


@pytest.mark.parametrize(
    ("load", "quota", "threads"), [(0.0, 8, 4), (0.2, 8, 4), (1.0, 8, 3), (4.0, 8, 1), (0.0, 2, 2), (0.0, 0.5, 1)]
)
def test_threads_are_the_cores_that_others_leave(cores, load, quota, threads):
    cores.now, cores.quota = load, quota
    chosen = cores_module.FreeThreads(None)
    with chosen.chosen():
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 4
    assert len(chosen.notes) == (threads < 4)


@pytest.mark.parametrize(("wanted", "environment"), [(2, ""), (None, "4")])
def test_threads_that_a_user_set_are_kept(cores, monkeypatch, wanted, environment):
    cores.now = 4.0
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    with cores_module.FreeThreads(wanted).chosen():
        assert torch.get_num_threads() == 4
    assert cores.looks == 0


def test_threads_are_chosen_anew_for_each_run(cores, tmp_path):
    taken, train = [], FakeTraining(gain)

    def run(*args, **options):
        taken.append(torch.get_num_threads())
        train(*args, **options)
        cores.now += 1.0

    config = TrainConfig(steps=STEPS, batch_size=8, lr=1e-3, tracker="none")
    recipe = Recipe(name="stub", task=StubTask(), train=config)
    found = compare_stub(recipe, tmp_path / "out", train=run, arms=(BASE, NOBLE), seeds=2).results
    assert taken == [4, 3, 2, 1]
    assert "steps were taken by 1 of 4 threads at times" in " ".join(found["notes"])
    assert found["machine"]["threads"] == 4


def test_threads_give_way_in_a_run_and_come_back_with_the_next(cores):
    chosen = cores_module.FreeThreads(None)

    def goes_on(seconds, others):
        own = torch.get_num_threads()
        cores.clock += seconds
        cores.own += own * seconds
        cores.seconds += (own + others) * seconds
        chosen.give_way()
        return torch.get_num_threads()

    with chosen.chosen():
        assert goes_on(3, 4.0) == 4, "too short to tell"
        assert goes_on(3, 0.4) == 4 - 2
        assert goes_on(6, 0.0) == 2, "a run does not take them back"
        assert goes_on(6, 3.0) == 1
    with chosen.chosen():
        assert torch.get_num_threads() == 4


def command_in(folder, busy, **own):
    """Settings of the command before torch is imported, on two cores of which so many are busy."""
    code = f"""
import os, sys
from nlr_lab.runtime import processes as cores
cores._cores, cores._busy = lambda: {{0, 1}}, lambda: {busy} * cores.time.monotonic()
from nlr_lab.cli.main import main
from nlr_lab.cli import compare
compare.parse_recipe = lambda *_, **__: print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)
main(['compare', 'llm-demo'])
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | own
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True)
    return done.stdout.strip()


def test_command_lets_waiting_threads_sleep_where_others_compute(tmp_path):
    assert command_in(tmp_path, busy=2.0) == "PASSIVE False"
    assert command_in(tmp_path, busy=0.0) == "None False"
    assert command_in(tmp_path, busy=2.0, OMP_WAIT_POLICY="ACTIVE") == "ACTIVE False"
