"""`nlr bench traffic`: bytes and FLOPs that NOBLE adds to a training step on a GPU, counted kernel by kernel on paper.

T tokens, a linear I -> O, rank r, 16-bit numbers. Every kernel of a branch reads and writes whole matrices once; what
it adds to a product of the plain linear counts as a kernel of its own. A kernel takes as long as its bytes or its FLOPs
need, whichever is more. Numbers (of 2 bytes) that move, where products stand apart:

| kernel                  | moves                     | FLOPs  |
|-------------------------|---------------------------|--------|
| h = x D^T               | T I + r I + T r           | 2 T I r|
| CosNet                  | 2 T r                     | 2 T r r|
| y += u U^T              | 2 T O + T r + O r         | 2 T O r|
| du = dy U               | T O + O r + T r           | 2 T O r|
| CosNet, backward        | 10 T r, and partial sums  | 6 T r r|
| dU = dy^T u             | T O + T r + O r           | 2 T O r|
| dx += dh D              | 2 T I + T r + r I         | 2 T I r|
| dD = dh^T x             | T I + T r + r I           | 2 T I r|

`STRUCTURES` are these and other ways; docs/performance.md says what follows.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from nlr_lab.plan.presets import find_hardware
from nlr_lab.runtime.tables import number_table, render_table
from nonlinear_lowrank.methods.noble.op import FUSED_DOWN_RANK, TILE

from .settings import TrafficBenchConfig

_HALF = 2  # bytes of a number


class Kernel(NamedTuple):
    """One launch, or what a launch of the plain linear takes more."""

    name: str
    nbytes: int
    flops: int


class Shape(NamedTuple):
    """A linear I -> O with a branch of rank r, of T tokens."""

    T: int
    I: int  # noqa: E741
    O: int  # noqa: E741
    r: int


def _kernel(name: str, numbers: int, flops: int = 0) -> Kernel:
    return Kernel(name, _HALF * numbers, flops)


def _cosnet(s: Shape) -> Kernel:
    return _kernel("cosnet", 2 * s.T * s.r, 2 * s.T * s.r * s.r)


def _cosnet_backward(s: Shape) -> list[Kernel]:
    """Two kernels and M's gradient, a product; then the float32 sums of the tiles, written and read."""
    # h, du in, u, dh2 out; h, dh2 in, c1, dh out; c1, dh2 in. Every block of columns reads all of h, dh2 again
    nbytes = _HALF * 10 * s.T * s.r + 2 * 4 * 4 * s.r * -(-s.T // TILE)
    return [Kernel("cosnet backward", nbytes, 6 * s.T * s.r * s.r)]


def _down(s: Shape) -> list[Kernel]:
    """h by a product of its own, then CosNet."""
    return [_kernel("h = x D^T", s.T * s.I + s.r * s.I + s.T * s.r, 2 * s.T * s.I * s.r), _cosnet(s)]


def _down_in_kernel(s: Shape) -> list[Kernel]:
    """`FUSE_DOWN`: CosNet's kernel reads x and writes h and u."""
    numbers = s.T * s.I + s.r * s.I + 2 * s.T * s.r
    return [_kernel("h, u of x in one kernel", numbers, 2 * s.T * s.r * (s.I + s.r))]


def _down_in_main(s: Shape) -> list[Kernel]:
    """[y | h] = x [W; D]^T; h is copied out, so that it alone is kept."""
    joined, copied = _kernel("[W; D]", 2 * (s.O + s.r) * s.I), _kernel("h", 2 * s.T * s.r)
    return [joined, _kernel("h in x [W; D]^T", s.T * s.r + s.r * s.I, 2 * s.T * s.I * s.r), copied, _cosnet(s)]


def _down_inside(s: Shape) -> list[Kernel]:
    """h of a main product that needs no copy of the weights: of the limit alone, since u needs the whole of h."""
    return [*_down_in_main(s)[1:2], _cosnet(s)]


def _up(s: Shape) -> list[Kernel]:
    return [_kernel("y += u U^T", 2 * s.T * s.O + s.T * s.r + s.O * s.r, 2 * s.T * s.O * s.r)]


def _up_joined(s: Shape) -> list[Kernel]:
    """`JOIN_UP`: y = [x | u] [W | U]^T of copies."""
    copies = _kernel("[x | u], [W | U]", 2 * (s.T + s.O) * (s.I + s.r))
    return [copies, *_up_range(s)]


def _up_range(s: Shape) -> list[Kernel]:
    """The same as a second range of the product's sum, read where u and U lie: no library has this product."""
    return [_kernel("u U^T in x W^T", s.T * s.r + s.O * s.r, 2 * s.T * s.O * s.r)]


def _du(s: Shape) -> list[Kernel]:
    return [_kernel("du = dy U", s.T * s.O + s.O * s.r + s.T * s.r, 2 * s.T * s.O * s.r)]


def _du_in_dx(s: Shape) -> list[Kernel]:
    """[dx | du] = dy [W | U]; dx has rows of I + r numbers, du is copied out."""
    joined, copied = _kernel("[W | U]", 2 * s.O * (s.I + s.r)), _kernel("du", 2 * s.T * s.r)
    return [joined, *_du_inside(s), copied]


def _du_inside(s: Shape) -> list[Kernel]:
    return [_kernel("du in dy [W | U]", s.T * s.r + s.O * s.r, 2 * s.T * s.O * s.r)]


def _dx(s: Shape) -> list[Kernel]:
    return [_kernel("dx += dh D", 2 * s.T * s.I + s.T * s.r + s.r * s.I, 2 * s.T * s.I * s.r)]


def _dx_joined(s: Shape) -> list[Kernel]:
    """`JOIN_DOWN`: dx = [dy | dh] [W; D] of copies."""
    return [_kernel("[dy | dh], [W; D]", 2 * (s.T + s.I) * (s.O + s.r)), *_dx_range(s)]


def _dx_range(s: Shape) -> list[Kernel]:
    return [_kernel("dh D in dy W", s.T * s.r + s.r * s.I, 2 * s.T * s.I * s.r)]


def _gradients(s: Shape) -> list[Kernel]:
    return [
        _kernel("dU = dy^T u", s.T * s.O + s.T * s.r + s.O * s.r, 2 * s.T * s.O * s.r),
        _kernel("dD = dh^T x", s.T * s.I + s.T * s.r + s.r * s.I, 2 * s.T * s.I * s.r),
    ]


def _gradients_joined(s: Shape) -> list[Kernel]:
    """`JOIN_DOWN`: [dW; dD] = [dy | dh]^T x of the copy that dx is made of; dD is copied out."""
    copied = _kernel("dD", 2 * s.r * s.I)
    return [_gradients(s)[0], _kernel("dD in dy^T x", s.T * s.r + s.r * s.I, 2 * s.T * s.I * s.r), copied]


def _gradients_in_main(s: Shape) -> list[Kernel]:
    """[dW dU; dD .] = [dy | dh]^T [x | u], its corner not formed, of parts that are read where they lie."""
    numbers = 2 * s.T * s.r + (s.O + s.I) * s.r
    return [_kernel("dU, dD in dy^T x", numbers, 2 * s.T * (s.I + s.O) * s.r)]


Part = Callable[[Shape], list[Kernel]]


def _takes_down(s: Shape) -> Part:
    """The rule of `FUSE_DOWN`, on a GPU with a tile for every processor."""
    return _down_in_kernel if s.r <= FUSED_DOWN_RANK else _down


def _takes_up(s: Shape) -> Part:
    """The rule of `JOIN_UP`."""
    return _up_joined if (s.I + s.r) * (s.T + s.O) < s.T * s.O else _up


def _takes_down_in_main(s: Shape) -> Part:
    """[W; D] where y += u U^T follows: a joined up projection needs h before."""
    return _down_in_main if _takes_up(s) is _up else _takes_down(s)


def _takes_dx(s: Shape) -> tuple[Part, Part]:
    """The rule of `JOIN_DOWN`."""
    joined = (s.O + s.r) * (s.T + s.I) < s.T * s.I
    return (_dx_joined, _gradients_joined) if joined else (_dx, _gradients)


# name -> down, up, du, dx, weights' gradients; a rule gives the part that it takes
STRUCTURES: dict[str, Callable[[Shape], tuple[Part, ...]]] = {
    "products apart": lambda s: (_down, _up, _du, _dx, _gradients),
    "today": lambda s: (_takes_down(s), _takes_up(s), _du, *_takes_dx(s)),
    "W and Wdown one product": lambda s: (_takes_down_in_main(s), _takes_up(s), _du, *_takes_dx(s)),
    "dx and du one product": lambda s: (_takes_down(s), _takes_up(s), _du_in_dx, _dx, _gradients),
    "both of these": lambda s: (_takes_down_in_main(s), _takes_up(s), _du_in_dx, _dx, _gradients),
    "dX one product, copied": lambda s: (_takes_down(s), _takes_up(s), _du, _dx_joined, _gradients_joined),
    "up as a second range*": lambda s: (_takes_down(s), _up_range, _du, *_takes_dx(s)),
    "up and dX as ranges*": lambda s: (_takes_down(s), _up_range, _du, _dx_range, _gradients),
    "all but h, du inside*": lambda s: (_takes_down(s), _up_range, _du, _dx_range, _gradients_in_main),
    "limit: all inside*": lambda s: (_down_inside, _up_range, _du_inside, _dx_range, _gradients_in_main),
}
_CHOICES: dict[str, Part] = {
    "down": _down, "in kernel": _down_in_kernel, "in x W^T": _down_in_main,
    "up": _up, "joined up": _up_joined, "range up*": _up_range,
    "du": _du, "in dy W": _du_in_dx,
    "dx": _dx, "joined dx": _dx_joined, "range dx*": _dx_range,
}  # fmt: skip
NOTE = (
    "* needs products of our own, which read two pairs of matrices; 'may be slower' is how much longer than cuBLAS's "
    "the main products that they replace may take before the gain over today is lost. The limit cannot be built"
)


def branch_kernels(structure: str, shape: Shape) -> list[Kernel]:
    """Return what a branch adds to forward and backward of a plain linear."""
    down, up, du, dx, gradients = STRUCTURES[structure](shape)
    return [*down(shape), *up(shape), *du(shape), *_cosnet_backward(shape), *dx(shape), *gradients(shape)]


def optimizer_bytes(shape: Shape) -> int:
    """Return the bytes of a branch's weights beside the products: cast, gradients cast, and AdamW in float32."""
    numbers = shape.r * (shape.I + shape.O + shape.r)
    return (6 + 6 + 28) * numbers  # read 4, write 2; read 2, write 4; read 16, write 12


def replaced_products(structure: str) -> int:
    """Return how many of a linear's three products are of our own."""
    parts = STRUCTURES[structure](Shape(1, 1, 1, 1))
    return sum(part in (_up_range, _dx_range, _gradients_in_main) for part in parts)


@dataclass(kw_only=True)
class Traffic:
    """Rows of the table; `print(result)` gives it."""

    config: TrafficBenchConfig
    baseline_flops: int
    baseline_seconds: float
    rows: list[dict[str, Any]]
    shapes: list[dict[str, Any]]

    def __str__(self) -> str:
        table = number_table("structure", "r", "GB", "TFLOP", "branch, ms", "step x", "may be slower")
        for row in self.rows:
            slack = "" if row["slack"] is None else f"{row['slack']:.1%}"
            cells = (f"{row['gigabytes']:.1f}", f"{row['teraflops']:.2f}", f"{row['milliseconds']:.2f}")
            table.add_row(row["structure"], str(row["rank"]), *cells, f"{row['step_ratio']:.3f}", slack)
        parts = number_table("linear", "r", *(name for name in self.shapes[0] if name not in ("linear", "rank")))
        for row in self.shapes:
            times = (f"{1e6 * value:.0f}" for name, value in row.items() if name not in ("linear", "rank"))
            parts.add_row(row["linear"], str(row["rank"]), *times)
        config = self.config
        return "\n".join(
            (
                render_table(table, 200),
                NOTE,
                "microseconds of parts, of one linear:",
                render_table(parts, 200),
                f"baseline: {self.baseline_flops / 1e12:.1f} TFLOP, {1000 * self.baseline_seconds:.1f} ms a step of "
                f"{config.tokens:,} tokens at {config.utilization:.0%} of {config.hardware}'s rate; products of a "
                f"branch at up to {config.product_share:.0%} of the rate and {config.bandwidth_share:.0%} of the "
                f"memory's; step x: with the branch's optimizer; computed, not measured",
            )
        )

    def to_json(self) -> str:
        """Return everything as text."""
        return json.dumps(asdict(self), indent=2)


def linears(config: TrafficBenchConfig) -> dict[str, tuple[int, int, int]]:
    """Return name -> d_in, d_out and number of a block's linears, as GLM has them."""
    d, hidden = config.width, config.hidden
    return {"q, k, v, o": (d, d, 4), "gate and up": (d, 2 * hidden, 1), "down": (hidden, d, 1)}


def bench_traffic(config: TrafficBenchConfig, *, progress: Callable[[str], object] = lambda line: None) -> Traffic:
    """Count every structure at every rank."""
    hardware = find_hardware(config.hardware)
    bandwidth = hardware.bandwidth * config.bandwidth_share
    rate = hardware.bf16 * config.product_share
    shapes, T = linears(config), config.tokens
    weights = config.layers * sum(d_in * d_out * n for d_in, d_out, n in shapes.values())
    scores = config.layers * 2 * config.sequence_length * config.width
    flops = 6 * T * (weights + config.width * config.vocab_size + scores)
    baseline = flops / (hardware.bf16 * config.utilization)

    def seconds(kernel: Kernel) -> float:
        return max(kernel.nbytes / bandwidth, kernel.flops / rate)

    def of_model(name: str, rank: int) -> Iterator[tuple[Kernel, int]]:
        for d_in, d_out, n in shapes.values():
            shape = Shape(T, d_in, d_out, rank)
            yield from ((kernel, n * config.layers) for kernel in branch_kernels(name, shape))

    rows, parts = [], []
    for rank in config.ranks:
        own = sum(optimizer_bytes(Shape(T, i, o, rank)) * n * config.layers for i, o, n in shapes.values())
        today = 0.0
        for name in STRUCTURES:
            kernels = list(of_model(name, rank))
            took = sum(seconds(kernel) * n for kernel, n in kernels)
            today = took if name == "today" else today
            replaced = replaced_products(name) * 2 * T * weights / rate
            rows.append(
                {
                    "name": f"{'-'.join(re.findall(r'[a-z]+', name.lower()))}-r{rank}",
                    "structure": name,
                    "rank": rank,
                    "gigabytes": sum(kernel.nbytes * n for kernel, n in kernels) / 1e9,
                    "teraflops": sum(kernel.flops * n for kernel, n in kernels) / 1e12,
                    "milliseconds": 1000 * took,
                    "step_ratio": 1 + (took + own / bandwidth) / baseline,
                    "slack": (today - took) / replaced if replaced else None,
                }
            )
        for d_in, d_out, _ in shapes.values():
            shape = Shape(T, d_in, d_out, rank)
            took_by = {each: sum(map(seconds, part(shape))) for each, part in _CHOICES.items()}
            parts.append({"linear": f"{d_in} -> {d_out}", "rank": rank, **took_by})
    return Traffic(config=config, baseline_flops=flops, baseline_seconds=baseline, rows=rows, shapes=parts)
