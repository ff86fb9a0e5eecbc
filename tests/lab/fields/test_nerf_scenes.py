"""Scenes out of folders and .npz files; what does not fit is refused in one line."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from nlr_lab.fields.nerf import NerfProblem, NerfSettings
from nlr_lab.fields.rendering import average_pose, circle, look_at, pixel_rays, recentred
from nlr_lab.fields.scenes import read_scene
from refusals import assert_refused
from seeds import rng

VIEWS, HEIGHT, WIDTH, FOCAL = 9, 12, 16, 20.0


def random_poses(views=VIEWS, spread=0.2):
    positions = rng().normal((0, 0, 4), spread, (views, 3))
    return np.stack([look_at(each, np.zeros(3), np.array([0.0, 1, 0])) for each in positions])


def poses_bounds(poses, height=HEIGHT, width=WIDTH, focal=FOCAL):
    """Rows of the file, from poses in OpenGL's axes: columns down, right, backwards."""
    hwf = np.tile(np.array([height, width, focal])[:, None], (len(poses), 1, 1))
    table = np.concatenate([-poses[:, :, 1:2], poses[:, :, 0:1], poses[:, :, 2:4], hwf], 2)
    bounds = np.tile([2.0, 9.0], (len(poses), 1))
    return np.concatenate([table.reshape(len(poses), 15), bounds], 1)


def random_images(views=VIEWS, height=HEIGHT, width=WIDTH, channels=3):
    return rng().integers(0, 256, (views, height, width, channels), dtype=np.uint8)


def save_pictures(folder, images):
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"view{number:03d}.png")


@pytest.fixture
def llff(tmp_path):
    poses = random_poses()
    np.save(tmp_path / "poses_bounds.npy", poses_bounds(poses, 2 * HEIGHT, 2 * WIDTH, 2 * FOCAL))
    images = random_images()
    save_pictures(tmp_path / "images_2", images)
    return tmp_path, poses, images


def save_blender(folder, sides, channels=4, **extra):
    made = {}
    for side, views in sides.items():
        poses, images = random_poses(views), random_images(views, channels=channels)
        save_pictures(folder / side, images)
        square = np.concatenate([poses, np.tile([[[0.0, 0, 0, 1]]], (views, 1, 1))], 1)
        paths = [f"./{side}/view{number:03d}" for number in range(views)]
        rows = zip(paths, square.tolist(), strict=True)
        frames = [{"file_path": path, "transform_matrix": matrix} for path, matrix in rows]
        name = "transforms.json" if side == "all" else f"transforms_{side}.json"
        (folder / name).write_text(json.dumps({"camera_angle_x": 0.8, "frames": frames, **extra}))
        made[side] = poses, images
    return made


def test_reads_an_llff_folder(llff):
    folder, poses, images = llff
    save_pictures(folder / "images", random_images(height=2 * HEIGHT, width=2 * WIDTH))  # images_2 is nearer
    scene = read_scene(folder, downscale=2)
    assert np.array_equal(scene.images, images.astype(np.float32) / 255)
    assert scene.held_out == (0, 8)
    assert scene.trained == (1, 2, 3, 4, 5, 6, 7)
    assert (scene.ndc, scene.near, scene.far, scene.background) == (True, 0.0, 1.0, None)
    assert scene.cameras.intrinsics.tolist() == [[FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2]] * VIEWS
    # Distances between cameras shrink by nearest depth x 0.75; angles between them stay.
    apart = np.linalg.norm(poses[1:, :, 3] - poses[:-1, :, 3], axis=1) / (2.0 * 0.75)
    assert np.allclose(np.linalg.norm(np.diff(scene.cameras.poses[:, :, 3], axis=0), axis=1), apart)
    turns = scene.cameras.poses[1:, :, :3] @ scene.cameras.poses[:-1, :, :3].transpose(0, 2, 1)
    expected = poses[1:, :, :3] @ poses[:-1, :, :3].transpose(0, 2, 1)
    assert np.allclose(np.trace(turns, axis1=1, axis2=2), np.trace(expected, axis1=1, axis2=2))
    assert np.allclose(average_pose(scene.cameras.poses), np.eye(3, 4), atol=1e-9)
    plain = read_scene(folder, downscale=2, ndc=False)
    assert (plain.near, plain.far) == pytest.approx((0.9 / 0.75, 4.5 / 0.75))
    for name in ("near", "far"):
        assert_refused(f"{name} does nothing for .*, an LLFF scene", read_scene, folder, downscale=2, **{name: 3.0})


def test_downscale_averages_blocks_and_keeps_the_rays(llff):
    folder, _, images = llff
    scene = read_scene(folder, downscale=6)  # of images_2, thrice smaller; a column is left over
    cut = images[:, :12, :15].astype(np.float64).reshape(VIEWS, 4, 3, 5, 3, 3).mean((2, 4)) / 255
    assert np.allclose(scene.images, cut, atol=1e-6)
    large = read_scene(folder, downscale=2)
    row, column, view = torch.tensor([2]), torch.tensor([3]), torch.tensor([5])
    small_ray = pixel_rays(scene.cameras, view, row, column)
    # The middle pixel of the block lies on the same ray.
    assert pixel_rays(large.cameras, view, 3 * row + 1, 3 * column + 1).directions.allclose(small_ray.directions)


def test_reads_the_scene_of_a_folder_from_npz(llff, tmp_path):
    folder, poses, images = llff
    np.savez(tmp_path / "scene.npz", images=images, poses_bounds=poses_bounds(poses))
    one, other = read_scene(tmp_path / "scene.npz"), read_scene(folder, downscale=2)
    assert np.array_equal(one.images, other.images)
    assert np.allclose(one.cameras.poses, other.cameras.poses)
    assert one.fingerprint != read_scene(tmp_path / "scene.npz", held_out=(3,)).fingerprint
    for held_out in ((0, 9), (-1,), (1, 1), (), range(9)):
        named = ", ".join(map(str, held_out)) or "none"
        words = f"the views {named}; hold out different ones of 0 to 8"
        assert_refused(words, read_scene, tmp_path / "scene.npz", held_out=held_out)


def test_blends_clear_pixels_of_a_blender_folder_with_white(tmp_path):
    made = save_blender(tmp_path, {"train": 3, "test": 2})
    file = tmp_path / "transforms_test.json"
    file.write_text("\ufeff" + file.read_text(), encoding="utf-8")  # a byte order mark
    scene = read_scene(tmp_path)
    assert scene.held_out == (3, 4)
    assert np.allclose(scene.cameras.poses, np.concatenate([made["train"][0], made["test"][0]]))
    focal = WIDTH / 2 / np.tan(0.4)
    assert scene.cameras.intrinsics[0] == pytest.approx([focal, focal, WIDTH / 2, HEIGHT / 2])
    assert (scene.ndc, scene.near, scene.far, scene.background) == (False, 2.0, 6.0, 1.0)
    images = np.concatenate([made["train"][1], made["test"][1]]).astype(np.float64) / 255
    assert np.allclose(scene.images, images[..., :3] * images[..., 3:] + 1 - images[..., 3:], atol=1e-6)
    arrays = {f"{what}_{side}": made[side][place] for side in made for place, what in enumerate(("poses", "images"))}
    np.savez(tmp_path / "packed.npz", **arrays, focal=np.float64(WIDTH / 2 / np.tan(0.4)))
    assert np.allclose(read_scene(tmp_path / "packed.npz").cameras.intrinsics, scene.cameras.intrinsics)


def test_reads_one_transforms_file_with_lenses_in_pixels(tmp_path):
    lens = {"fl_x": 40.0, "fl_y": 44.0, "cx": 15.0, "cy": 13.0, "w": 2 * WIDTH, "h": 2 * HEIGHT}
    save_blender(tmp_path, {"all": 10}, channels=3, **lens)
    scene = read_scene(tmp_path, near=0.1, far=9.0)
    assert scene.held_out == (0, 8)
    assert scene.cameras.intrinsics[4].tolist() == [20.0, 22.0, 7.5, 6.5]
    assert (scene.near, scene.far) == (0.1, 9.0)
    assert_refused("ndc does nothing for .*, a Blender scene", read_scene, tmp_path, ndc=False)


def test_paths_are_rotations_that_keep_the_scene_in_sight(llff, tmp_path):
    folder, _, _ = llff
    spiral = read_scene(folder, downscale=2).path(7)
    assert len(spiral) == 7
    assert (spiral.poses[:, 2, 2] > 0).all()
    save_blender(tmp_path / "b", {"train": 6, "test": 1})
    around = read_scene(tmp_path / "b").path(8)
    # All axes pass the origin, which the views look at.
    positions, back = around.poses[:, :, 3], around.poses[:, :, 2]
    assert np.allclose(np.cross(positions, back), 0, atol=1e-6)
    assert np.allclose(np.linalg.norm(positions, axis=1), np.linalg.norm(positions[0]))


def test_circle_has_the_views_distance_and_height():
    angle = np.arange(6) * np.pi / 3
    places = np.stack([3 * np.cos(angle), 3 * np.sin(angle), np.full(6, 2.0)], 1)
    poses = np.stack([look_at(each, np.zeros(3), np.array([0.0, 0, 1])) for each in places])
    x, y, z = circle(poses, 5)[:, :, 3].T
    assert np.hypot(x, y) == pytest.approx(3)
    assert z == pytest.approx(2)


def test_spiral_stays_in_the_spread_and_looks_at_the_focus(llff):
    scene = read_scene(llff[0], downscale=2)
    near, far = 0.9 * 2.0 / 1.5, 5 * 9.0 / 1.5  # of LLFF's own paths
    assert scene.focus == pytest.approx(1 / (0.25 / near + 0.75 / far))
    x, y, z = np.percentile(np.abs(scene.cameras.poses[:, :, 3]), 90, axis=0)
    path = scene.path(8).poses
    for frame, place in ((0, (x, 0, 0)), (2, (0, -y, -z / 2)), (4, (-x, 0, 0)), (6, (0, y, z / 2))):
        assert path[frame, :, 3] == pytest.approx(place, abs=1e-9)
    ahead = path[:, :, 3] - [0, 0, -scene.focus]
    assert np.cross(ahead, path[:, :, 2]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("h", "focal_y", "row"), [({}, 22.0, 6.5), ({"h": 4 * HEIGHT}, 11.0, 3.25)])
def test_lenses_shrink_with_their_own_side(tmp_path, h, focal_y, row):
    save_blender(tmp_path, {"all": 3}, fl_x=40.0, fl_y=44.0, cx=15.0, cy=13.0, w=2 * WIDTH, **h)
    assert read_scene(tmp_path).cameras.intrinsics[0].tolist() == [20.0, focal_y, 7.5, row]


def test_missing_pictures_and_sizes_are_named(llff):
    folder, _, _ = llff
    assert_refused(r"downscale 1 \(folders of pictures: images_2\); give downscale 2", read_scene, folder)
    assert_refused("16 x 12 pixels, which cannot get 20 times smaller", read_scene, folder, downscale=40)
    assert_refused("downscale must be a positive integer", read_scene, folder, downscale=0)
    Image.fromarray(random_images(1, 12, 15)[0]).save(folder / "images_2" / "view004.png")
    assert_refused(r"different sizes: view000.png has 16 x 12 .* view004.png", read_scene, folder, downscale=2)
    (folder / "images_2" / "view002.png").write_bytes(b"no picture")
    assert_refused("cannot read the image .*view002.png", read_scene, folder, downscale=2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a["poses_bounds"].__setitem__((3, 0), np.nan), "camera of view 3"),
        (lambda a: a["poses_bounds"].__setitem__((2, 0), 5.0), "camera of view 2"),  # no rotation
        (lambda a: a["poses_bounds"].__setitem__((4, slice(0, 15, 5)), -a["poses_bounds"][4, 0:15:5]), "view 4"),
        (lambda a: a["poses_bounds"].__setitem__((1, 14), -3.0), "view 1 .*a focal length above 0"),
        (lambda a: a["poses_bounds"].__setitem__((1, 15), 10.0), "0 < nearest < farthest"),
        (lambda a: a.update(images=a["images"][:-2]), "7 images and 9 poses"),
        (lambda a: a.update(images=a["images"][:, :0]), "16 x 0 pixels"),
        (lambda a: a.update(images=a["images"].astype(np.float32)), r"must be \(N, H, W, 3 or 4\) uint8"),
        (lambda a: a.update(poses_bounds=a["poses_bounds"][:, :12]), r"poses_bounds must be \(N, 17\)"),
        (lambda a: a.pop("poses_bounds"), r"lacks images_train, poses_train, .*focal \(it has images\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, change, match):
    arrays = {"images": random_images(), "poses_bounds": poses_bounds(random_poses())}
    change(arrays)
    np.savez(tmp_path / "scene.npz", **arrays)
    assert_refused(match, read_scene, tmp_path / "scene.npz")


def test_folders_without_transforms_and_broken_ones_are_refused(tmp_path):
    assert_refused("there is no file or folder", read_scene, tmp_path / "nowhere")
    assert_refused("lacks transforms_train.json and transforms_test.json", read_scene, tmp_path)
    save_blender(tmp_path, {"train": 2, "test": 2})
    file = tmp_path / "transforms_test.json"
    good = json.loads(file.read_text())
    for wrong, match in [
        ({**good, "k1": 0.1}, "lens distortion"),
        ({**good, "camera_model": "OPENCV_FISHEYE"}, "another camera than a pinhole's"),
        ({**good, "test_filenames": ["test/0.png"]}, "test_filenames, which are not read; put the frames into"),
        ({**good, "camera_angle_x": float("nan")}, "camera_angle_x must be"),
        ({**good, "camera_angle_x": 40.0}, "camera_angle_x is 40; give radians, below pi"),
        (
            {**good, "frames": [{**good["frames"][0], "file_path": "train/view001"}]},
            "view001.png is in the training and",
        ),
        ({"frames": good["frames"]}, "needs camera_angle_x"),
        ({**good, "frames": []}, "names no frames"),
        ({**good, "frames": [{"file_path": "x"}]}, "frame 0 needs transform_matrix"),
        ({**good, "frames": [{**good["frames"][0], "transform_matrix": [[1, 2], [3]]}]}, "4 x 4 numbers"),
        ({**good, "frames": [{**good["frames"][0], "file_path": "test/gone"}]}, "gone.png is missing"),
        ({**good, "frames": [{**good["frames"][0], "file_path": "../other/0"}]}, "frame 0 needs .* the scene's folder"),
    ]:
        file.write_text(json.dumps(wrong))
        assert_refused(match, read_scene, tmp_path)
    file.write_text("{")
    assert_refused("transforms_test.json cannot be read", read_scene, tmp_path)
    file.unlink()
    assert_refused("lacks transforms_test.json", read_scene, tmp_path)
    (tmp_path / "scene.npz").write_bytes(b"no zip")
    assert_refused("not a readable .npz file", read_scene, tmp_path / "scene.npz")


def test_cameras_that_cancel_out_have_no_average():
    poses = np.stack([look_at(np.array([0.0, 0, z]), np.zeros(3), np.array([0.0, 1, 0])) for z in (1, -1)])
    assert_refused("cancel out", recentred, poses)


@pytest.mark.parametrize(
    ("held_out", "trained"), [(None, (0, 1, 2)), ((4,), (0, 1, 2)), ((1,), (0, 2)), ((0, 5), (1, 2))]
)
def test_never_trains_on_a_scenes_own_test_views(tmp_path, held_out, trained):
    made = save_blender(tmp_path, {"train": 3, "test": 3})
    arrays = {f"{what}_{side}": made[side][place] for side in made for place, what in enumerate(("poses", "images"))}
    np.savez(tmp_path / "packed.npz", **arrays, focal=np.float64(20.0))
    for source in (tmp_path, tmp_path / "packed.npz"):
        scene = read_scene(source, held_out=held_out)
        assert scene.trained == trained
        assert scene.held_out == (held_out or (3, 4, 5))
        whole = replace(scene, set_aside=())
        assert (scene.fingerprint == whole.fingerprint) == (scene.trained == whole.trained)
    settings = NerfSettings(source=str(tmp_path), held_out=held_out, rays=200)
    *_, colours, _ = NerfProblem(scene, settings).batch(0, torch.Generator().manual_seed(0))
    seen = {tuple(each) for each in scene.images[list(trained)].reshape(-1, 3).tolist()}
    assert {tuple(each) for each in colours.tolist()} <= seen
    assert_refused("hold out .* leave at least one", read_scene, tmp_path, held_out=(0, 1, 2))


def test_views_that_device_coordinates_cannot_show_are_refused(tmp_path):
    def save(degrees):
        turn = np.radians(np.linspace(-degrees, degrees, VIEWS))
        poses = np.zeros((VIEWS, 3, 4))
        poses[:, 0, 0] = poses[:, 2, 2] = np.cos(turn)
        poses[:, 0, 2], poses[:, 2, 0], poses[:, 1, 1] = np.sin(turn), -np.sin(turn), 1
        np.savez(tmp_path / "wide.npz", images=random_images(), poses_bounds=poses_bounds(poses, focal=8.0))
        return tmp_path / "wide.npz"

    # The outermost pixels' centres are atan(7.5 / 8) = 43.2 degrees off the axis.
    scene = read_scene(save(46))
    assert (scene.cameras.corners()[..., 2] < 0).all()
    assert_refused("view 0 of wide sees sideways or backwards.*turn them off", read_scene, save(47.5))
    assert not read_scene(save(47.5), ndc=False).ndc


@pytest.mark.shared_data
def test_reads_the_real_scenes(shared_data):
    fern = read_scene(shared_data / "nerf_fern" / "fern_252x189.npz")
    assert fern.images.shape == (20, 189, 252, 3)
    assert fern.held_out == (0, 8, 16)
    assert fern.cameras.intrinsics[0, 0] == pytest.approx(3260.526 * 252 / 4032, rel=1e-5)
    folder = read_scene(shared_data / "nerf_fern", downscale=16)
    assert np.abs(folder.images - fern.images).max() <= 0.5 / 255 + 1e-6
    lego = read_scene(shared_data / "nerf_lego" / "lego_100.npz")
    assert (len(lego.trained), len(lego.held_out)) == (100, 25)
