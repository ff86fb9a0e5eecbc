"""Views of a scene with their cameras, some of them held out."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nonlinear_lowrank.errors import UserError

from .cameras import Cameras, circle, spiral

HOLD_OUT = 8
"""Every 8th view is held out where a scene has no test views of its own, as in both papers."""


@dataclass(frozen=True)
class Scene:
    """Views of a scene.

    Raises:
        UserError: views and cameras do not agree, a held-out view is out of range, no view is left to train on, or
            normalised device coordinates cannot show all that a view sees.
    """

    name: str
    images: np.ndarray
    """(N, H, W, 3) float32 in [0, 1]."""
    cameras: Cameras
    held_out: tuple[int, ...]
    """Views that are scored and not trained on."""
    near: float
    """Depth at which rays begin; in normalised device coordinates 0."""
    far: float
    """Depth at which they end; in normalised device coordinates 1."""
    ndc: bool
    """Rays are in normalised device coordinates with the near plane at 1."""
    background: float | None
    """Grey of what is behind everything; None: the world goes on."""
    focus: float | None = None
    """Distance of the point that a spiral of cameras looks at; None: cameras go around in a circle."""
    set_aside: tuple[int, ...] = ()
    """Views that the scene itself has for tests: never trained on, whether they are held out or not."""

    def __post_init__(self) -> None:
        views, height, width = self.images.shape[:3]
        if views != len(self.cameras):
            raise UserError(
                f"{self.name} has {views} images and {len(self.cameras)} poses; give one pose for each image"
            )
        if not height or not width:
            raise UserError(f"{self.name} has images of {width} x {height} pixels; give larger ones")
        if (height, width) != (self.cameras.height, self.cameras.width):
            raise UserError(f"{self.name} has images of another size than its cameras")
        if not np.isfinite(self.images).all():
            raise UserError(f"{self.name} has an image with a value that is not finite")
        wrong = [view for view in (*self.held_out, *self.set_aside) if not 0 <= view < views]
        if wrong:
            raise UserError(f"{self.name} has views 0 to {views - 1}; view {wrong[0]} cannot be held out")
        if len(set(self.held_out)) != len(self.held_out):
            raise UserError(f"the held-out views {', '.join(map(str, self.held_out))} name one twice")
        if not self.held_out or not self.trained:
            raise UserError(
                f"{self.name} has {views} views; hold out at least one and leave at least one to train on, "
                f"not {len(self.held_out)}" + (f" beside {len(self.set_aside)} test views" if self.set_aside else "")
            )
        if not 0 <= self.near < self.far < np.inf:
            raise UserError(f"{self.name} needs 0 <= near < far, not near {self.near:g} and far {self.far:g}")
        if self.ndc and (behind := np.flatnonzero((self.cameras.corners()[..., 2] >= 0).any(1))).size:
            raise UserError(
                f"view {behind[0]} of {self.name} sees sideways or backwards, at least in a corner of its picture, "
                "which normalised device coordinates cannot show; turn them off (--no-ndc, ndc=False)"
            )

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
        # Said only where it matters, so that fits of scenes in which it does not go on under the hash they had.
        if unused := sorted(set(self.set_aside) - set(self.held_out)):
            digest.update(repr(unused).encode())
        return digest.hexdigest()

    def path(self, frames: int) -> Cameras:
        """Cameras on a closed path: a spiral for a scene taken from one side, a circle around an object."""
        poses = self.cameras.poses
        return self.cameras.along(circle(poses, frames) if self.focus is None else spiral(poses, self.focus, frames))
