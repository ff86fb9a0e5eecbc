"""Rays, sampling and compositing against float64 formulas, on fresh random inputs."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nlr_lab.fields.rendering import (
    Cameras,
    Rays,
    composite,
    importance,
    interval_edges,
    ndc_rays,
    pixel_rays,
    render,
    stratified,
)


def some_cameras(views: int, height: int = 7, width: int = 9, *, forward: bool = False) -> Cameras:
    """Cameras anywhere, or looking roughly along -z."""
    turns = torch.randn(views, 3, 3, dtype=torch.float64)
    if forward:
        turns = torch.eye(3, dtype=torch.float64) + 0.1 * turns
    rotations = torch.linalg.qr(turns)[0]
    if forward:
        rotations = rotations * rotations.diagonal(dim1=1, dim2=2).sign()[:, None, :]
    rotations[:, :, 0] *= torch.linalg.det(rotations)[:, None]
    poses = torch.cat([rotations, torch.randn(views, 3, 1, dtype=torch.float64)], -1).numpy()
    focal = torch.rand(views, 2, dtype=torch.float64).numpy() * 5 + 6
    centre = np.tile([width / 2 + 0.3, height / 2 - 0.2], (views, 1))
    return Cameras(poses, np.concatenate([focal, centre], 1), height, width)


def pixels(count: int, cameras: Cameras) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randint(len(cameras), (count,)),
        torch.randint(cameras.height, (count,)),
        torch.randint(cameras.width, (count,)),
    )


def test_ray_projects_back_onto_its_pixels_centre():
    cameras = some_cameras(5)
    views, rows, columns = pixels(200, cameras)
    rays = pixel_rays(cameras, views, rows, columns)
    depth = torch.rand(200, 1, dtype=torch.float64) * 9 + 0.1
    points = (rays.origins + depth * rays.directions).numpy()
    for view, row, column, point in zip(views.tolist(), rows.tolist(), columns.tolist(), points, strict=True):
        pose, (fx, fy, cx, cy) = cameras.poses[view], cameras.intrinsics[view]
        x, y, z = pose[:, :3].T @ (point - pose[:, 3])
        assert (cx + fx * x / -z, cy - fy * y / -z) == pytest.approx((column + 0.5, row + 0.5), abs=1e-9)
    assert rays.views.norm(dim=-1).allclose(torch.ones(200, dtype=torch.float64))


def test_device_coordinates_are_the_projection_of_the_points_they_stand_for():
    """t' = 1 - o_z / (o_z + t d_z), and the projection (-a x/z, -b y/z, 1 + 2 n/z), both of appendix C, in float64."""
    cameras = some_cameras(4, forward=True)
    near, a, b = 1.0 + float(torch.rand(())), 1.7, 2.3
    world = pixel_rays(cameras, *pixels(100, cameras))
    assert (world.directions[:, 2] < 0).all()
    device = ndc_rays(world, a, b, near)
    start = world.origins + (-(near + world.origins[:, 2:]) / world.directions[:, 2:]) * world.directions
    assert start[:, 2].allclose(torch.full((100,), -near, dtype=torch.float64))
    for t in (0.0, 0.1, 2.0, 1e5):
        x, y, z = (start + t * world.directions).unbind(-1)
        expected = torch.stack([-a * x / z, -b * y / z, 1 + 2 * near / z], -1)
        moved = 1 - start[:, 2] / (start[:, 2] + t * world.directions[:, 2])
        assert (device.origins + moved[:, None] * device.directions).allclose(expected, rtol=1e-9, atol=1e-9)
    assert device.origins[:, 2].allclose(-torch.ones(100, dtype=torch.float64))
    assert (device.origins + device.directions)[:, 2].allclose(torch.ones(100, dtype=torch.float64))


def constant(density: float, colour: tuple[float, float, float]):
    def field(points: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        return points.new_full(points.shape[:-1], density), points.new_tensor(colour).expand_as(points)

    return field


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("density", [1e-6, 0.3, 40.0, 1e9])
def test_slab_has_its_closed_form_colour(density, fine):
    """colour (1 - exp(-s L)) + background exp(-s L), in float32 to rounding."""
    rays = Rays(torch.randn(8, 3), torch.randn(8, 3), torch.randn(8, 3))
    near, far = 0.5, 3.0
    colour = (0.2, 0.7, 0.4)
    field = constant(density, colour)
    places = torch.rand(8, 5), torch.rand(8, 9) if fine else None
    for background in (0.0, 1.0):
        seen = render(field, None, rays, *places, near=near, far=far, background=background)[-1]
        length = (far - near) * rays.directions.double().norm(dim=-1)
        through = torch.exp(-density * length)[:, None]
        expected = torch.tensor(colour).double() * (1 - through) + background * through
        assert seen.double().allclose(expected, rtol=1e-5, atol=1e-7)
    onward = render(field, None, rays, *places, near=near, far=far, background=None)[-1]
    assert onward.allclose(torch.tensor(colour).expand(8, 3), rtol=1e-5)


def test_compositing_is_the_quadrature_in_float64_with_thick_and_thin_intervals():
    t = torch.rand(6, 12).sort(-1).values * 4 + 1
    density = torch.rand(6, 12) * 10.0 ** torch.randint(-7, 7, (6, 12))
    density[0] = 0
    colour, lengths = torch.rand(6, 12, 3), torch.rand(6) + 0.5
    seen, weights = composite(density, colour, t, 1.0, 5.0, lengths, 0.25)
    for ray in range(6):
        left, expected = 1.0, np.zeros(3)
        edges = [1.0, *((t[ray, 1:].double() + t[ray, :-1].double()) / 2).tolist(), 5.0]
        for i in range(12):
            stopped = -np.expm1(-float(density[ray, i]) * (edges[i + 1] - edges[i]) * float(lengths[ray]))
            assert float(weights[ray, i]) == pytest.approx(left * stopped, rel=2e-3, abs=1e-7)
            expected += left * stopped * colour[ray, i].double().numpy()
            left *= 1 - stopped
        assert seen[ray].tolist() == pytest.approx((expected + 0.25 * left).tolist(), abs=1e-5)


def test_empty_volume_shows_the_background_with_finite_gradients():
    density = torch.zeros(3, 4, requires_grad=True)
    colour = torch.rand(3, 4, 3, requires_grad=True)
    t = stratified(torch.full((3, 4), 0.5), 0.0, 1.0)
    seen, _ = composite(density, colour, t, 0.0, 1.0, torch.ones(3), 1.0)
    assert seen.equal(torch.ones(3, 3))
    seen.sum().backward()
    # A little density darkens by the interval times (colour - background).
    expected = (0.25 * (colour.detach() - 1)).sum(-1)
    assert density.grad.allclose(expected, rtol=1e-5)


def test_gradients_of_compositing_are_those_of_finite_differences():
    inputs = (torch.rand(2, 5).double() * 3, torch.rand(2, 5, 3).double())
    t, lengths = torch.rand(2, 5).double().sort(-1).values, torch.ones(2).double()
    for background in (0.5, None):
        torch.autograd.gradcheck(
            lambda density, colour, behind=background: composite(density, colour, t, 0.0, 1.0, lengths, behind)[0],
            [each.clone().requires_grad_() for each in inputs],
        )


def test_stratified_samples_lie_one_in_each_bin_and_uniformly():
    # In float64: in float32 one draw in some 10^6 is rounded up to its bin's far edge.
    t = stratified(torch.rand(4000, 6).double(), 2.0, 5.0)
    bins = (t - 2.0) / 0.5
    assert bins.floor().equal(torch.arange(6.0).double().expand(4000, 6))
    inside = (bins - bins.floor()).flatten().sort().values
    # Kolmogorov-Smirnov at 24,000 draws: beyond 0.018 once in 10^6 runs.
    assert (inside - (torch.arange(24000) + 0.5) / 24000).abs().max() < 0.018
    middles = stratified(torch.full((2, 4), 0.5), 0.0, 1.0)
    assert middles.allclose(torch.tensor([0.125, 0.375, 0.625, 0.875]).expand(2, 4))


def test_hierarchical_samples_follow_the_weights():
    edges = torch.tensor([0.0, 0.5, 0.6, 2.0, 3.0]).expand(2, 5)
    weights = torch.rand(2, 4)
    weights[0, 1] = 0
    drawn = importance(edges, weights, torch.rand(2, 20000))
    assert drawn.equal(drawn.sort(-1).values)
    for ray in range(2):
        share = (weights[ray] / weights[ray].sum()).double()
        for value in (0.2, 0.5, 0.55, 0.6, 1.1, 2.0, 2.7):
            filled = ((value - edges[ray, :-1]) / edges[ray].diff()).clamp(0, 1).double()
            assert (drawn[ray] < value).double().mean().item() == pytest.approx((share * filled).sum().item(), abs=2e-3)
    assert not ((drawn[0] > 0.5001) & (drawn[0] < 0.5999)).any()


def test_hierarchical_samples_of_an_empty_ray_spread_over_it_and_those_of_a_spike_stay_in_it():
    edges = interval_edges(stratified(torch.full((1, 64), 0.5), 0.0, 1.0), 0.0, 1.0)
    spread = importance(edges, torch.zeros(1, 64), torch.full((1, 100), 0.5))
    assert spread.allclose((torch.arange(100) + 0.5)[None] / 100, atol=1e-5)
    spike = torch.full((1, 64), 1e-12)
    spike[0, 40] = 1.0
    drawn = importance(edges, spike, torch.full((1, 1000), 0.5))
    assert ((drawn >= edges[0, 40]) & (drawn <= edges[0, 41])).all()
    assert drawn.isfinite().all()


def test_fine_samples_find_a_thin_wall_that_coarse_ones_blur():
    """A wall between t = 2 and 2.05: 12 coarse samples misplace it, 48 fine ones around them do not."""

    def wall(points: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        inside = torch.sigmoid(400 * (points[..., 2] - 2.0))
        return 200 * inside, points[..., 2:].expand_as(points)  # seen is the depth

    rays = Rays(torch.zeros(50, 3), torch.tensor([[0.0, 0.0, 1.0]]).expand(50, 3), torch.zeros(50, 3))
    coarse, fine = render(wall, None, rays, torch.rand(50, 12), torch.rand(50, 48), near=1.0, far=3.0, background=0.0)
    assert (fine - 2.0).abs().mean() < 0.35 * (coarse - 2.0).abs().mean()
