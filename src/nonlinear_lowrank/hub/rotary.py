"""Rotary positions on a grid of image tokens (noble.txt, section 4.2.2: "2D RoPE").

Of each head's dimensions the first half turns by the token's row, the second half by its column, each as a rotary
embedding of head_dim / 2 dimensions turns text: pair j of a half by place * theta ** (-2j / (head_dim / 2)).

The sequence is a class token and then the grid in raster order, so a place follows from the position p in it:

    p = 0      the class token at (0, 0), which turns nothing and which no image token shares
    p >= 1     row 1 + (p - 1) // columns, column 1 + (p - 1) % columns
"""

import torch
from torch import nn

from nonlinear_lowrank.validation import check_head_dim


def grid_places(position_ids: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows, columns) of positions in the sequence, of any shape; see the file's table."""
    image = position_ids.clamp_min(1) - 1
    first = position_ids < 1
    return (1 + image // columns).masked_fill(first, 0), (1 + image % columns).masked_fill(first, 0)


def grid_angles(rows: torch.Tensor, columns: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Return angles (..., head_dim / 2), one a pair of dimensions: the first half of them by row, the others by column.

    Rows and columns (...) are of a floating type, which the angles take; theta is the base of the wavelengths.
    """
    pairs = head_dim // 4
    exponents = torch.arange(pairs, device=rows.device, dtype=rows.dtype) / pairs
    frequencies = theta**-exponents
    return torch.cat((rows[..., None] * frequencies, columns[..., None] * frequencies), dim=-1)


class GridRotary(nn.Module):
    """Cosines and sines of `grid_angles` for positions in the sequence, in the layout of transformers' GLM.

    It has no tensors: nothing to load, to cast to a shorter type, or to leave uninitialised on meta. Raises UserError
    where head_dim is not divisible by 4.
    """

    def __init__(self, head_dim: int, columns: int, theta: float = 10_000.0) -> None:
        super().__init__()
        check_head_dim(head_dim)
        self.head_dim, self.columns, self.theta = head_dim, columns, theta

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin), each (B, T, head_dim) in x's type, for positions (B, T); computed in float32 or wider."""
        exact = torch.promote_types(x.dtype, torch.float32)
        rows, columns = grid_places(position_ids, self.columns)
        angles = grid_angles(rows.to(exact), columns.to(exact), self.head_dim, self.theta)
        # GLM reads the first half, an angle a pair of neighbouring dimensions, and wants the full width.
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, columns={self.columns}, theta={self.theta:g}"
