"""Images as fields: positions, metrics, files, refusals."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from nlr_lab.fields.image import ImageProblem, ImageSettings, positions, psnr, read_image
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.settings import FieldConfig
from refusals import assert_refused

SMALL = FieldConfig(in_features=2, out_features=3, width=16)


def _image(height: int = 6, width: int = 10, seed: int = 0, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def test_positions_are_pixel_centres_row_by_row_with_square_pixels():
    found = positions(2, 4)
    assert found[:, 0].tolist() == [-0.75, -0.25, 0.25, 0.75] * 2
    assert found[:, 1].tolist() == [-0.25] * 4 + [0.25] * 4


def test_batch_holds_pixels_at_their_places():
    pixels = _image()
    where, values = ImageProblem(pixels, points=40, field=SMALL).batch(3, torch.Generator().manual_seed(1))
    column = ((where[:, 0] * 5 + 5) - 0.5).round().long()
    row = ((where[:, 1] * 5 + 3) - 0.5).round().long()
    assert torch.equal((values * 255).round().long(), torch.from_numpy(pixels.astype(np.int64))[row, column])
    assert len(set(zip(column.tolist(), row.tolist(), strict=True))) > 15
    assert len(ImageProblem(pixels, points=0, field=SMALL).batch(0, torch.Generator())[0]) == 60


def test_psnr_is_that_of_the_definition():
    truth, other = _image(seed=1), _image(seed=2)
    error = sum((int(a) - int(b)) ** 2 for a, b in zip(truth.flat, other.flat, strict=True)) / truth.size
    assert psnr(other, truth) == pytest.approx(20 * math.log10(255 / math.sqrt(error)))
    assert psnr(truth, truth) == pytest.approx(10 * math.log10(255**2 * truth.size)), "as if one number were off by one"


def test_metrics_count_the_bits_they_say_and_pictures_are_written(tmp_path):
    problem = ImageProblem(_image(), field=SMALL)
    model = problem.build(FieldMethod(kind="sine", rank=1, omega=500.0), torch.Generator().manual_seed(0))
    before = [each.clone() for each in model.parameters()]
    found = problem.evaluate(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    parameters = sum(each.numel() for each in before)
    assert (found["bits_per_pixel"], found["bits_per_pixel_half"]) == (32 * parameters / 60, 16 * parameters / 60)
    assert found["psnr"] == psnr(problem.picture(model), problem.picture(None))
    written = problem.write(model, tmp_path)
    assert [each.name for each in written] == ["fitted.png", "truth.png"]
    for file, expected in zip(written, (problem.picture(model), _image()), strict=True):
        assert np.array_equal(np.asarray(Image.open(file)), expected)
    for each in model.parameters():
        each.data = each.data.half().float()
    assert problem.evaluate(model)["psnr"] == found["psnr_half"] != found["psnr"]


def test_prepares_crops_sizes_and_the_embedded_photographs(tmp_path):
    Image.fromarray(_image(20, 30)).save(tmp_path / "photo.png")
    cropped = ImageSettings(source=str(tmp_path / "photo.png"), crop=10, field=SMALL).prepare()
    assert np.array_equal(cropped.picture(None), _image(20, 30)[5:15, 10:20])
    assert cropped.name == "photo"
    smaller = ImageSettings(source=str(tmp_path / "photo.png"), size=15, field=SMALL).prepare()
    assert smaller.picture(None).shape == (10, 15, 3)
    assert ImageSettings(source="flower", crop=64).prepare().picture(None).shape == (64, 64, 3)


def test_fingerprint_tells_images_and_networks_apart():
    arrays = _image(), _image(), _image(seed=1), _image(10, 6)
    problems = [ImageProblem(each, field=SMALL) for each in arrays]
    problems += [ImageProblem(_image(), field=SMALL, points=3), ImageProblem(_image())]
    assert len({each.fingerprint for each in problems}) == 5


def test_files_that_are_no_images_are_refused_by_name(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("no image")
    Image.fromarray(_image(40, 40)).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:200])
    deep = np.arange(64).reshape(8, 8)
    Image.fromarray(deep.astype(np.int32)).save(tmp_path / "whole.tif")
    Image.fromarray(deep.astype(np.float32)).save(tmp_path / "real.tif")
    Image.fromarray(_image(4, 4)).save(tmp_path / "small.png")
    for name, message in (
        ("absent.png", "no such file"),
        ("", "no such file"),
        ("empty.png", "cannot read the image .*empty.png"),
        ("text.png", "cannot read the image .*text.png"),
        ("cut.png", "cannot read the image .*cut.png"),
        ("whole.tif", r"whole.tif: its values are 32-bit \(mode I\).*8 or 16 bits"),
        ("real.tif", r"real.tif: its values are 32-bit \(mode F\).*8 or 16 bits"),
        ("small.png", r"crop 5 is larger than .*, 4 x 4 pixels"),
    ):
        assert_refused(message, ImageSettings(source=str(tmp_path / name), crop=5, field=SMALL).prepare)


@pytest.mark.parametrize(
    ("pixels", "field", "message"),
    [
        (np.zeros((0, 8, 3), np.uint8), SMALL, r"an array \(height, width, 3\) of some pixels"),
        (np.zeros((8, 8), np.uint8), SMALL, r"an array \(height, width, 3\)"),
        (np.full((4, 4, 3), np.nan), SMALL, "floats from 0 to 1"),
        (np.full((4, 4, 3), 2.0), SMALL, "floats from 0 to 1"),
        (np.full((4, 4, 3), 2), SMALL, "floats from 0 to 1"),
        (_image(), FieldConfig(), "in_features 2 and out_features 3"),
    ],
)
def test_refuses_arrays_that_are_no_images_and_other_networks(pixels, field, message):
    assert_refused(message, ImageProblem, pixels, field=field)


def test_deep_greys_are_scaled_and_clear_pixels_come_before_white(tmp_path):
    grey = np.random.default_rng(0).integers(0, 2**16, (8, 9), dtype=np.uint16)
    grey[0, :2] = 0, 65535
    for suffix in ("png", "tif"):
        Image.fromarray(grey).save(tmp_path / f"deep.{suffix}")
        found = read_image(str(tmp_path / f"deep.{suffix}"))
        assert np.array_equal(found, np.repeat(np.rint(grey / 257).astype(np.uint8)[..., None], 3, 2))
    pixels = _image(channels=4)
    pixels[0, 0] = 0, 0, 0, 0
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    found = read_image(str(tmp_path / "clear.png"))
    share = pixels[..., 3:] / 255
    assert abs(found - (pixels[..., :3] * share + 255 * (1 - share))).max() < 0.5 + 1e-3
    assert found[0, 0].tolist() == [255] * 3


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_pictures_are_upright(tmp_path, kind):
    for orientation in range(1, 9):
        tags = Image.Exif()
        tags[0x0112] = orientation
        Image.fromarray(_image()).save(tmp_path / "turned", kind, exif=tags)
        with Image.open(tmp_path / "turned") as opened:
            upright = np.asarray(ImageOps.exif_transpose(opened))
        assert np.array_equal(read_image(str(tmp_path / "turned")), upright)


def test_every_pixel_may_be_drawn():
    problem, generator = ImageProblem(_image(2, 2), points=3, field=SMALL), torch.Generator().manual_seed(0)
    assert len({tuple(each) for step in range(40) for each in problem.batch(step, generator)[0].tolist()}) == 4
