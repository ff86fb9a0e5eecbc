"""Pictures of a scene with their cameras, out of the two usual kinds of folders or one .npz file (docs/fields.md).

LLFF: pictures taken by hand from one side. A row of `poses_bounds.npy` is 3 x 5 `[R | t | (height, width, focal
length)]`, R's columns down, right and backwards, then the nearest and the farthest depth of the view. The world is
scaled to a nearest depth of 4/3, and moved so that the average camera is at the origin and looks along -z.
Blender: rendered objects; `transform_matrix` is camera-to-world. Source: Mildenhall et al. 2019 and 2020.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nlr_lab.runtime.bounds import read_array, read_arrays
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import is_inside
from nonlinear_lowrank.validation import check_integer, check_number, one_line

from .image import over_white, read_pixels
from .rendering import Cameras, Rays, circle, look_at, pixel_rays, recentred, render, spiral
from .settings import NerfSettings

HOLD_OUT = 8
"""Every 8th view is held out where a scene has no test views of its own, as in both papers."""

_SUFFIXES = (".png", ".jpg", ".jpeg")
_NEAR, _FAR = NerfSettings.near, NerfSettings.far
_NEAR_PLANE = 0.75  # LLFF: the nearest depth becomes 1 / 0.75; the near plane of device coordinates is at 1
_DISTORTION = ("k1", "k2", "k3", "k4", "p1", "p2")
_SPLITS = ("train_filenames", "val_filenames", "test_filenames")
_CAMERAS = ("PINHOLE", "SIMPLE_PINHOLE", "OPENCV", "FULL_OPENCV", "RADIAL", "SIMPLE_RADIAL")  # without distortion


@dataclass(frozen=True)
class Scene:
    """Views of a scene; raises UserError where they do not fit together."""

    name: str
    images: np.ndarray
    """(N, H, W, 3) float32 in [0, 1]."""
    cameras: Cameras
    held_out: tuple[int, ...]
    """Views that are scored and not trained on."""
    near: float
    """Depth at which rays begin, and at `far` end; in normalised device coordinates 0 and 1."""
    far: float
    ndc: bool
    """Rays are in normalised device coordinates with the near plane at 1."""
    background: float | None
    """Grey of what is behind everything; None: the world goes on."""
    focus: float | None = None
    """Distance of the point that a spiral of cameras looks at; None: cameras go around in a circle."""
    set_aside: tuple[int, ...] = ()
    """Views that the scene itself has for tests: never trained on, whether they are held out or not."""

    def __post_init__(self) -> None:
        views, out, cameras = len(self.images), self.held_out, self.cameras
        if self.images.shape != (len(cameras), cameras.height, cameras.width, 3):
            size = f"{len(cameras)} cameras of {cameras.width} x {cameras.height} pixels"
            raise UserError(f"{self.name} has images {self.images.shape} and {size}; give one pose for each image")
        if not out or len(set(out)) < len(out) or not set(out) <= set(range(views)) or not self.trained:
            named = ", ".join(map(str, out)) or "none"
            hint = f"hold out different ones of 0 to {views - 1}, and leave at least one to train on"
            raise UserError(f"{self.name} cannot hold out the views {named}; {hint}")
        if not 0 <= self.near < self.far < np.inf:
            raise UserError(f"{self.name} needs 0 <= near < far, not near {self.near:g} and far {self.far:g}")
        if self.ndc and (behind := np.flatnonzero((cameras.corners()[..., 2] >= 0).any(1))).size:
            hint = "which normalised device coordinates cannot show; turn them off (--no-ndc, ndc=False)"
            raise UserError(f"view {behind[0]} of {self.name} sees sideways or backwards in a corner, {hint}")

    @property
    def trained(self) -> tuple[int, ...]:
        """The views that are neither held out nor the scene's own for tests."""
        untrained = {*self.held_out, *self.set_aside}
        return tuple(view for view in range(len(self.images)) if view not in untrained)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that training and scoring see."""
        digest = hashlib.sha256()
        for array in (self.images, self.cameras.poses, self.cameras.intrinsics):
            digest.update(f"{array.shape}{array.dtype}".encode() + np.ascontiguousarray(array).tobytes())
        digest.update(repr((self.held_out, self.near, self.far, self.ndc, self.background)).encode())
        # Included only where it matters, so that fits of other scenes keep the hash they had.
        if unused := sorted(set(self.set_aside) - set(self.held_out)):
            digest.update(repr(unused).encode())
        return digest.hexdigest()

    def path(self, frames: int) -> Cameras:
        """Cameras on a closed path: a spiral for a scene taken from one side, a circle around an object."""
        poses = self.cameras.poses
        poses = circle(poses, frames) if self.focus is None else spiral(poses, self.focus, frames)
        return replace(self.cameras, poses=poses, intrinsics=np.repeat(self.cameras.intrinsics[:1], frames, 0))


def read_scene(
    source: str | Path,
    *,
    downscale: int = 1,
    held_out: Sequence[int] | None = None,
    ndc: bool = True,
    near: float = _NEAR,
    far: float = _FAR,
) -> Scene:
    """A scene in one of this file's forms; raise UserError for any other, or where something does not fit.

    The settings are those of `NerfSettings`; one that the form does not use is refused, unless it is the default. Of
    LLFF's images_2, images_4, ... it takes the folder that is nearest to `downscale`, and averages blocks of pixels for
    the rest.
    """
    path = Path(source).expanduser()
    check_integer("downscale", downscale, minimum=1)
    out = None if held_out is None else tuple(int(view) for view in held_out)
    if path.is_file():
        arrays = read_arrays(path)
        if {"images", "poses_bounds"} <= set(arrays):
            _check_bounds(path.stem, near, far)
            images = _unpacked(path.stem, arrays["images"], arrays["poses_bounds"])
            return _llff(path.stem, images, arrays["poses_bounds"], downscale, out, ndc)
        sides = list(_packed_sides(path, arrays))
    elif not path.is_dir():
        raise UserError(f"there is no file or folder {path}; give a scene's folder or .npz file")
    elif (path / "poses_bounds.npy").is_file():
        _check_bounds(path.name, near, far)
        folder, factor = _llff_images(path, downscale)
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES)
        return _llff(path.name, _read(files), read_array(path / "poses_bounds.npy"), factor, out, ndc)
    else:
        sides = [_read_side(path, file) for file in _transforms(path)]
        if len(sides) > 1 and (both := {*sides[0].files} & {*sides[1].files}):
            raise UserError(f"{min(both)} is in the training and in the test views; leave it in one of them")
    if not ndc:
        raise UserError(f"ndc does nothing for {path.stem}, a Blender scene, whose rays are the world's; omit it")
    colours, height, width = _reduced(str(path), chain.from_iterable(side.images for side in sides), downscale)
    lenses = [_intrinsics(side.name, lens, height, width) for side in sides for lens in side.lenses]
    poses = np.concatenate([side.poses for side in sides])
    tests = tuple(range(len(sides[0].poses), len(colours)))
    out = (tests or tuple(range(0, len(colours), HOLD_OUT))) if out is None else out
    cameras = Cameras(poses, np.array(lenses), height, width).reduced(downscale)
    name = path.stem if path.is_file() else path.name
    return Scene(name, colours, cameras, out, near, far, ndc=False, background=1.0, set_aside=tests)


def _check_bounds(name: str, near: float, far: float) -> None:
    for bound, value, default in (("near", near, _NEAR), ("far", far, _FAR)):
        if value != default:
            raise UserError(f"{bound} does nothing for {name}, an LLFF scene, which has its own depths; omit it")


_Images = Iterable[tuple[str, np.ndarray]]  # (H, W, 3 or 4) uint8 by their names; of files one at a time is held


class _Side(NamedTuple):
    """Training or test views of a Blender scene, poses (N, 3, 4)."""

    name: str
    images: _Images
    poses: np.ndarray
    lenses: list[dict[str, Any]]
    files: Collection[Path] = ()


def _unpacked(name: str, images: np.ndarray, poses: np.ndarray) -> _Images:
    if len(images) != len(poses):
        raise UserError(f"{name} has {len(images)} images and {len(poses)} poses; give one of each a view")
    if images.ndim != 4 or images.shape[3] not in (3, 4) or images.dtype != np.uint8:
        raise UserError(f"{name}: images must be (N, H, W, 3 or 4) uint8, got {images.shape} {images.dtype}")
    return [(name, image) for image in images]


def _read(files: Iterable[Path]) -> _Images:
    return ((file.name, read_pixels(file)) for file in files)


def _reduced(name: str, images: _Images, factor: int) -> tuple[np.ndarray, int, int]:
    """(N, H // factor, W // factor, 3) float32 in [0, 1], and H and W, which are the same in all pictures.

    Clear pixels become white, then blocks of factor x factor pixels one; what is left at the edge is cut off.
    """
    colours, sizes = [], dict[tuple[int, int], str]()
    for title, pixels in images:
        height, width = pixels.shape[:2]
        sizes.setdefault((height, width), f"{title} has {width} x {height} pixels")
        if len(sizes) > 1:
            raise UserError(f"the images are of different sizes: {', '.join(sizes.values())}; give all one size")
        rows, columns = height // factor, width // factor
        if not rows or not columns:
            size = sizes[height, width]
            raise UserError(f"{size}, which cannot get {factor} times smaller; give a smaller downscale")
        blocks = over_white(pixels[: rows * factor, : columns * factor]).reshape(rows, factor, columns, factor, 3)
        colours.append(blocks.mean((1, 3), dtype=np.float64).astype(np.float32))
    if not colours:
        raise UserError(f"{name} has no images")
    return np.stack(colours), height, width


def _llff_images(path: Path, downscale: int) -> tuple[Path, int]:
    """The folder of pictures that is nearest to `downscale`, and how many times smaller they are to get."""
    sizes = [(int(each.name[7:]), each) for each in path.glob("images_*") if each.name[7:].isdecimal()]
    there = {size: each for size, each in sorted([(1, path / "images"), *sizes]) if size and each.is_dir()}
    usable = [size for size in there if downscale % size == 0]
    if not usable:
        found = ", ".join(folder.name for folder in there.values()) or "none"
        hint = f"give downscale {next(iter(there))}" if there else "put them into images/"
        raise UserError(f"{path} has no pictures for downscale {downscale} (folders of pictures: {found}); {hint}")
    return there[usable[-1]], downscale // usable[-1]


def _llff(
    name: str, images: _Images, bounds: np.ndarray, factor: int, held_out: tuple[int, ...] | None, ndc: bool
) -> Scene:
    """Out of rows of poses_bounds.npy, (N, 17), and pictures that get smaller by `factor`."""
    if bounds.ndim != 2 or bounds.shape[1] != 17 or bounds.dtype.kind != "f":
        raise UserError(f"{name}: poses_bounds must be (N, 17) floats, got {bounds.shape} {bounds.dtype}")
    table, depths = bounds[:, :15].astype(np.float64).reshape(-1, 3, 5), bounds[:, 15:].astype(np.float64)
    if not ((depths[:, 0] > 0) & (depths[:, 0] < depths[:, 1]) & (depths[:, 1] < np.inf)).all():
        raise UserError(f"{name}: the depths of every view must be 0 < nearest < farthest (columns 16 and 17)")
    if (table[:, :2, 4] <= 0).any():
        raise UserError(f"{name}: height and width (columns 5 and 10) must be above 0")
    poses = np.concatenate([table[:, :, 1:2], -table[:, :, 0:1], table[:, :, 2:4]], 2)
    unit = depths.min() * _NEAR_PLANE
    poses[:, :, 3] /= unit
    depths = depths / unit
    colours, height, width = _reduced(name, images, factor)
    full_height, full_width, focal = table[:, :, 4].T
    middle = np.full(len(focal), width / 2), np.full(len(focal), height / 2)
    lenses = np.stack([focal * width / full_width, focal * height / full_height, *middle], 1)
    cameras = Cameras(poses, lenses, height, width)
    cameras = replace(cameras, poses=recentred(cameras.poses)).reduced(factor)
    # Between the nearest and the farthest depth, three quarters of the way in 1 / depth: as LLFF's own paths do.
    focus = 1 / (0.25 / (0.9 * depths.min()) + 0.75 / (5.0 * depths.max()))
    held_out = tuple(range(0, len(bounds), HOLD_OUT)) if held_out is None else held_out
    near, far = (0.0, 1.0) if ndc else (0.9 * float(depths.min()), float(depths.max()))
    return Scene(name, colours, cameras, held_out, near, far, ndc, background=None, focus=float(focus))


def _packed_sides(path: Path, arrays: dict[str, np.ndarray]) -> Iterator[_Side]:
    """Views of an .npz file: images (N, H, W, 3 or 4) uint8, poses (N, 4, 4), focal length in pixels."""
    focals = {"focal", "camera_angle_x"} & set(arrays)
    missing = [name for name in ("images_train", "poses_train", "images_test", "poses_test") if name not in arrays]
    if missing or not focals:
        lacks, has = ", ".join(missing + ([] if focals else ["focal"])), ", ".join(arrays) or "nothing"
        raise UserError(f"{path} lacks {lacks} (it has {has}); give these, or images and poses_bounds")
    lens = {("fl_x" if name == "focal" else name): (arrays[name].reshape(-1).tolist() or [None])[0] for name in focals}
    for side in ("train", "test"):
        name = f"{path.stem} ({side})"
        poses = _matrices(name, arrays[f"poses_{side}"])
        yield _Side(name, _unpacked(name, arrays[f"images_{side}"], poses), poses, [lens] * len(poses))


def _transforms(path: Path) -> list[Path]:
    sides = [path / f"transforms_{side}.json" for side in ("train", "test")]
    if (path / "transforms.json").is_file() and not any(each.is_file() for each in sides):
        return [path / "transforms.json"]
    missing = [each.name for each in sides if not each.is_file()]
    if missing:
        raise UserError(f"{path} lacks {' and '.join(missing)}; give these, or poses_bounds.npy, or transforms.json")
    return sides


def _read_side(path: Path, side: Path) -> _Side:
    """Views that a file of transforms in the folder `path` names."""
    try:
        table = json.loads(side.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{side} cannot be read: {one_line(error)}") from error
    frames = table.get("frames") if isinstance(table, dict) else None
    if not isinstance(frames, list) or not frames:
        raise UserError(f"{side} names no frames")
    if lists := [key for key in _SPLITS if table.get(key)]:
        fix = "put the frames into transforms_train.json and transforms_test.json"
        raise UserError(f"{side.name} has {' and '.join(lists)}, which are not read; {fix}")
    files = []
    for number, frame in enumerate(frames):
        if not isinstance(frame, dict) or "transform_matrix" not in frame or not is_inside(frame.get("file_path")):
            raise UserError(f"{side}: frame {number} needs transform_matrix and a file_path in the scene's folder")
        file = path / frame["file_path"]
        files.append(file if file.suffix.lower() in _SUFFIXES else file.with_name(file.name + ".png"))
    try:
        matrices = np.array([frame["transform_matrix"] for frame in frames], np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{side}: every transform_matrix must be 4 x 4 numbers") from error
    lenses = [{**table, **frame} for frame in frames]
    return _Side(side.name, _read(files), _matrices(side.name, matrices), lenses, files)


def _matrices(name: str, poses: np.ndarray) -> np.ndarray:
    """(N, 3 or 4, 4) to (N, 3, 4) float64."""
    if poses.ndim != 3 or poses.shape[1:] not in ((3, 4), (4, 4)) or poses.dtype.kind != "f":
        raise UserError(f"{name}: poses must be (N, 4, 4) numbers, got {poses.shape} {poses.dtype}")
    return poses[:, :3].astype(np.float64)


def _intrinsics(name: str, table: dict[str, Any], height: int, width: int) -> tuple[float, float, float, float]:
    """Focal lengths and centre, out of the field of view, or of lengths in pixels of pictures w wide (and h high)."""
    if bad := [key for key in _DISTORTION if table.get(key)]:
        raise UserError(f"{name} has lens distortion ({', '.join(bad)}); undistort the pictures first")
    if table.get("is_fisheye") or str(table.get("camera_model", "PINHOLE")) not in _CAMERAS:
        raise UserError(f"{name} is of another camera than a pinhole's; undistort the pictures first")
    lens = {key: table[key] for key in ("w", "h", "fl_x", "fl_y", "cx", "cy", "camera_angle_x") if key in table}
    for key, value in lens.items():
        check_number(f"{name}: {key}", value, above=0)
    if lens.get("camera_angle_x", 0.0) >= np.pi:
        raise UserError(f"{name}: camera_angle_x is {lens['camera_angle_x']:g}; give radians, below pi")
    # The pictures may be smaller than those that the lengths are for.
    across = width / lens["w"] if "w" in lens else 1.0
    down = height / lens["h"] if "h" in lens else across
    if "fl_x" in lens:
        focal_x = lens["fl_x"] * across
        focal_y = lens["fl_y"] * down if "fl_y" in lens else focal_x
    elif "camera_angle_x" in lens:
        focal_x = focal_y = width / 2 / float(np.tan(lens["camera_angle_x"] / 2))
    else:
        raise UserError(f"{name} needs camera_angle_x, or fl_x and w")
    centre_x = lens["cx"] * across if "cx" in lens else width / 2
    centre_y = lens["cy"] * down if "cy" in lens else height / 2
    return focal_x, focal_y, centre_x, centre_y


DEMO_SIZE = 40
"""Pixels of a view of the demo, by side."""

_BALLS = (  # centre, radius, colour
    ((0.0, 0.0, 0.2), 0.7, (0.9, 0.3, 0.2)),
    ((0.9, 0.5, -0.2), 0.45, (0.2, 0.7, 0.3)),
    ((-0.7, -0.8, -0.1), 0.5, (0.2, 0.35, 0.9)),
)
_DENSITY, _EDGE = 12.0, 0.03  # per unit of length; width over which a ball's density falls to nothing


def demo_volume(points: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
    """Density (...) and colour (..., 3) of the balls at points (..., 3), brighter towards above, and striped."""
    density, colour = points.new_zeros(points.shape[:-1]), torch.zeros_like(points)
    for centre, radius, tint in _BALLS:
        inside = _DENSITY * torch.sigmoid((radius - (points - points.new_tensor(centre)).norm(dim=-1)) / _EDGE)
        density = density + inside
        colour = colour + inside[..., None] * points.new_tensor(tint)
    light = 0.75 + 0.25 * torch.sin(9 * points[..., 2:])
    return density, light * colour / density.clamp_min(1e-12)[..., None]


def demo_scene(views: int = 24, size: int = DEMO_SIZE, held_out: tuple[int, ...] | None = None) -> Scene:
    """Three soft balls in formulas before white, in `views` square pictures on a spiral from low to high.

    Every 8th view is held out, or those that are given.
    """
    share = (np.arange(views) + 0.5) / views
    rise, turn = np.radians(10 + 60 * share), np.pi * (3 - np.sqrt(5)) * np.arange(views)  # the golden angle
    positions = 4.0 * np.stack([np.cos(rise) * np.cos(turn), np.cos(rise) * np.sin(turn), np.sin(rise)], 1)
    poses = np.stack([look_at(each, np.zeros(3), np.array([0.0, 0.0, 1.0])) for each in positions])
    cameras = Cameras(poses, np.tile([1.1 * size, 1.1 * size, size / 2, size / 2], (views, 1)), size, size)
    pixels, near, far = torch.arange(views * size * size), 2.2, 5.8
    parts = []
    for some in pixels.split(2048):
        rays = Rays(*(each.float() for each in pixel_rays(cameras, some // size**2, some // size % size, some % size)))
        middles = torch.full((len(some), 128), 0.5)
        parts.append(render(demo_volume, None, rays, middles, near=near, far=far, background=1.0)[-1].clamp(0, 1))
    images = torch.cat(parts).reshape(views, size, size, 3).numpy()
    out = tuple(range(0, views, HOLD_OUT)) if held_out is None else held_out
    return Scene("demo", images, cameras, out, near, far, ndc=False, background=1.0)
