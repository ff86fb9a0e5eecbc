"""Pictures of a scene with their cameras, out of the two usual kinds of folders or one .npz file.

| form                                        | what it holds                                                      |
|---------------------------------------------|--------------------------------------------------------------------|
| folder with poses_bounds.npy ("LLFF")       | images/ or images_8/ and the like, in the order of the poses;      |
|                                             | every 8th view is held out                                         |
| folder with transforms_train.json and       | pictures that are named in them; the test views are held out       |
| transforms_test.json ("Blender")            |                                                                    |
| folder with transforms.json alone           | the same, every 8th view held out                                  |
| .npz: images, poses_bounds                  | LLFF                                                               |
| .npz: images_train, poses_train,            | Blender                                                            |
| images_test, poses_test, focal              |                                                                    |
"""

from collections.abc import Sequence
from pathlib import Path

from nlr_lab.runtime.bounds import read_arrays
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .blender import blender_folder, blender_npz
from .llff import llff_folder, llff_scene
from .scene import Scene
from .scene_files import pictures_of_array


def read_scene(
    source: str | Path,
    *,
    downscale: int = 1,
    held_out: Sequence[int] | None = None,
    ndc: bool = True,
    near: float = 2.0,
    far: float = 6.0,
) -> Scene:
    """A scene in one of this file's forms.

    Args:
        source: a folder or a .npz file.
        downscale: how many times smaller pictures get, by side. Of LLFF's images_2, images_4, ... it takes the folder
            that is nearest, and averages blocks of pixels for the rest.
        held_out: views that are scored and not trained on, numbered from 0 (Blender: training views first, then test
            views). None: the form's own. Test views that a scene has of its own are never trained on, named or not.
        ndc: LLFF only: normalised device coordinates; False for depths from 0.9 x the nearest to the farthest.
        near: Blender only: depth at which rays begin.
        far: Blender only: depth at which they end.

    Raises:
        UserError: what is given is none of the forms, or something in it does not fit; the message says what.
    """
    path = Path(source).expanduser()
    check_integer("downscale", downscale, minimum=1)
    out = None if held_out is None else tuple(int(view) for view in held_out)
    if path.is_file():
        arrays = read_arrays(path)
        if {"images", "poses_bounds"} <= set(arrays):
            pictures = pictures_of_array(path.stem, arrays["images"], downscale)
            return llff_scene(path.stem, pictures, arrays["poses_bounds"], downscale, out, ndc)
        return blender_npz(path, arrays, downscale, out, near, far)
    if not path.is_dir():
        raise UserError(f"there is no file or folder {path}; give a scene's folder or .npz file")
    if (path / "poses_bounds.npy").is_file():
        return llff_folder(path, downscale, out, ndc)
    return blender_folder(path, downscale, out, near, far)
