"""Runs of a comparison side by side: on the GPUs or cores of this machine, or on a Ray cluster.

Scheduling, retries and processes are Ray's. A task is one training run into its own folder, which all machines must
see; the comparison itself goes on as it does alone, and finds the results there. Each run has its own seed and its own
processes' number of threads, so results are those of a serial comparison. A run whose worker dies is begun again by
Ray and goes on from its checkpoint; one that was not finished when the comparison was stopped does so when it resumes.
A joined cluster's workers run in the comparison's working folder, so that relative paths of data mean the same.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nlr_lab.runtime.time_limit import OutOfTimeError, TimeLimit
from nlr_lab.training.checkpoints import DivergedError
from nlr_lab.training.recipe import Recipe
from nonlinear_lowrank.errors import UserError

from .folder import begun

_RETRIES, _STARTS = 3, 3
_DEFAULT_CORES = 1


def check_workers(workers: int | None) -> None:
    """Refuses what cannot be before anything is written.

    Raises:
        UserError: no number of workers, ray is not installed, or this is one of several training processes.
    """
    if workers is None:
        return
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UserError(f"workers must be a positive integer, got {workers!r}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("workers are for one process that starts runs side by side; leave torchrun or --workers out")
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise UserError("--workers needs Ray: pip install 'nonlinear-lowrank[ray]'") from error


class Workers:
    """At most so many runs at once. Made by `open_workers`."""

    def __init__(self, number: int, run: Any, console: Console) -> None:
        self._number, self._run, self._console = number, run, console

    def train(self, runs: Sequence[tuple[Recipe, Path]], limit: TimeLimit) -> None:
        """Trains each recipe into its folder, several at once; divergence is a result.

        Raises:
            OutOfTimeError: the limit was reached; what was running was stopped, and goes on when it is resumed.
            UserError: what a run raised, a run whose worker died again and again, or one that no machine of the
                cluster has the cores for.
        """
        import ray

        for recipe, _ in runs:
            _check_resources(_resources(recipe))
        waiting = list(reversed(runs))
        going: dict[Any, Path] = {}
        while waiting or going:
            while waiting and len(going) < self._number:
                recipe, folder = waiting.pop()
                task = ray.remote(_train).options(**_resources(recipe), max_retries=_RETRIES)
                going[task.remote(self._run, recipe, str(folder.absolute()), str(Path.cwd()))] = folder
                name = f"{recipe.arm.name} rate {recipe.train.lr:g}, seed {recipe.train.seed}"
                self._console.print(f"[bold]{name}[/] on a worker")
            ended, _ = ray.wait(
                list(going), num_returns=1, timeout=None if limit.seconds is None else max(0, limit.left)
            )
            if not ended:
                self._cancel(going)
                raise OutOfTimeError(f"stopped {len(going)} runs for time; go on with --resume")
            done = ended[0]
            folder = going.pop(done)
            try:
                if problem := ray.get(done):
                    raise UserError(problem)
            except ray.exceptions.RayError as error:
                self._cancel(going)
                last = " ".join(str(error).split())[-300:]
                raise UserError(f"the run in {folder} was lost {_RETRIES + 1} times: {last}") from error
            except UserError:
                self._cancel(going)
                raise

    def _cancel(self, going: dict[Any, Path]) -> None:
        import ray

        for task in going:
            with contextlib.suppress(Exception):
                ray.cancel(task, force=True)


@contextlib.contextmanager
def open_workers(number: int | None, cores: int | None, run: Any, console: Console) -> Iterator[Workers | None]:
    """Workers while it is open; None for None. A cluster is joined where RAY_ADDRESS names one, else one is started.

    Args:
        number: of runs side by side.
        cores: threads of a run; None: one.
        run: trains one arm; has `run_training`'s signature.
        console: for a line a run.
    """
    if number is None:
        yield None
        return
    import ray

    mine = not ray.is_initialized()
    if mine:
        _start({} if os.environ.get("RAY_ADDRESS") else {"num_cpus": _cores(number, cores), "include_dashboard": False})
    try:
        yield Workers(number, run, console)
    finally:
        if mine:
            ray.shutdown()


def _start(cluster: dict[str, Any]) -> None:
    """Joins or starts a cluster; on a busy machine Ray, which waits for half a minute, needs another attempt."""
    import ray

    for attempt in range(_STARTS):
        try:
            # Workers would send their lines, bars and all, to this screen; each run has its own files.
            ray.init(log_to_driver=False, configure_logging=False, **cluster)
            return
        except Exception as error:  # Ray raises bare ones
            ray.shutdown()
            if attempt + 1 == _STARTS or "timed out" not in str(error):
                raise UserError(f"Ray cannot be started or joined: {' '.join(str(error).split())[:300]}") from error


def _cores(number: int, cores: int | None) -> int:
    """Ray counts what tasks ask for: as many runs as were asked for must fit, whatever the machine has."""
    return max(number * (cores or _DEFAULT_CORES), os.cpu_count() or 1)


def _resources(recipe: Recipe) -> dict[str, float]:
    """What a run asks of the cluster; this machine, which may have no part in it, says nothing."""
    import ray

    gpus = {"num_gpus": 1} if ray.cluster_resources().get("GPU", 0) >= 1 else {}
    return {"num_cpus": recipe.train.threads or _DEFAULT_CORES, **gpus}


def _check_resources(asked: dict[str, float]) -> None:
    """A run that fits on no machine would wait for ever."""
    import ray

    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    if not any(
        machine.get("CPU", 0) >= asked["num_cpus"] and machine.get("GPU", 0) >= asked.get("num_gpus", 0)
        for machine in machines
    ):
        most = max((machine.get("CPU", 0) for machine in machines), default=0)
        with_gpu = " and a GPU" if "num_gpus" in asked else ""
        raise UserError(
            f"a run asks for {asked['num_cpus']:g} cores{with_gpu}, and no machine of the cluster has them (at most "
            f"{most:g} cores); lower --train.threads"
        )


def _train(run: Any, recipe: Recipe, folder: str, working: str) -> str | None:
    """One run, in a worker; what the user has to mend, if it could not be."""
    path = Path(folder)
    try:
        os.chdir(working)
    except OSError as error:
        return (
            f"a worker does not see {working} ({error.strerror}); start the comparison from a folder all machines see"
        )
    try:
        run(recipe, path, resume=begun(path), overwrite=False, prepared=None, quiet=True, report=False)
    except DivergedError:
        return None  # its result says so
    except UserError as error:
        return str(error)
    return None
