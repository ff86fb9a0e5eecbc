"""The paper's network by its counts; the problem: batches, loss, scores, pictures, fits."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from nlr_lab.fields.fit import FitConfig, fit
from nlr_lab.fields.model import RadianceNet
from nlr_lab.fields.nerf import NerfProblem, NerfSettings
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.scenes import demo_scene, demo_volume
from nlr_lab.fields.settings import RadianceConfig
from nonlinear_lowrank import UserError
from nonlinear_lowrank.methods.sine.layer import SineLowRankLinear
from seeds import rng

TINY = RadianceConfig(width=16, layers=2, view_width=16)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(int(torch.randint(1 << 30, ())))


def tiny_problem(**settings) -> NerfProblem:
    scene = demo_scene(views=4, size=16, held_out=(1,))
    return NerfProblem(scene, NerfSettings(field=TINY, **{"rays": 32, "samples": 8, "frames": 0, **settings}))


class Volume(nn.Module):
    """The demo's own volume, as a model."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, points, views, fine=False):
        return demo_volume(points, views)


@pytest.mark.parametrize(
    ("rank", "parameters", "printed"),
    [
        (None, 561_284, 100),
        (1, 7_565, 1.3),
        (5, 26_259, 4.7),
        (10, 48_674, 8.7),
        (30, 138_334, 24.6),
        (60, 272_824, 48.6),
    ],
)
def test_network_has_the_papers_counts(rank, parameters, printed):
    for kind in ("dense",) if rank is None else ("low-rank", "sine"):
        omega = {"omega": "nerf"} if kind == "sine" else {}
        net = RadianceNet(RadianceConfig(), FieldMethod(kind=kind, rank=rank, **omega), generator())
        assert sum(each.numel() for each in net.parameters()) == parameters
        # 1.3 is cut off, not rounded.
        assert abs(100 * parameters / 561_284 - printed) < 0.1
        assert not isinstance(net.alpha, SineLowRankLinear)
        assert isinstance(net.layers[4], SineLowRankLinear) == (rank is not None)


def test_omega_follows_the_published_table_unless_given():
    problem = tiny_problem()
    for method, omega in ((FieldMethod(kind="sine", rank=5), 800), (FieldMethod(kind="sine", rank=5, omega=7), 7)):
        assert problem.build(method, generator()).coarse.feature.sine_config.omega == omega


@pytest.mark.parametrize("density_of", ["softplus", "relu"])
def test_network_computes_the_formula(density_of):
    config = RadianceConfig(width=16, layers=3, view_width=8, spread=0.3, density=density_of)
    net = RadianceNet(config, FieldMethod(), generator()).double()
    points, views = torch.randn(5, 4, 3).double(), torch.randn(5, 4, 3).double()
    density, colour = net(points, views)
    hidden = points
    for layer in net.layers:
        hidden = torch.exp(-((hidden @ layer.weight.T + layer.bias) ** 2) / (2 * 0.3**2))
    raw = hidden @ net.alpha.weight.T + net.alpha.bias
    seen = torch.cat([hidden @ net.feature.weight.T + net.feature.bias, views], -1)
    seen = torch.exp(-((seen @ net.view.weight.T + net.view.bias) ** 2) / (2 * 0.3**2))
    expected = raw.clamp_min(0) if density_of == "relu" else torch.log(1 + raw.exp())
    assert density.allclose(expected[..., 0])
    assert colour.allclose(1 / (1 + torch.exp(-(seen @ net.rgb.weight.T + net.rgb.bias))))


def test_encodings_widen_the_inputs_alone():
    net = RadianceNet(RadianceConfig(width=8, octaves=10, view_octaves=4), FieldMethod(), generator())
    assert net.layers[0].in_features == 63
    assert net.view.in_features == 8 + 27
    density, colour = net(torch.randn(2, 3), torch.randn(2, 3))
    assert (density.shape, colour.shape) == ((2,), (2, 3))


def test_batches_follow_from_the_generator_and_show_training_views_alone():
    problem = tiny_problem(rays=400, fine_samples=3)
    seed = int(torch.randint(1 << 30, ()))
    first, again, other = (
        problem.batch(step, torch.Generator().manual_seed(seed + place)) for place, step in enumerate((0, 9, 0))
    )
    same = problem.batch(7, torch.Generator().manual_seed(seed))
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


def test_scores_are_those_of_the_formulas():
    """PSNR by its definition in float64; SSIM falls with noise and is 1 for the picture itself."""
    problem = tiny_problem()
    noise = rng().normal(0, 0.1, problem.scene.images[1].shape).astype(np.float32)
    wrong = np.clip(problem.scene.images[1] + noise, 0, 1)
    problem.view = lambda model, cameras, number: wrong
    error = np.mean((wrong.astype(np.float64) - problem.scene.images[1]) ** 2)
    scores = problem.evaluate(Volume())
    assert scores["psnr"] == pytest.approx(-10 * np.log10(error), abs=1e-4)
    assert scores["ssim"] < 0.97
    problem.view = lambda model, cameras, number: np.clip(problem.scene.images[1] + 1e-4, 0, 1)
    assert problem.evaluate(Volume())["ssim"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("fine", [0, 6])
@pytest.mark.parametrize("kind", ["dense", "low-rank", "sine"])
def test_gradients_reach_every_parameter(kind, fine):
    problem = tiny_problem(fine_samples=fine)
    model = problem.build(FieldMethod(kind=kind, rank=None if kind == "dense" else 2), generator())
    assert (model.fine is None) == (fine == 0)
    problem.loss(model, problem.batch(0, generator())).backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in model.parameters())


def test_learns_a_scene_resumes_bit_exactly_and_writes_pictures(tmp_path):
    problem = tiny_problem(frames=3, rays=64)
    method = FieldMethod(kind="sine", rank=4, omega=30)
    config = FitConfig(steps=40, lr=5e-3, eval_every=40, save_every=15, threads=1, device="cpu")
    whole = fit(problem, method, config, tmp_path / "whole", quiet=True)
    start, batch = problem.build(method, torch.Generator().manual_seed(0)), problem.batch(0, generator())
    assert problem.loss(whole.model, batch) < 0.9 * problem.loss(start, batch)

    class Killed(Exception):
        pass

    class Stopping(NerfProblem):
        def batch(self, step, generator):
            if step == 33:
                raise Killed
            return super().batch(step, generator)

    with pytest.raises(Killed):
        fit(Stopping(problem.scene, problem.settings), method, config, tmp_path / "killed", quiet=True)
    again = fit(problem, method, config, tmp_path / "killed", quiet=True, resume=True)
    assert again.metrics == whole.metrics
    for name, tensor in whole.model.state_dict().items():
        assert tensor.equal(again.model.state_dict()[name]), name
    names = ["view-001.png", "path.gif", *(f"path/frame-{number:03d}.png" for number in range(3))]
    assert whole.files == [f"pictures/{name}" for name in names]
    with Image.open(tmp_path / "whole" / whole.files[0]) as beside:
        assert beside.size == (2 * 16 + 4, 16)
        left = np.asarray(beside)[:, :16]
    assert np.array_equal(left, problem.picture(None))
    with Image.open(tmp_path / "whole" / whole.files[2]) as frame:
        assert frame.size == (8, 8)
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["metrics"]["psnr"] > 0


def test_device_coordinates_are_used_for_a_scene_without_end(tmp_path):
    """Rays of an LLFF scene begin on the near plane and end on the far one: z from -1 to 1."""
    scene = demo_scene(views=3, size=16)
    poses = np.tile(np.eye(3, 4), (3, 1, 1))
    poses[:, :2, 3] = rng().normal(0, 0.1, (3, 2))
    table = np.concatenate(
        [-poses[:, :, 1:2], poses[:, :, :1], poses[:, :, 2:], np.tile([[16.0], [16], [18]], (3, 1, 1))], 2
    )
    rows = np.concatenate([table.reshape(3, 15), np.tile([1.5, 9.0], (3, 1))], 1)
    np.savez(tmp_path / "s.npz", images=np.rint(scene.images * 255).astype(np.uint8), poses_bounds=rows)
    problem = NerfSettings(source=str(tmp_path / "s.npz"), rays=50, samples=4, field=TINY).prepare()
    origins, directions, views, *_ = problem.batch(0, generator())
    assert origins[:, 2].allclose(-torch.ones(50), atol=1e-5)
    assert (origins + directions)[:, 2].allclose(torch.ones(50), atol=1e-5)
    assert (views[:, 2] < 0).all()
    model = problem.build(FieldMethod(), generator())
    assert problem.picture(model).shape == (16, 16, 3)
    assert problem.evaluate(model)["psnr"] > 0


def test_frames_that_no_path_can_be_made_for_are_refused_before_training():
    """Views outwards from one spot: their axes meet where the cameras are."""
    angle = 2 * np.pi * np.arange(12) / 12
    poses = np.zeros((12, 3, 4))
    poses[:, 0, 0] = poses[:, 2, 2] = np.cos(angle)
    poses[:, 0, 2], poses[:, 2, 0] = np.sin(angle), -np.sin(angle)
    poses[:, 1, 1] = 1
    scene = demo_scene(views=12, size=16)
    scene = replace(scene, cameras=replace(scene.cameras, poses=poses))
    with pytest.raises(UserError, match=r"no path can be made for the frames of .*, or set frames to 0"):
        NerfProblem(scene, NerfSettings(field=TINY, frames=2))
    without = NerfProblem(scene, NerfSettings(field=TINY, frames=0))
    assert without.picture(None).shape == (16, 16, 3)
    # a fit that was begun with frames can be ended without them
    assert tiny_problem(frames=3).fingerprint == tiny_problem(frames=0, frame_downscale=1).fingerprint


def test_settings_out_of_range_are_named():
    for settings, match in [
        ({"rays": 0}, "rays must be"),
        ({"samples": 1}, "samples must be"),
        ({"fine_samples": -1}, "fine_samples must be"),
        ({"downscale": 40}, "views of 1 x 1 pixels; SSIM needs 11 x 11"),
        ({"frame_downscale": 41}, "frames cannot be 41 times smaller"),
        ({"downscale": 0}, "downscale must be"),
        ({"source": "/nowhere"}, "there is no file or folder"),
    ]:
        with pytest.raises(UserError, match=match):
            NerfSettings(**settings).prepare()
    for wrong, match in [
        ({"spread": 0.0}, "spread"),
        ({"activation": "tanh"}, "unknown activation"),
        ({"width": 0}, "w"),
    ]:
        with pytest.raises(UserError, match=match):
            RadianceConfig(**wrong)
