"""Runs of a comparison side by side: on the GPUs or cores of this machine, or on a Ray cluster.

Scheduling, retries and processes are Ray's. A task is one run into its own folder, which all machines must see; the
comparison itself runs as it does alone, and finds the results there. A run whose worker dies is begun again by Ray
and resumes from its checkpoint; one that was not finished when the comparison was stopped does so when it resumes. A
joined cluster's workers run in the comparison's working folder, so that relative paths of data mean the same.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nlr_lab.runtime.environment import OutOfTimeError
from nlr_lab.runtime.processes import world_size
from nlr_lab.training.result import DivergedError
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer, one_line, require

from .record import begun
from .trial import Choice, TimeLimit, Trials

_RETRIES, _STARTS = 3, 3


def check_workers(workers: int) -> None:
    """Raise UserError for an invalid number of workers, without Ray, or in one of several training processes."""
    check_integer("workers", workers, minimum=1)
    if world_size() > 1:
        raise UserError("workers are for one process that starts runs side by side; omit torchrun or --workers")
    require("ray", "ray")


@contextlib.contextmanager
def open_workers(number: int, cores: int | None) -> Iterator[None]:
    """Have Ray while it is open, with so many workers of so many cores; in a cluster that RAY_ADDRESS names, or new."""
    import ray

    mine = not ray.is_initialized()
    # Ray counts what tasks ask for: as many runs as were asked for must fit, whatever the machine has.
    own = {"num_cpus": max(number * (cores or 1), os.cpu_count() or 1), "include_dashboard": False}
    shared: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else own
    for attempt in range(_STARTS if mine else 0):
        try:
            # Workers would send their lines, bars and all, to this screen; each run has its own files.
            ray.init(log_to_driver=False, configure_logging=False, **shared)
            break
        except Exception as error:  # Ray raises bare ones, and on a busy machine waits for half a minute only
            ray.shutdown()
            if attempt + 1 == _STARTS or "timed out" not in str(error):
                raise UserError(f"Ray cannot be started or joined: {one_line(error)}") from error
    try:
        yield
    finally:
        if mine:
            ray.shutdown()


def run_side_by_side(
    trials: Trials, runs: Sequence[tuple[Any, Choice, int, Path]], number: int, limit: TimeLimit, console: Console
) -> Iterator[tuple[Any, Choice, int]]:
    """Run each (arm, choice, seed) in its folder, so many at once, and yield those that end; divergence is a result.

    Raises:
        OutOfTimeError: the limit was reached; runs in progress were stopped, and continue when resumed.
        UserError: what a run raised, a run whose worker died again and again, or one that no machine of the
            cluster has the cores for.
    """
    import ray

    task = ray.remote(_train).options(**_resources(trials.recipe.train.threads, number), max_retries=_RETRIES)
    waiting, going = list(reversed(runs)), dict[Any, tuple[Any, Choice, int, Path]]()
    try:
        while waiting or going:
            while waiting and len(going) < number:
                arm, choice, seed, folder = waiting.pop()
                run = task.remote(trials, arm, choice, seed, folder.absolute(), Path.cwd())
                going[run] = arm, choice, seed, folder
                console.print(f"[bold]{arm.name}[/] {choice}, seed {seed} on a worker")
            timeout = None if limit.seconds is None else max(0, limit.left)
            ended, _ = ray.wait(list(going), num_returns=1, timeout=timeout)
            if not ended:
                raise OutOfTimeError(f"stopped {len(going)} runs for time; continue with --resume")
            arm, choice, seed, folder = going.pop(ended[0])
            try:
                problem = ray.get(ended[0])
            except ray.exceptions.RayError as error:
                raise UserError(f"the run in {folder} was lost {_RETRIES + 1} times: {one_line(error)}") from error
            if problem:
                raise UserError(problem)
            yield arm, choice, seed
    finally:
        for each in going:
            with contextlib.suppress(Exception):
                ray.cancel(each, force=True)


def _resources(threads: int | None, number: int) -> dict[str, float]:
    """Return what a run asks of the cluster, a share of a GPU where there are more runs than GPUs.

    Raises:
        UserError: no machine has that; the run would wait for ever.
    """
    import ray

    cores, gpus = threads or 1, ray.cluster_resources().get("GPU", 0)
    share = 1 / math.ceil(number / gpus) if gpus else 0
    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    if not any(machine.get("CPU", 0) >= cores and machine.get("GPU", 0) >= share for machine in machines):
        most = max((machine.get("CPU", 0) for machine in machines), default=0)
        raise UserError(
            f"a run asks for {cores} cores{' and a GPU' if gpus else ''}, and no machine of the cluster has them (at "
            f"most {most:g} cores); lower --train.threads"
        )
    return {"num_cpus": cores, "num_gpus": share}


def _train(trials: Trials, arm: Any, choice: Choice, seed: int, folder: Path, working: Path) -> str | None:
    """Run one trial in a worker; return what the user must fix, or None."""
    try:
        os.chdir(working)
    except OSError as error:
        return f"a worker does not see {working} ({error.strerror}); start it from a folder all machines see"
    try:
        with contextlib.suppress(DivergedError):  # its result says so
            trials.run(arm, choice, seed, folder, resume=begun(folder), stop=None)
    except UserError as error:
        return str(error)
    return None
