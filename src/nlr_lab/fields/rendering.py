"""Pinhole cameras, and volume rendering of what they see: rays, device coordinates, sampling, compositing, paths.

A camera looks along -z with x to the right and y up; a pose is camera-to-world, 3 x 4 `[R | t]`.

R is rays, S samples on each. A ray is cut into S intervals that leave no gap between near and far, one around each
sample, within which density and colour are constant, so that a constant density is integrated exactly:

    w_i = T_i (1 - exp(-s_i d_i))      T_i = exp(-sum_{j<i} s_j d_j)      colour = sum_i w_i c_i + T_{S+1} background

Where the world goes on behind the last sample (no background; what far = 1 means in normalised device coordinates),
what light is left takes the last sample's colour.

Source: Mildenhall et al. 2020, "NeRF", equations (2) and (3), section 5.2, appendix C.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.errors import UserError

RadianceField = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Points and unit viewing directions, both (R, S, 3), to density (R, S) >= 0 and colour (R, S, 3)."""

_ROTATION_ERROR = 1e-3  # of R^T R against the identity; float32 poses have 1e-6


@dataclass(frozen=True)
class Cameras:
    """N cameras with pictures of one size; raises UserError where one is invalid."""

    poses: np.ndarray
    """(N, 3, 4) float64."""
    intrinsics: np.ndarray
    """(N, 4) float64, in pixels: focal lengths along x and y, centre's column and row."""
    height: int
    width: int

    def __post_init__(self) -> None:
        rotations = self.poses[:, :, :3]
        with np.errstate(all="ignore"):
            off = np.abs(rotations.transpose(0, 2, 1) @ rotations - np.eye(3)).max((1, 2), initial=0)
            right = (off <= _ROTATION_ERROR) & (np.linalg.det(rotations) > 0) & np.isfinite(self.poses).all((1, 2))
        right &= (self.intrinsics[:, :2] > 0).all(1) & np.isfinite(self.intrinsics).all(1)
        if not right.all():
            what = "camera-to-world [R | t] with orthonormal R of determinant 1, and a focal length above 0, all finite"
            raise UserError(f"the camera of view {right.argmin()} is invalid; give {what}")

    def __len__(self) -> int:
        return len(self.poses)

    def corners(self) -> np.ndarray:
        """Directions, in the world, of the rays through the four corner pixels of each picture: (N, 4, 3)."""
        focal, centre = self.intrinsics[:, None, :2], self.intrinsics[:, None, 2:]
        ends = np.array([[x, y] for y in (0.5, self.height - 0.5) for x in (0.5, self.width - 0.5)])
        across = (ends - centre) / focal * [1, -1]
        local = np.concatenate([across, np.full((len(self), 4, 1), -1.0)], axis=2)
        return local @ self.poses[:, :, :3].transpose(0, 2, 1)

    def reduced(self, factor: int) -> "Cameras":
        """The cameras of pictures whose blocks of factor x factor pixels became one; what is left over is cut off."""
        height, width = self.height // factor, self.width // factor
        return replace(self, intrinsics=self.intrinsics / factor, height=height, width=width)


def look_at(position: np.ndarray, target: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The pose (3, 4) of a camera at a position that looks at a target."""
    back = _unit(position - target)
    right = _unit(np.cross(up, back))
    return np.stack([right, np.cross(back, right), back, position], 1)


def average_pose(poses: np.ndarray) -> np.ndarray:
    """(3, 4): mean position and viewing direction, upright as the poses (N, 3, 4) are on average."""
    centre = poses[:, :, 3].mean(0)
    return look_at(centre, centre - poses[:, :, 2].mean(0), poses[:, :, 1].mean(0))


def recentred(poses: np.ndarray) -> np.ndarray:
    """Poses (N, 3, 4) in a world in which the average pose is the identity."""
    average = average_pose(poses)
    moved = poses.copy()
    moved[:, :, 3] -= average[:, 3]
    # No matrix product: BLAS rounds otherwise on other processors, and scenes are told apart by their poses' bits.
    return (average[:, :3].T[:, :, None] * moved[:, None]).sum(2)


def spiral(poses: np.ndarray, focus: float, frames: int) -> np.ndarray:
    """A closed path (frames, 3, 4) in the spread of views from one side, looking `focus` ahead of their average."""
    average = average_pose(poses)
    radii = np.percentile(np.abs((poses[:, :, 3] - average[:, 3]) @ average[:, :3]), 90, axis=0)
    angle = 2 * np.pi * np.arange(frames)[:, None] / frames
    offsets = np.concatenate([np.cos(angle), -np.sin(angle), -np.sin(angle) / 2], 1) * radii
    target = average[:, 3] - focus * average[:, 2]
    return np.stack([look_at(average[:, 3] + average[:, :3] @ each, target, average[:, 1]) for each in offsets])


def circle(poses: np.ndarray, frames: int) -> np.ndarray:
    """A closed path (frames, 3, 4) around where the views' axes meet, at their mean distance and height."""
    positions, axes = poses[:, :, 3], poses[:, :, 2]
    # The point nearest to all optical axes: sum (I - a a^T) (x - p) = 0.
    across = np.eye(3) - axes[:, :, None] * axes[:, None, :]
    target = np.linalg.lstsq(across.sum(0), (across @ positions[:, :, None]).sum(0)[:, 0], rcond=None)[0]
    up = _unit(poses[:, :, 1].mean(0))
    offsets = positions - target
    height = (offsets @ up).mean()
    radius = np.linalg.norm(offsets - (offsets @ up)[:, None] * up, axis=1).mean()
    side = _unit(np.cross(up, np.eye(3)[np.argmin(np.abs(up))]))
    angle = 2 * np.pi * np.arange(frames)[:, None] / frames
    ring = np.cos(angle) * side + np.sin(angle) * np.cross(up, side)
    return np.stack([look_at(target + radius * each + height * up, target, up) for each in ring])


def _unit(vector: np.ndarray) -> np.ndarray:
    length = np.sqrt(np.square(vector).sum())  # as in `recentred`, the same on all processors
    if not length > 0:
        raise UserError("the cameras' directions cancel out: there is no average view; give fewer or other views")
    return vector / length


class Rays(NamedTuple):
    """R rays; a point of one is origin + t * direction with t in [near, far]."""

    origins: Tensor
    """(R, 3)."""
    directions: Tensor
    """(R, 3), of any length."""
    views: Tensor
    """(R, 3), unit viewing directions in the world, also where origins and directions are in device coordinates."""


def pixel_rays(cameras: Cameras, views: Tensor, rows: Tensor, columns: Tensor) -> Rays:
    """Rays through pixel centres, in float64: the cameras (R), rows (R) and columns (R) of the pixels."""
    poses = torch.from_numpy(cameras.poses)[views]
    focal_x, focal_y, centre_x, centre_y = torch.from_numpy(cameras.intrinsics)[views].unbind(-1)
    across, along = (columns + 0.5 - centre_x) / focal_x, -(rows + 0.5 - centre_y) / focal_y
    local = torch.stack([across, along, -torch.ones_like(focal_x)], -1)
    directions = (poses[:, :, :3] @ local[:, :, None])[..., 0]
    return Rays(poses[:, :, 3], directions, F.normalize(directions, dim=-1))


def ndc_rays(rays: Rays, scale_x: float, scale_y: float, near: float = 1.0) -> Rays:
    """Rays with z < 0 in normalised device coordinates: t in [0, 1] is z from -near to -infinity.

    The scales are focal lengths over half the width and half the height. Source: equations (25) and (26).
    """
    shift = -(near + rays.origins[:, 2:]) / rays.directions[:, 2:]
    x, y, z = (rays.origins + shift * rays.directions).unbind(-1)
    dx, dy, dz = rays.directions.unbind(-1)
    origins = torch.stack([-scale_x * x / z, -scale_y * y / z, 1 + 2 * near / z], -1)
    directions = torch.stack([-scale_x * (dx / dz - x / z), -scale_y * (dy / dz - y / z), -2 * near / z], -1)
    return Rays(origins, directions, rays.views)


def stratified(jitter: Tensor, near: float, far: float) -> Tensor:
    """One t in each of S equal bins of [near, far], at the places `jitter` (R, S) in [0, 1]: equation (2)."""
    samples = jitter.shape[-1]
    bins = torch.arange(samples, dtype=jitter.dtype, device=jitter.device) + jitter
    return near + (far - near) * bins / samples


def interval_edges(t: Tensor, near: float, far: float) -> Tensor:
    """(R, S + 1): near, the middles between neighbouring samples t (R, S), far."""
    ends = t.new_full((len(t), 1), near), t.new_full((len(t), 1), far)
    return torch.cat([ends[0], (t[:, 1:] + t[:, :-1]) / 2, ends[1]], -1)


def importance(edges: Tensor, weights: Tensor, jitter: Tensor) -> Tensor:
    """Draw t (R, F), ascending, from the density that is constant on each interval and proportional to its weight.

    Where the `weights` (R, S) of a ray are all 0, every interval of `edges` (R, S + 1) counts by its width. `jitter`
    (R, F) has the places in F equal bins of the quantiles. No gradient passes.
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
) -> tuple[Tensor, Tensor]:
    """Colours (R, 3) and weights of the samples (R, S), by this file's formula.

    Of density (R, S) per unit of length, colour (R, S, 3), ascending t (R, S) and the lengths (R) of a step of 1 in t.
    `background` is the grey of what is behind; None: the last sample's colour goes on.
    """
    optical = density * interval_edges(t, near, far).diff(dim=-1) * lengths[:, None]
    # Shifted, not cumsum - optical: behind a thick interval that difference would be rounding error.
    passed = torch.exp(-F.pad(optical[:, :-1].cumsum(-1), (1, 0)))
    # -expm1 keeps thin intervals, where 1 - exp cancels.
    weights = passed * -torch.expm1(-optical)
    if background is None:
        weights = torch.cat([weights[:, :-1], passed[:, -1:]], -1)
    seen = (weights[..., None] * colour).sum(-2)
    if background is not None:
        seen = seen + background * torch.exp(-optical.sum(-1))[:, None]
    return seen, weights


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
) -> list[Tensor]:
    """Render rays: colours (R, 3), once at stratified samples, or again by `fine` at the union of these and fine ones.

    `jitter` (R, S) has the places of the stratified samples and `fine_jitter` (R, F) of those that are drawn where the
    coarse weights are. Without `fine` the coarse field is asked again.
    """
    lengths = rays.directions.norm(dim=-1)

    def pass_with(field: RadianceField, t: Tensor) -> tuple[Tensor, Tensor]:
        points = rays.origins[:, None] + t[..., None] * rays.directions[:, None]
        density, colour = field(points, rays.views[:, None].expand_as(points))
        return composite(density, colour, t, near, far, lengths, background)

    t = stratified(jitter, near, far)
    seen, weights = pass_with(coarse, t)
    if fine_jitter is None:
        return [seen]
    drawn = importance(interval_edges(t, near, far), weights.detach(), fine_jitter)
    return [seen, pass_with(fine or coarse, torch.cat([t, drawn], -1).sort(-1).values)[0]]
