"""A watched folder in the terminal, as a table that is refreshed, and in a browser, as a page of this machine alone."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nlr_lab.runtime.tables import duration, number_table
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import printable

from .runs import RunView, View, Watched

_SECONDS = 2.0  # between two looks
_ROWS = 20  # of a table that is refreshed
_HERE = ("127.0.0.1", "localhost")
_RUNS, _PAGE = "/runs.json", "/"
_SAFE = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:",
    "X-Content-Type-Options": "nosniff",
}


def table_of(view: View, most: int | None = None) -> Table:
    """Return a row for each run; with `most`, only for so many that are running or have ended last."""
    table = number_table("run", "state", "step", "speed", "loss", "time left")
    for run in view.runs if most is None else _shown(view.runs, most):
        name = printable(" ".join(filter(None, [run.group, run.arm, run.details])))
        state = f"silent for {duration(run.silent)}" if run.state == "silent" else run.state
        of = f"/{run.steps}" if run.steps else ""
        to_go = "" if run.seconds_to_go is None else duration(run.seconds_to_go)
        table.add_row(Text(name), state, f"{run.step}{of}", _speed(run), _loss(run), to_go)
    return table


def _shown(runs: list[RunView], most: int) -> list[RunView]:
    going = [run for run in runs if run.state not in ("done", "diverged")]
    over = [run for run in runs if run not in going]
    kept = [*going, *over[::-1]][:most]
    return [run for run in runs if any(run is each for each in kept)]


def _speed(run: RunView) -> str:
    if run.tokens_per_second is not None:
        return f"{run.tokens_per_second:,.0f} tokens/s"
    return "" if run.steps_per_second is None else f"{run.steps_per_second:.3g} steps/s"


def _loss(run: RunView) -> str:
    for name in ("evaluation loss", "training loss"):
        if curve := run.curves.get(name):
            return "not finite" if curve[-1][1] is None else f"{curve[-1][1]:.4f}"
    return ""


class _Handler(BaseHTTPRequestHandler):
    """Answer the page and its numbers, to this machine's own browsers."""

    def __init__(self, watched: Watched, lock: threading.Lock, *args: Any) -> None:
        self.watched, self.lock = watched, lock
        super().__init__(*args)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        # A page of somewhere else that has its own name point here would have that name as host.
        if self.headers.get("Host", "").rpartition(":")[0] not in _HERE or path not in (_RUNS, _PAGE):
            self.send_error(404)
            return
        if path == _PAGE:
            kind, text = "text/html", files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        else:
            with self.lock:
                kind, text = "application/json", self.watched.look().to_json()
        content = text.encode()
        self.send_response(200)
        for name, value in {**_SAFE, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing on the terminal, which shows the table."""


@contextlib.contextmanager
def served(watched: Watched, port: int = 0) -> Iterator[str]:
    """Serve the page while it is open, and give its address; port 0: a free one. UserError where the port is taken."""
    try:
        server = ThreadingHTTPServer((_HERE[0], port), partial(_Handler, watched, threading.Lock()))  # type: ignore[arg-type]
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such port number"
        raise UserError(f"--port {port} cannot be used ({reason}); omit it for a free one") from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
    thread.start()
    try:
        yield f"http://{_HERE[0]}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def watch(watched: Watched, port: int = 0) -> None:
    """Serve the page and refresh the table until Ctrl-C."""
    console, own = Console(highlight=False), Watched(watched.folder)
    with contextlib.suppress(KeyboardInterrupt), served(watched, port) as address:
        head = f"{address} shows the curves; Ctrl-C ends this view, not the runs"
        if not console.is_terminal:
            print(head, flush=True)
            line = ""
            while True:
                if (now := str(own.look()).partition("; about")[0]) != line:
                    line = now
                    print(own.look(), flush=True)
                time.sleep(_SECONDS)
        with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
            while True:
                view = own.look()
                hidden = len(view.runs) - _ROWS
                more = [Text(f"and {hidden} more that are over")] if hidden > 0 else []
                live.update(Group(Text(head), Text(str(view)), table_of(view, _ROWS), *more), refresh=True)
                time.sleep(_SECONDS)


def print_once(watched: Watched) -> None:
    """Print the line and the table of all runs."""
    view = watched.look()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(Text(str(view)), table_of(view), sep="\n")
