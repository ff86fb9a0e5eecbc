"""Scenes of rendered objects: `transforms_train.json`, `transforms_test.json` and the pictures they name.

A frame has `file_path` (".png" is added where it has no suffix) and `transform_matrix`, camera-to-world in OpenGL's
axes. Clear pixels become white.

Source: Mildenhall et al. 2020, "NeRF", whose Blender scenes these are; the single `transforms.json` is instant-ngp's.
"""

from pathlib import Path
from typing import Any

import numpy as np

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import is_inside

from .cameras import Cameras
from .scene import HOLD_OUT, Scene
from .scene_files import SUFFIXES, Pictures, pictures_of_array, read_json, read_pictures

_DISTORTION = ("k1", "k2", "k3", "k4", "p1", "p2")


def blender_npz(
    path: Path, arrays: dict[str, np.ndarray], downscale: int, held_out: tuple[int, ...] | None, near: float, far: float
) -> Scene:
    """The arrays of a .npz file: pictures (N, H, W, 3 or 4) uint8, poses (N, 4, 4), focal length in pixels.

    Raises:
        UserError: one is missing or has another form.
    """
    sides = ("train", "test")
    focals = {"focal", "camera_angle_x"} & set(arrays)
    wanted = [f"{what}_{side}" for side in sides for what in ("images", "poses")]
    missing = [name for name in wanted if name not in arrays] + ([] if focals else ["focal"])
    if missing:
        raise UserError(
            f"{path} needs the arrays images, poses_bounds, or images_train, poses_train, images_test, poses_test, "
            f"focal; of the second it lacks {', '.join(missing)} (it has {', '.join(arrays) or 'none'})"
        )
    parts = [pictures_of_array(f"{path.stem}, images_{side}", arrays[f"images_{side}"], downscale) for side in sides]
    poses = [_matrices(f"{path.name}, poses_{side}", arrays[f"poses_{side}"]) for side in sides]
    for side, pictures, matrices in zip(sides, parts, poses, strict=True):
        if len(pictures.colours) != len(matrices):
            raise UserError(
                f"{path} has {len(pictures.colours)} images_{side} and {len(matrices)} poses_{side}; "
                "give one pose for each image"
            )
    lens = {name: (arrays[name].reshape(-1)[:1].tolist() or [None])[0] for name in focals}
    table = {{"focal": "fl_x"}.get(name, name): value for name, value in lens.items()}
    _same_size(path, parts)
    one = _intrinsics(path.name, {**table, "w": parts[0].width}, parts[0])
    intrinsics = np.tile(one, (sum(map(len, poses)), 1))
    return _blender(path.stem, parts, np.concatenate(poses), intrinsics, downscale, held_out, near, far)


def blender_folder(path: Path, downscale: int, held_out: tuple[int, ...] | None, near: float, far: float) -> Scene:
    """A folder with transforms.

    Raises:
        UserError: a file is missing or cannot be read, or holds something that does not fit.
    """
    sides = [path / f"transforms_{side}.json" for side in ("train", "test")]
    if (path / "transforms.json").is_file() and not any(each.is_file() for each in sides):
        sides = [path / "transforms.json"]
    missing = [each.name for each in sides if not each.is_file()]
    if missing:
        raise UserError(
            f"{path} lacks {' and '.join(missing)}; a scene's folder has poses_bounds.npy, or "
            "transforms_train.json and transforms_test.json, or transforms.json"
        )
    parts, poses, intrinsics = [], [], []
    for side in sides:
        table = read_json(side)
        frames = table.get("frames")
        if not isinstance(frames, list) or not frames:
            raise UserError(f"{side} names no frames")
        for number, frame in enumerate(frames):
            if not isinstance(frame, dict) or not {"file_path", "transform_matrix"} <= set(frame):
                raise UserError(f"{side}: frame {number} needs file_path and transform_matrix")
        outside = [frame["file_path"] for frame in frames if not is_inside(frame["file_path"])]
        if outside:
            raise UserError(f"{side} names {outside[0]!r}, which is not in the scene's folder; name files in it")
        files = [path / frame["file_path"] for frame in frames]
        named = [each if each.suffix.lower() in SUFFIXES else each.with_name(each.name + ".png") for each in files]
        parts.append(read_pictures(named, downscale))
        try:
            matrices = np.array([frame["transform_matrix"] for frame in frames], np.float64)
        except (TypeError, ValueError) as error:
            raise UserError(f"{side}: every transform_matrix must be 4 x 4 numbers") from error
        poses.append(_matrices(side.name, matrices))
        intrinsics += [_intrinsics(side.name, {**table, **frame}, parts[-1]) for frame in frames]
    _same_size(path, parts)
    return _blender(path.name, parts, np.concatenate(poses), np.array(intrinsics), downscale, held_out, near, far)


def _blender(
    name: str,
    parts: list[Pictures],
    poses: np.ndarray,
    intrinsics: np.ndarray,
    downscale: int,
    held_out: tuple[int, ...] | None,
    near: float,
    far: float,
) -> Scene:
    """Views of one part (every 8th is held out), or of training and test parts."""
    images = np.concatenate([part.colours for part in parts])
    tests = tuple(range(len(parts[0].colours), len(images)))
    if held_out is None:
        held_out = tests or tuple(range(0, len(images), HOLD_OUT))
    cameras = Cameras(poses, intrinsics, parts[0].height, parts[0].width).reduced(downscale)
    return Scene(name, images, cameras, held_out, near, far, ndc=False, background=1.0, set_aside=tests)


def _same_size(path: Path, parts: list[Pictures]) -> None:
    if len({(part.height, part.width) for part in parts}) > 1:
        raise UserError(f"{path}: training and test pictures are of different sizes; give all one size")


def _matrices(name: str, poses: np.ndarray) -> np.ndarray:
    """(N, 3 or 4, 4) to (N, 3, 4) float64."""
    if poses.ndim != 3 or poses.shape[1:] not in ((3, 4), (4, 4)) or poses.dtype.kind != "f":
        raise UserError(f"{name}: poses must be (N, 4, 4) numbers, got {poses.shape} {poses.dtype}")
    return poses[:, :3].astype(np.float64)


def _intrinsics(name: str, table: dict[str, Any], pictures: Pictures) -> tuple[float, float, float, float]:
    """Focal lengths and centre, out of the field of view, or of lengths in pixels of pictures w wide (and h high)."""
    bad = [key for key in _DISTORTION if table.get(key)]
    if bad:
        raise UserError(f"{name} has lens distortion ({', '.join(bad)}); undistort the pictures first")

    def number(key: str) -> float:
        value = table[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise UserError(f"{name}: {key} must be a finite number above 0, got {value!r}")
        return float(value)

    height, width = pictures.height, pictures.width
    # The pictures may be smaller than those that the lengths are for.
    across = width / number("w") if "w" in table else 1.0
    down = height / number("h") if "h" in table else across
    if "fl_x" in table:
        focal_x = number("fl_x") * across
        focal_y = number("fl_y") * down if "fl_y" in table else focal_x
    elif "camera_angle_x" in table:
        focal_x = focal_y = width / 2 / float(np.tan(number("camera_angle_x") / 2))
    else:
        raise UserError(f"{name} needs camera_angle_x, or fl_x and w")
    centre_x = number("cx") * across if "cx" in table else width / 2
    centre_y = number("cy") * down if "cy" in table else height / 2
    return focal_x, focal_y, centre_x, centre_y
