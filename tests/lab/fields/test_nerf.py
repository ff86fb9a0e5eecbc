"""Radiance fields: rays, sampling and compositing against float64 formulas; batches, loss, scores, pictures, fits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import Tensor, nn

from nlr_lab.fields import rendering
from nlr_lab.fields.fit import FitConfig, fit
from nlr_lab.fields.nerf import NerfProblem, NerfSettings
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.scenes import demo_scene, demo_volume
from nlr_lab.fields.settings import RadianceConfig
from refusals import assert_refused
from seeds import rng

TINY = RadianceConfig(width=16, layers=2, view_width=16)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(int(torch.randint(1 << 30, ())))


def tiny_problem(**settings) -> NerfProblem:
    scene = demo_scene(views=4, size=16, held_out=(1,))
    return NerfProblem(scene, NerfSettings(field=TINY, **{"rays": 32, "samples": 8, "frames": 0, **settings}))


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, points, views, fine=False):
        return demo_volume(points, views)


def test_batches_follow_from_the_generator_and_show_training_views_alone():
    problem = tiny_problem(rays=400, fine_samples=3)
    seed = int(torch.randint(1 << 30, ()))

    def batch(step, own):
        return problem.batch(step, torch.Generator().manual_seed(own))

    first, again, other, same = batch(0, seed), batch(9, seed + 1), batch(0, seed + 2), batch(7, seed)
    assert all(one.equal(two) for one, two in zip(first, same, strict=True))
    assert not first[0].equal(other[0])
    assert not first[3].equal(again[3])
    assert [tuple(each.shape) for each in first] == [*[(400, 3)] * 4, (400, 8), (400, 3)]
    positions = torch.from_numpy(problem.scene.cameras.poses[:, :, 3]).float()
    view = torch.cdist(first[0], positions).argmin(-1)
    assert set(view.tolist()) == {0, 2, 3}
    # The colour belongs to the ray: its pixel is where the ray goes through.
    pose, (fx, fy, cx, cy) = problem.scene.cameras.poses[view], problem.scene.cameras.intrinsics[0]
    local = np.einsum("rij,ri->rj", pose[:, :, :3], first[1].double().numpy())
    column, row = np.rint(cx + fx * local[:, 0] - 0.5).astype(int), np.rint(cy - fy * local[:, 1] - 0.5).astype(int)
    assert np.array_equal(problem.scene.images[view, row, column], first[3].numpy())


def test_true_volume_has_next_to_no_loss_and_scores_high():
    problem = tiny_problem(samples=100)
    assert problem.loss(Volume(), problem.batch(0, generator())) < 1e-3
    scores = problem.evaluate(Volume())
    assert list(scores) == ["psnr", "ssim"]
    assert scores["psnr"] > 60
    assert scores["ssim"] > 0.999
    assert np.array_equal(problem.picture(Volume()), problem.picture(None))


def test_scores_are_means_over_the_views_by_their_formulas():
    problem = tiny_problem()
    problem.scene = replace(problem.scene, held_out=(1, 2))
    truths = problem.scene.images
    wrong = np.clip(truths + rng().normal(0, 0.1, truths.shape).astype(np.float32), 0, 1)
    problem.view = lambda model, cameras, number: wrong[number]

    def blurred(x):
        return gaussian_filter(x, 1.5, truncate=3.5, axes=(0, 1))[5:-5, 5:-5]

    psnr, ssim = [], []
    for view in (1, 2):
        a, b = truths[view].astype(np.float64), wrong[view].astype(np.float64)
        psnr.append(-10 * np.log10(np.square(a - b).mean()))
        mean, other = blurred(a), blurred(b)
        shared = 2 * (blurred(a * b) - mean * other) + 0.03**2
        apart = blurred(a * a) - mean**2 + blurred(b * b) - other**2 + 0.03**2
        ssim.append(((2 * mean * other + 0.01**2) / (mean**2 + other**2 + 0.01**2) * shared / apart).mean())
    assert problem.evaluate(Volume()) == pytest.approx({"psnr": np.mean(psnr), "ssim": np.mean(ssim)}, rel=1e-4)


def test_scores_fall_with_noise():
    problem = tiny_problem()
    truth = problem.scene.images[1]
    wrong = np.clip(truth + rng().normal(0, 0.1, truth.shape).astype(np.float32), 0, 1)
    problem.view = lambda model, cameras, number: wrong
    scores = problem.evaluate(Volume())
    assert scores["psnr"] == pytest.approx(-10 * np.log10(np.mean((wrong.astype(np.float64) - truth) ** 2)), abs=1e-4)
    assert scores["ssim"] < 0.97


def llff(tmp_path):
    scene = demo_scene(views=3, size=16)
    poses = np.tile(np.eye(3, 4), (3, 1, 1))
    poses[:, :2, 3] = rng().normal(0, 0.1, (3, 2))
    lens = np.tile([[16.0], [16], [18]], (3, 1, 1))
    table = np.concatenate([-poses[:, :, 1:2], poses[:, :, :1], poses[:, :, 2:], lens], 2)
    rows = np.concatenate([table.reshape(3, 15), np.tile([1.5, 9.0], (3, 1))], 1)
    np.savez(tmp_path / "s.npz", images=np.rint(scene.images * 255).astype(np.uint8), poses_bounds=rows)
    return NerfSettings(source=str(tmp_path / "s.npz"), rays=50, samples=4, field=TINY).prepare()


def test_device_coordinates_run_from_the_near_plane_to_the_far_one(tmp_path):
    problem = llff(tmp_path)
    origins, directions, views, *_ = problem.batch(0, generator())
    assert origins[:, 2].allclose(-torch.ones(50), atol=1e-5)
    assert (origins + directions)[:, 2].allclose(torch.ones(50), atol=1e-5)
    assert (views[:, 2] < 0).all()
    assert problem.evaluate(problem.build(FieldMethod(), generator()))["psnr"] > 0


def test_bounds_of_the_demos_scene_are_its_own():
    assert_refused("near does nothing: the demo's scene has bounds of its own", NerfSettings(near=0.5).prepare)


def test_frames_that_no_path_can_be_made_for_are_refused_before_training():
    """Views outwards from one spot: their axes meet where the cameras are."""
    turn = 2 * np.pi * np.arange(4) / 4
    poses = np.zeros((4, 3, 4))
    poses[:, 0, 0] = poses[:, 2, 2] = np.cos(turn)
    poses[:, 0, 2], poses[:, 2, 0], poses[:, 1, 1] = np.sin(turn), -np.sin(turn), 1
    scene = demo_scene(views=4, size=16)
    scene = replace(scene, cameras=replace(scene.cameras, poses=poses))
    words = "no path can be made for the frames of .*, or set frames to 0"
    assert_refused(words, NerfProblem, scene, NerfSettings(field=TINY, frames=2))
    NerfProblem(scene, NerfSettings(field=TINY, frames=0))
    # a fit that was begun with frames can be ended without them
    assert tiny_problem(frames=3).fingerprint == tiny_problem(frames=0, frame_downscale=1).fingerprint


def test_learns_a_scene_and_writes_pictures(tmp_path):
    problem = tiny_problem(frames=3, rays=64, fine_samples=2)
    method = FieldMethod(kind="sine", rank=4)
    config = FitConfig(steps=40, lr=5e-3, eval_every=40, save_every=0, threads=1, device="cpu")
    start, batch = problem.build(method, torch.Generator().manual_seed(0)), problem.batch(0, generator())
    assert start.coarse.feature.sine_config.omega == 1400, "the published table's"
    found = fit(problem, method, config, tmp_path, quiet=True)
    assert not any(one.equal(two) for one, two in zip(start.parameters(), found.model.parameters(), strict=True))
    assert problem.loss(found.model, batch) < 0.9 * problem.loss(start, batch)
    names = ["view-001.png", "path.gif", *(f"path/frame-{number:03d}.png" for number in range(3))]
    assert found.files == [f"pictures/{name}" for name in names]
    with Image.open(tmp_path / found.files[0]) as beside:
        assert beside.size == (2 * 16 + 4, 16)
        assert np.array_equal(np.asarray(beside)[:, :16], problem.picture(None))
    with Image.open(tmp_path / found.files[2]) as frame:
        assert frame.size == (8, 8)


def some_cameras(views: int, height: int = 7, width: int = 9, *, forward: bool = False) -> rendering.Cameras:
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
    return rendering.Cameras(poses, np.concatenate([focal, centre], 1), height, width)


def pixels(count: int, cameras: rendering.Cameras) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randint(size, (count,)) for size in (len(cameras), cameras.height, cameras.width))


def test_ray_projects_back_onto_its_pixels_centre():
    cameras = some_cameras(5)
    views, rows, columns = pixels(200, cameras)
    rays = rendering.pixel_rays(cameras, views, rows, columns)
    points = (rays.origins + (torch.rand(200, 1).double() * 9 + 0.1) * rays.directions).numpy()
    poses, (fx, fy, cx, cy) = cameras.poses[views], cameras.intrinsics[views].T
    x, y, z = np.einsum("rij,ri->jr", poses[:, :, :3], points - poses[:, :, 3])
    np.testing.assert_allclose(cx + fx * x / -z, columns + 0.5, atol=1e-9)
    np.testing.assert_allclose(cy - fy * y / -z, rows + 0.5, atol=1e-9)


def test_device_coordinates_are_the_projection_of_the_points_they_stand_for():
    """t' = 1 - o_z / (o_z + t d_z), and the projection (-a x/z, -b y/z, 1 + 2 n/z), both of appendix C, in float64."""
    cameras = some_cameras(4, forward=True)
    near, a, b = 1.0 + float(torch.rand(())), 1.7, 2.3
    world = rendering.pixel_rays(cameras, *pixels(100, cameras))
    assert (world.directions[:, 2] < 0).all()
    device = rendering.ndc_rays(world, a, b, near)
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
    rays = rendering.Rays(torch.randn(8, 3), torch.randn(8, 3), torch.randn(8, 3))
    near, far = 0.5, 3.0
    colour = (0.2, 0.7, 0.4)
    field = constant(density, colour)
    places = torch.rand(8, 5), torch.rand(8, 9) if fine else None
    for background in (0.0, 1.0):
        seen = rendering.render(field, None, rays, *places, near=near, far=far, background=background)[-1]
        length = (far - near) * rays.directions.double().norm(dim=-1)
        through = torch.exp(-density * length)[:, None]
        expected = torch.tensor(colour).double() * (1 - through) + background * through
        assert seen.double().allclose(expected, rtol=1e-5, atol=1e-7)
    onward = rendering.render(field, None, rays, *places, near=near, far=far, background=None)[-1]
    assert onward.allclose(torch.tensor(colour).expand(8, 3), rtol=1e-5)


def test_compositing_is_the_quadrature_in_float64_with_thick_and_thin_intervals():
    t = torch.rand(6, 12).sort(-1).values * 4 + 1
    density = torch.rand(6, 12) * 10.0 ** torch.randint(-7, 7, (6, 12))
    density[0] = 0
    colour, lengths = torch.rand(6, 12, 3), torch.rand(6) + 0.5
    seen, weights = rendering.composite(density, colour, t, 1.0, 5.0, lengths, 0.25)
    for ray in range(6):
        left, expected = 1.0, np.zeros(3)
        edges = [1.0, *((t[ray, 1:].double() + t[ray, :-1].double()) / 2).tolist(), 5.0]
        for i in range(12):
            stopped = -np.expm1(-float(density[ray, i]) * (edges[i + 1] - edges[i]) * float(lengths[ray]))
            assert float(weights[ray, i]) == pytest.approx(left * stopped, rel=2e-3, abs=1e-7)
            expected += left * stopped * colour[ray, i].double().numpy()
            left *= 1 - stopped
        assert seen[ray].tolist() == pytest.approx((expected + 0.25 * left).tolist(), abs=1e-5)


def test_stratified_samples_lie_one_in_each_bin():
    # In float64: in float32 one draw in some 10^6 is rounded up to its bin's far edge.
    bins = (rendering.stratified(torch.rand(4000, 6).double(), 2.0, 5.0) - 2.0) / 0.5
    assert bins.floor().equal(torch.arange(6.0).double().expand(4000, 6))
    middles = rendering.stratified(torch.full((2, 4), 0.5), 0.0, 1.0)
    assert middles.allclose(torch.tensor([0.125, 0.375, 0.625, 0.875]).expand(2, 4))


def test_hierarchical_samples_follow_the_weights():
    edges = torch.tensor([0.0, 0.5, 0.6, 2.0, 3.0]).expand(2, 5)
    weights = torch.rand(2, 4)
    weights[0, 1] = 0
    drawn = rendering.importance(edges, weights, torch.rand(2, 20000))
    assert drawn.equal(drawn.sort(-1).values)
    for ray in range(2):
        share = (weights[ray] / weights[ray].sum()).double()
        for value in (0.2, 0.5, 0.55, 0.6, 1.1, 2.0, 2.7):
            filled = ((value - edges[ray, :-1]) / edges[ray].diff()).clamp(0, 1).double()
            assert (drawn[ray] < value).double().mean().item() == pytest.approx((share * filled).sum().item(), abs=2e-3)
    assert not ((drawn[0] > 0.5001) & (drawn[0] < 0.5999)).any()


def test_hierarchical_samples_of_an_empty_ray_spread_and_those_of_a_spike_stay_in_it():
    edges = rendering.interval_edges(rendering.stratified(torch.full((1, 64), 0.5), 0.0, 1.0), 0.0, 1.0)
    spread = rendering.importance(edges, torch.zeros(1, 64), torch.full((1, 100), 0.5))
    assert spread.allclose((torch.arange(100) + 0.5)[None] / 100, atol=1e-5)
    spike = torch.full((1, 64), 1e-12)
    spike[0, 40] = 1.0
    drawn = rendering.importance(edges, spike, torch.full((1, 1000), 0.5))
    assert ((drawn >= edges[0, 40]) & (drawn <= edges[0, 41])).all()


def test_fine_field_is_asked_at_coarse_and_fine_samples():
    asked = []

    def field(points, views):
        asked.append(points)
        return constant(0.3, (0.2, 0.7, 0.4))(points, views)

    rays = rendering.Rays(torch.randn(8, 3), torch.randn(8, 3), torch.randn(8, 3))
    rendering.render(field, field, rays, torch.rand(8, 5), torch.rand(8, 9), near=0.5, far=3.0, background=1.0)
    assert [each.shape[1] for each in asked] == [5, 5 + 9]


def test_device_coordinates_reach_from_side_to_side(tmp_path):
    """With the cameras at one place the outermost pixels of the near plane are half a pixel from -1 and 1."""
    poses = np.tile(np.eye(3, 4), (3, 1, 1))
    lens = np.tile([[12.0], [16], [18]], (3, 1, 1))
    table = np.concatenate([-poses[:, :, 1:2], poses[:, :, :1], poses[:, :, 2:], lens], 2)
    rows = np.concatenate([table.reshape(3, 15), np.tile([1.5, 9.0], (3, 1))], 1)
    np.savez(tmp_path / "s.npz", images=np.zeros((3, 12, 16, 3), np.uint8), poses_bounds=rows)
    problem = NerfSettings(source=str(tmp_path / "s.npz"), rays=1000, samples=4, frames=0, field=TINY).prepare()
    origins, *_ = problem.batch(0, generator())
    assert origins[:, :2].abs().amax(0).tolist() == pytest.approx([15 / 16, 11 / 12], rel=1e-5)
