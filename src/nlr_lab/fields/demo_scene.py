"""A scene with no file behind it: three soft balls in formulas, rendered by this package's own renderer."""

import numpy as np
import torch
from torch import Tensor

from .cameras import Cameras, look_at
from .rendering import Rays, pixel_rays, render
from .scene import HOLD_OUT, Scene

DEMO_SIZE = 40
"""Pixels of a view, by side."""

_BALLS = (  # centre, radius, colour
    ((0.0, 0.0, 0.2), 0.7, (0.9, 0.3, 0.2)),
    ((0.9, 0.5, -0.2), 0.45, (0.2, 0.7, 0.3)),
    ((-0.7, -0.8, -0.1), 0.5, (0.2, 0.35, 0.9)),
)
_DENSITY, _EDGE = 12.0, 0.03  # per unit of length; width over which a ball's density falls to nothing
_DISTANCE, _NEAR, _FAR = 4.0, 2.2, 5.8
_SAMPLES = 128
_RAYS = 2048  # at once


def demo_volume(points: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
    """Density (...) and colour (..., 3) of the balls at points (..., 3), brighter towards above, and striped."""
    density = points.new_zeros(points.shape[:-1])
    colour = torch.zeros_like(points)
    for centre, radius, tint in _BALLS:
        inside = _DENSITY * torch.sigmoid((radius - (points - points.new_tensor(centre)).norm(dim=-1)) / _EDGE)
        density = density + inside
        colour = colour + inside[..., None] * points.new_tensor(tint)
    light = 0.75 + 0.25 * torch.sin(9 * points[..., 2:])
    return density, light * colour / density.clamp_min(1e-12)[..., None]


def demo_scene(views: int = 24, size: int = DEMO_SIZE, held_out: tuple[int, ...] | None = None) -> Scene:
    """The balls before white, from all around and above.

    Args:
        views: how many, on a spiral from low to high.
        size: of the square pictures, in pixels.
        held_out: other views than every 8th.
    """
    share = (np.arange(views) + 0.5) / views
    rise, turn = np.radians(10 + 60 * share), np.pi * (3 - np.sqrt(5)) * np.arange(views)  # the golden angle
    positions = _DISTANCE * np.stack([np.cos(rise) * np.cos(turn), np.cos(rise) * np.sin(turn), np.sin(rise)], 1)
    poses = np.stack([look_at(each, np.zeros(3), np.array([0.0, 0.0, 1.0])) for each in positions])
    cameras = Cameras(poses, np.tile([1.1 * size, 1.1 * size, size / 2, size / 2], (views, 1)), size, size)
    pixels = torch.arange(views * size * size)
    view, row, column = pixels // size**2, pixels // size % size, pixels % size
    rays = pixel_rays(cameras, view, row, column)
    parts = []
    for start in range(0, len(pixels), _RAYS):
        some = Rays(*(each[start : start + _RAYS].float() for each in rays))
        middles = torch.full((len(some.origins), _SAMPLES), 0.5)
        seen = render(demo_volume, None, some, middles, near=_NEAR, far=_FAR, background=1.0)[-1]
        parts.append(seen.colour.clamp(0, 1))
    images = torch.cat(parts).reshape(views, size, size, 3).numpy()
    out = tuple(range(0, views, HOLD_OUT)) if held_out is None else held_out
    return Scene("demo", images, cameras, out, _NEAR, _FAR, ndc=False, background=1.0)
