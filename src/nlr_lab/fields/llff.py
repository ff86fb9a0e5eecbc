"""LLFF scenes: pictures taken by hand from one side, with `poses_bounds.npy`.

A row of it is 3 x 5 `[R | t | (height, width, focal length)]`, R's columns down, right and backwards, then the nearest
and the farthest depth of the view. The world is scaled so that the nearest depth of all is 4/3, and moved so that the
average camera is at the origin and looks along -z.

Source: Mildenhall et al. 2019, "Local light field fusion"; scaling as in Mildenhall et al. 2020, "NeRF".
"""

from pathlib import Path

import numpy as np

from nlr_lab.runtime.bounds import read_array
from nonlinear_lowrank.errors import UserError

from .cameras import Cameras, recentred
from .scene import HOLD_OUT, Scene
from .scene_files import SUFFIXES, Pictures, read_pictures

_NEAR_PLANE = 0.75  # the nearest depth becomes 1 / 0.75; the near plane of device coordinates is at 1


def llff_folder(path: Path, downscale: int, held_out: tuple[int, ...] | None, ndc: bool) -> Scene:
    """A folder with poses_bounds.npy and images/, or images_2/ and the like: of these the nearest to `downscale`.

    Raises:
        UserError: a file is missing or cannot be read, or holds something that does not fit.
    """
    bounds = read_array(path / "poses_bounds.npy")
    _check_shape(path.name, bounds)
    folders = {1: path / "images"} | {
        int(each.name[7:]): each for each in path.glob("images_*") if each.name[7:].isdecimal() and each.name[7:] != "0"
    }
    there = {factor: folder for factor, folder in sorted(folders.items()) if folder.is_dir()}
    usable = [factor for factor in there if downscale % factor == 0]
    if not usable:
        found = ", ".join(folder.name for folder in there.values()) or "none"
        raise UserError(
            f"{path} has no pictures that give downscale {downscale} (folders of pictures: {found})"
            + (f"; give downscale {next(iter(there))}" if there else "; put them into images/")
        )
    folder = there[usable[-1]]
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    if len(files) != len(bounds):
        raise UserError(
            f"{folder} has {len(files)} images and poses_bounds.npy {len(bounds)} poses; give one pose for each image"
        )
    factor = downscale // usable[-1]
    return llff_scene(path.name, read_pictures(files, factor), bounds, factor, held_out, ndc)


def llff_scene(
    name: str, pictures: Pictures, bounds: np.ndarray, downscale: int, held_out: tuple[int, ...] | None, ndc: bool
) -> Scene:
    """Out of rows of poses_bounds.npy, (N, 17), and pictures that were reduced by `downscale`.

    Raises:
        UserError: they do not agree, or a value makes no sense.
    """
    _check_shape(name, bounds)
    if len(pictures.colours) != len(bounds):
        raise UserError(
            f"{name} has {len(pictures.colours)} images and {len(bounds)} poses; give one pose for each image"
        )
    if not np.isfinite(bounds).all():
        view = int(np.argwhere(~np.isfinite(bounds))[0][0])
        raise UserError(f"{name}: the pose of view {view} holds a value that is not finite; fix or remove that view")
    table = bounds[:, :15].astype(np.float64).reshape(-1, 3, 5)
    depths = bounds[:, 15:].astype(np.float64)
    if not (depths[:, 0] > 0).all() or not (depths[:, 0] < depths[:, 1]).all():
        raise UserError(f"{name}: the depths of every view must be 0 < nearest < farthest (columns 16 and 17)")
    poses = np.concatenate([table[:, :, 1:2], -table[:, :, 0:1], table[:, :, 2:4]], 2)
    unit = depths.min() * _NEAR_PLANE
    poses[:, :, 3] /= unit
    depths = depths / unit
    height, width = pictures.height, pictures.width
    full_height, full_width, focal = table[:, :, 4].T
    if (table[:, :2, 4] <= 0).any():
        raise UserError(f"{name}: height and width (columns 5 and 10) must be above 0")
    intrinsics = np.stack(
        [
            focal * width / full_width,
            focal * height / full_height,
            np.full(len(focal), width / 2),
            np.full(len(focal), height / 2),
        ],
        1,
    )
    checked = Cameras(poses, intrinsics, height, width)
    cameras = Cameras(recentred(checked.poses), intrinsics, height, width).reduced(downscale)
    # Between the nearest and the farthest depth, three quarters of the way in 1 / depth: as LLFF's own paths do.
    focus = 1 / (0.25 / (0.9 * depths.min()) + 0.75 / (5.0 * depths.max()))
    return Scene(
        name=name,
        images=pictures.colours,
        cameras=cameras,
        held_out=tuple(range(0, len(bounds), HOLD_OUT)) if held_out is None else held_out,
        near=0.0 if ndc else 0.9 * float(depths.min()),
        far=1.0 if ndc else float(depths.max()),
        ndc=ndc,
        background=None,
        focus=float(focus),
    )


def _check_shape(name: str, bounds: np.ndarray) -> None:
    if bounds.ndim != 2 or bounds.shape[1] != 17 or bounds.dtype.kind != "f":
        raise UserError(f"{name}: poses_bounds must be (N, 17) floats, got {bounds.shape} {bounds.dtype}")
