"""Bases of methods' settings, with the ranks and shapes that follow; in modeling files too. No torch: help reads it."""

from typing import Any


class BranchSettings:
    """Base of branches' settings: what follows from them."""

    rank: int
    rank_ratio: float | None
    activation: Any
    depth: int
    init: Any
    fusion: Any
    up_bias: bool
    output_scale: float | None
    bottleneck_bias: bool = False
    mix_scale: float | None = None

    def rank_of(self, d_in: int, d_out: int) -> int:
        """Return r of a layer d_in -> d_out."""
        return self.rank if self.rank_ratio is None else max(1, int(min(d_in, d_out) * self.rank_ratio))

    def shapes(self, d_in: int, d_out: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the branch's tensors beside a linear d_in -> d_out, by the ends of their names."""
        r = self.rank_of(d_in, d_out)
        found: dict[str, tuple[int, ...]] = {"down": (r, d_in), "up": (d_out, r)}
        found |= {f"mix{k}": (r, r) for k in range(1, self.depth)}
        for k in range(1, self.depth + 1) if self.activation == "cosine" else ():
            found |= {f"frequency{k}": (r,), f"phase{k}": (r,)}
            found |= {f"bias{k}": (r,)} if self.bottleneck_bias else {}
        found |= {"up_bias": (d_out,)} if self.up_bias else {}
        return found | ({"fusion": (1,)} if self.fusion == "gated" else {})

    def shapes_of_experts(self, count: int, d_in: int, d_out: int) -> dict[str, tuple[int, ...]]:
        """Return those beside a linear of each of `count` experts."""
        own = {name: (count, *shape) for name, shape in self.shapes(d_in, d_out).items()}
        own |= {"down": own["down"][1:]} if self.expert_down == "shared" else {}  # type: ignore[attr-defined]
        return own | ({"fusion": (count,)} if self.fusion == "gated" else {})

    @property
    def scale(self) -> float:
        """The factor of the layer's output: a gate that starts at one half is undone beside trained weights."""
        if self.output_scale is not None:
            return self.output_scale
        return 2.0 if self.fusion == "gated" and self.init == "pretrained" else 1.0


class QuerySettings:
    """Base of queries' settings: what follows from them."""

    rank: int | None
    kind: Any

    @property
    def has_bottleneck(self) -> bool:
        """True where f has W1 and W2."""
        return self.kind in ("nonlinear", "linear")

    def rank_for(self, width: int, queries: int) -> int:
        """Return r at a model width d and queries of width q."""
        return max(1, width * queries // (width + queries)) if self.rank is None else self.rank
