"""Runs of a comparison side by side: on the GPUs or cores of this machine, or on a Ray cluster.

Scheduling, retries and processes are Ray's. A task is one run into its own folder, which all machines must
see; the comparison itself goes on as it does alone, and finds the results there. Each run has its own seed and its own
processes' number of threads, so results are those of a serial comparison. A run whose worker dies is begun again by
Ray and resumes from its checkpoint; one that was not finished when the comparison was stopped does so when it resumes.
A joined cluster's workers run in the comparison's working folder, so that relative paths of data mean the same.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nlr_lab.runtime.processes import world_size
from nlr_lab.runtime.time_limit import OutOfTimeError, TimeLimit
from nonlinear_lowrank.errors import DivergedError, UserError
from nonlinear_lowrank.validation import check_integer, one_line, require

from .trial import Choice, Trials

_RETRIES, _STARTS = 3, 3


def check_workers(workers: int | None) -> None:
    """Raise UserError for no number of workers, without Ray, or in one of several training processes."""
    if workers is None:
        return
    check_integer("workers", workers, minimum=1)
    if world_size() > 1:
        raise UserError("workers are for one process that starts runs side by side; omit torchrun or --workers")
    require("ray", "ray")


class Workers:
    """Workers for a number of runs at once, made by `open_workers`."""

    def __init__(self, number: int, console: Console) -> None:
        self._number, self._console = number, console

    def train(self, trials: Trials, runs: Sequence[tuple[Any, Choice, int, Path]], limit: TimeLimit) -> None:
        """Run each (arm, choice, seed) in its folder, several at once; divergence is a result.

        Raises:
            OutOfTimeError: the limit was reached; what was running was stopped, and goes on when it is resumed.
            UserError: what a run raised, a run whose worker died again and again, or one that no machine of the
                cluster has the cores for.
        """
        import ray

        asked = _resources(trials.recipe.train.threads)
        task = ray.remote(_train).options(**asked, max_retries=_RETRIES)
        waiting = list(reversed(runs))
        going: dict[Any, Path] = {}
        with contextlib.ExitStack() as at_error:
            at_error.callback(_cancel, going)
            while waiting or going:
                while waiting and len(going) < self._number:
                    arm, choice, seed, folder = waiting.pop()
                    going[task.remote(trials, arm, choice, seed, str(folder.absolute()), str(Path.cwd()))] = folder
                    self._console.print(f"[bold]{arm.name}[/] {choice}, seed {seed} on a worker")
                ended, _ = ray.wait(
                    list(going), num_returns=1, timeout=None if limit.seconds is None else max(0, limit.left)
                )
                if not ended:
                    raise OutOfTimeError(f"stopped {len(going)} runs for time; go on with --resume")
                folder = going.pop(ended[0])
                try:
                    problem = ray.get(ended[0])
                except ray.exceptions.RayError as error:
                    last = one_line(error)
                    raise UserError(f"the run in {folder} was lost {_RETRIES + 1} times: {last}") from error
                if problem:
                    raise UserError(problem)


def _cancel(going: dict[Any, Path]) -> None:
    import ray

    for task in going:
        with contextlib.suppress(Exception):
            ray.cancel(task, force=True)


@contextlib.contextmanager
def open_workers(number: int | None, cores: int | None, console: Console) -> Iterator[Workers | None]:
    """Workers while it is open; None for None. A cluster is joined where RAY_ADDRESS names one, else one is started.

    Args:
        number: of runs side by side.
        cores: threads of a run; None: one.
        console: for a line a run.
    """
    if number is None:
        yield None
        return
    import ray

    mine = not ray.is_initialized()
    if mine:
        # Ray counts what tasks ask for: as many runs as were asked for must fit, whatever the machine has.
        own = {"num_cpus": max(number * (cores or 1), os.cpu_count() or 1), "include_dashboard": False}
        _start({} if os.environ.get("RAY_ADDRESS") else own)
    try:
        yield Workers(number, console)
    finally:
        if mine:
            ray.shutdown()


def _start(cluster: dict[str, Any]) -> None:
    """Join or start a cluster; on a busy machine Ray, which waits for half a minute, needs another attempt."""
    import ray

    for attempt in range(_STARTS):
        try:
            # Workers would send their lines, bars and all, to this screen; each run has its own files.
            ray.init(log_to_driver=False, configure_logging=False, **cluster)
            return
        except Exception as error:  # Ray raises bare ones
            ray.shutdown()
            if attempt + 1 == _STARTS or "timed out" not in str(error):
                raise UserError(f"Ray cannot be started or joined: {one_line(error)}") from error


def _resources(threads: int | None) -> dict[str, float]:
    """Return what a run asks of the cluster; raise UserError where no machine has that: it would wait for ever."""
    import ray

    cores = threads or 1
    gpus = {"num_gpus": 1} if ray.cluster_resources().get("GPU", 0) >= 1 else {}
    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    if not any(
        machine.get("CPU", 0) >= cores and machine.get("GPU", 0) >= gpus.get("num_gpus", 0) for machine in machines
    ):
        most = max((machine.get("CPU", 0) for machine in machines), default=0)
        raise UserError(
            f"a run asks for {cores} cores{' and a GPU' if gpus else ''}, and no machine of the cluster has them (at "
            f"most {most:g} cores); lower --train.threads"
        )
    return {"num_cpus": cores, **gpus}


def _train(trials: Trials, arm: Any, choice: Choice, seed: int, folder: str, working: str) -> str | None:
    """One run, in a worker; what the user has to fix, if it could not be."""
    from .runs import begun

    try:
        os.chdir(working)
    except OSError as error:
        return (
            f"a worker does not see {working} ({error.strerror}); start the comparison from a folder all machines see"
        )
    try:
        trials.run(arm, choice, seed, Path(folder), resume=begun(Path(folder)), stop=None)
    except DivergedError:
        return None  # its result says so
    except UserError as error:
        return str(error)
    return None
