"""Volume rendering of radiance fields: rays, normalised device coordinates, sampling, compositing.

Formulas: Mildenhall et al. 2020, "NeRF", equation (3) (quadrature), section 5.2 (hierarchical sampling) and appendix C
(normalised device coordinates). R is rays, S samples on each.

A ray is cut into S intervals that leave no gap between near and far, one around each sample, within which density
and colour are constant. So a constant density is integrated exactly, wherever the samples lie:

    w_i = T_i (1 - exp(-s_i d_i))      T_i = exp(-sum_{j<i} s_j d_j)      colour = sum_i w_i c_i + T_{S+1} background

Where the world goes on behind the last sample (no background; what far = 1 means in normalised device coordinates),
what light is left takes the last sample's colour.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cameras import Cameras

RadianceField = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Points and unit viewing directions, both (R, S, 3), to density (R, S) >= 0 and colour (R, S, 3)."""


class Rays(NamedTuple):
    """R rays; a point of one is origin + t * direction with t in [near, far]."""

    origins: Tensor
    """(R, 3)."""
    directions: Tensor
    """(R, 3), of any length."""
    views: Tensor
    """(R, 3), unit viewing directions in the world, also where origins and directions are in device coordinates."""


class Rendered(NamedTuple):
    """Colours and depths that R rays see."""

    colour: Tensor
    """(R, 3)."""
    depth: Tensor
    """(R), mean of t over the weights, in the rays' own unit."""
    opacity: Tensor
    """(R), the share of light that the volume stops."""
    weights: Tensor
    """(R, S), of the samples."""


def pixel_rays(cameras: Cameras, views: Tensor, rows: Tensor, columns: Tensor) -> Rays:
    """Rays through pixel centres, in float64.

    Args:
        cameras: the cameras.
        views: (R) which camera.
        rows: (R) of the pixels.
        columns: (R) of the pixels.
    """
    poses = torch.from_numpy(cameras.poses)[views]
    focal_x, focal_y, centre_x, centre_y = torch.from_numpy(cameras.intrinsics)[views].unbind(-1)
    local = torch.stack(
        [(columns + 0.5 - centre_x) / focal_x, -(rows + 0.5 - centre_y) / focal_y, -torch.ones_like(focal_x)], -1
    )
    directions = (poses[:, :, :3] @ local[:, :, None])[..., 0]
    return Rays(poses[:, :, 3], directions, F.normalize(directions, dim=-1))


def ndc_rays(rays: Rays, scale_x: float, scale_y: float, near: float = 1.0) -> Rays:
    """Rays of cameras that look along -z, in normalised device coordinates: t in [0, 1] is z from -near to -infinity.

    Args:
        rays: in the world; every direction has z < 0.
        scale_x: focal length over half the width, both in pixels.
        scale_y: focal length over half the height.
        near: distance of the near plane.

    Source: Mildenhall et al. 2020, appendix C, equations (25) and (26).
    """
    shift = -(near + rays.origins[:, 2:]) / rays.directions[:, 2:]
    x, y, z = (rays.origins + shift * rays.directions).unbind(-1)
    dx, dy, dz = rays.directions.unbind(-1)
    origins = torch.stack([-scale_x * x / z, -scale_y * y / z, 1 + 2 * near / z], -1)
    directions = torch.stack(
        [-scale_x * (dx / dz - x / z), -scale_y * (dy / dz - y / z), -2 * near / z],
        -1,
    )
    return Rays(origins, directions, rays.views)


def stratified(jitter: Tensor, near: float, far: float) -> Tensor:
    """One t in each of S equal bins of [near, far]: (R, S), ascending.

    Args:
        jitter: (R, S) in [0, 1], the places in the bins: uniform draws, or 0.5 everywhere for the bins' middles.
        near: smallest t.
        far: largest t.

    Source: Mildenhall et al. 2020, equation (2).
    """
    samples = jitter.shape[-1]
    bins = torch.arange(samples, dtype=jitter.dtype, device=jitter.device) + jitter
    return near + (far - near) * bins / samples


def interval_edges(t: Tensor, near: float, far: float) -> Tensor:
    """(R, S + 1): near, the middles between neighbouring samples t (R, S), far."""
    ends = t.new_full((len(t), 1), near), t.new_full((len(t), 1), far)
    return torch.cat([ends[0], (t[:, 1:] + t[:, :-1]) / 2, ends[1]], -1)


def importance(edges: Tensor, weights: Tensor, jitter: Tensor) -> Tensor:
    """Draw t from the density that is constant on each interval and proportional to its weight.

    Args:
        edges: (R, S + 1), ascending.
        weights: (R, S) >= 0; where a ray's are all 0, every interval counts by its width.
        jitter: (R, F) in [0, 1], places in F equal bins of the quantiles, as in `stratified`.

    Returns:
        (R, F), ascending, without gradient.

    Source: Mildenhall et al. 2020, section 5.2, inverse transform sampling.
    """
    with torch.no_grad():
        # In float64: a float32 running sum would lose the intervals behind a heavy one.
        share = torch.where(weights.sum(-1, keepdim=True) > 0, weights, edges.diff(dim=-1)).double()
        cumulative = F.pad(share.cumsum(-1) / share.sum(-1, keepdim=True), (1, 0))
        quantiles = stratified(jitter.double(), 0.0, 1.0)
        place = torch.searchsorted(cumulative, quantiles, right=True).clamp(1, weights.shape[-1])
        low, high = cumulative.gather(-1, place - 1), cumulative.gather(-1, place)
        # No quantile below 1 falls into an interval without weight; at 1 the last interval may be such a one.
        inside = ((quantiles - low) / (high - low).clamp_min(1e-30)).clamp(0, 1).to(edges.dtype)
        return torch.lerp(edges.gather(-1, place - 1), edges.gather(-1, place), inside)


def composite(
    density: Tensor, colour: Tensor, t: Tensor, near: float, far: float, lengths: Tensor, background: float | None
) -> Rendered:
    """Light along rays, by this file's formula.

    Args:
        density: (R, S) >= 0, per unit of length.
        colour: (R, S, 3).
        t: (R, S), ascending, in [near, far].
        near: where the rays begin.
        far: where they end.
        lengths: (R), of the directions: the length of a step of 1 in t.
        background: colour of what is behind, or None: the last sample's colour goes on.

    Source: Mildenhall et al. 2020, equation (3).
    """
    optical = density * interval_edges(t, near, far).diff(dim=-1) * lengths[:, None]
    # Shifted, not cumsum - optical: behind a thick interval that difference would be rounding error.
    passed = torch.exp(-F.pad(optical[:, :-1].cumsum(-1), (1, 0)))
    # -expm1 keeps thin intervals, where 1 - exp cancels.
    weights = passed * -torch.expm1(-optical)
    if background is None:
        weights = torch.cat([weights[:, :-1], passed[:, -1:]], -1)
    opacity = weights.sum(-1)
    seen = (weights[..., None] * colour).sum(-2)
    if background is not None:
        seen = seen + background * torch.exp(-optical.sum(-1))[:, None]
    depth = (weights * t).sum(-1) / opacity.clamp_min(torch.finfo(t.dtype).tiny)
    return Rendered(seen, depth, opacity, weights)


def render(
    coarse: RadianceField,
    fine: RadianceField | None,
    rays: Rays,
    jitter: Tensor,
    fine_jitter: Tensor | None = None,
    *,
    near: float,
    far: float,
    background: float | None,
) -> list[Rendered]:
    """Render rays: once, or twice where there are fine samples.

    Args:
        coarse: the field at stratified samples.
        fine: the field at the union of those and the fine samples; None: `coarse` again.
        rays: R rays.
        jitter: (R, S), of the stratified samples.
        fine_jitter: (R, F), of the samples that are drawn where the coarse weights are; None renders once.
        near: smallest t.
        far: largest t.
        background: as in `composite`.

    Returns:
        The coarse picture, and the fine one if there are fine samples.
    """
    lengths = rays.directions.norm(dim=-1)

    def pass_with(field: RadianceField, t: Tensor) -> Rendered:
        points = rays.origins[:, None] + t[..., None] * rays.directions[:, None]
        density, colour = field(points, rays.views[:, None].expand_as(points))
        return composite(density, colour, t, near, far, lengths, background)

    t = stratified(jitter, near, far)
    passes = [pass_with(coarse, t)]
    if fine_jitter is not None:
        drawn = importance(interval_edges(t, near, far), passes[0].weights.detach(), fine_jitter)
        passes.append(pass_with(fine or coarse, torch.cat([t, drawn], -1).sort(-1).values))
    return passes
