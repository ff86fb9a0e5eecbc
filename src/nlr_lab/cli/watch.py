"""`nlr watch DIR`: curves, state and time left of runs, while they run."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import FlagCreatePairsOff, Positional

from nonlinear_lowrank.errors import UserError

from .options import parse


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Show runs while they run, or after: a table here, and curves on a page of this machine, whose address is printed.

    It only reads files. From another machine: --port 8123, and there ssh -L 8123:localhost:8123 HOST.
    """

    folder: Positional[str]
    """A folder that train, finetune, fit, compare, scale or reproduce writes to (its --out), or one above several."""
    port: int = 0
    """Port of the page, at 127.0.0.1; 0: a free one."""
    once: FlagCreatePairsOff[bool] = False
    """Print the table once, and no page."""


def run_watch(arguments: list[str]) -> None:
    """Watch until Ctrl-C."""
    options = parse(WatchOptions, arguments, command="watch")
    if not 0 <= options.port < 2**16:
        raise UserError(f"--port must be from 0 to 65535, got {options.port}")

    from nlr_lab.watch.runs import Watched
    from nlr_lab.watch.view import print_once, watch

    watched = Watched(Path(options.folder))
    if options.once:
        print_once(watched)
    else:
        watch(watched, options.port)
