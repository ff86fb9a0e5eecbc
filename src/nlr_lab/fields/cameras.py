"""Pinhole cameras: poses, intrinsics, paths through a scene.

Axes are OpenGL's: a camera looks along -z with x to the right and y up. A pose is camera-to-world, 3 x 4
`[R | t]`. A pixel (column i, row j) is seen through its centre (i + 1/2, j + 1/2).
"""

from dataclasses import dataclass, replace

import numpy as np

from nonlinear_lowrank.errors import UserError

_ROTATION_ERROR = 1e-3  # of R^T R against the identity; float32 poses have 1e-6


@dataclass(frozen=True)
class Cameras:
    """N cameras with pictures of one size.

    Raises:
        UserError: a value is not finite, a pose is not a rotation, a focal length is not above 0.
    """

    poses: np.ndarray
    """(N, 3, 4) float64, camera-to-world."""
    intrinsics: np.ndarray
    """(N, 4) float64, in pixels: focal lengths along x and y, centre's column and row."""
    height: int
    width: int

    def __post_init__(self) -> None:
        if self.poses.shape != (len(self.poses), 3, 4) or self.intrinsics.shape != (len(self.poses), 4):
            raise UserError(
                f"cameras need poses (N, 3, 4) and intrinsics (N, 4), got {self.poses.shape} and "
                f"{self.intrinsics.shape}"
            )
        for name, values in (("pose", self.poses), ("focal length or centre", self.intrinsics)):
            if not np.isfinite(values).all():
                view = int(np.argwhere(~np.isfinite(values))[0][0])
                raise UserError(f"the {name} of view {view} holds a value that is not finite; fix or remove that view")
        if len(self.poses) and (self.intrinsics[:, :2] <= 0).any():
            view = int(np.argmax((self.intrinsics[:, :2] <= 0).any(-1)))
            raise UserError(f"the focal length of view {view} must be above 0, got {self.intrinsics[view, :2].min():g}")
        rotations = self.poses[:, :, :3]
        off = np.abs(rotations.transpose(0, 2, 1) @ rotations - np.eye(3)).max((1, 2), initial=0)
        for view in range(len(self.poses)):
            if off[view] > _ROTATION_ERROR or np.linalg.det(rotations[view]) < 0:
                what = "mirrored" if off[view] <= _ROTATION_ERROR else f"R^T R is off the identity by {off[view]:.2g}"
                raise UserError(
                    f"the pose of view {view} is not a rotation ({what}); poses are camera-to-world [R | t] with "
                    "orthonormal R of determinant 1"
                )

    def __len__(self) -> int:
        return len(self.poses)

    def corners(self) -> np.ndarray:
        """Directions, in the world, of the rays through the four corner pixels of each picture: (N, 4, 3)."""
        focal, centre = self.intrinsics[:, None, :2], self.intrinsics[:, None, 2:]
        ends = np.array([[x, y] for y in (0.5, self.height - 0.5) for x in (0.5, self.width - 0.5)])
        across = (ends - centre) / focal * [1, -1]
        local = np.concatenate([across, np.full((len(self), 4, 1), -1.0)], axis=2)
        return local @ self.poses[:, :, :3].transpose(0, 2, 1)

    def reduced(self, factor: int) -> "Cameras":
        """The cameras of pictures whose blocks of factor x factor pixels became one; what is left over is cut off."""
        return replace(
            self, intrinsics=self.intrinsics / factor, height=self.height // factor, width=self.width // factor
        )

    def along(self, poses: np.ndarray) -> "Cameras":
        """Cameras like the first one at other poses (M, 3, 4)."""
        return replace(self, poses=poses, intrinsics=np.repeat(self.intrinsics[:1], len(poses), 0))


def look_at(position: np.ndarray, target: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The pose (3, 4) of a camera at a position that looks at a target."""
    back = _unit(position - target)
    right = _unit(np.cross(up, back))
    return np.stack([right, np.cross(back, right), back, position], 1)


def average_pose(poses: np.ndarray) -> np.ndarray:
    """(3, 4): mean position and viewing direction, upright as the poses (N, 3, 4) are on average."""
    centre = poses[:, :, 3].mean(0)
    return look_at(centre, centre - poses[:, :, 2].mean(0), poses[:, :, 1].mean(0))


def recentred(poses: np.ndarray) -> np.ndarray:
    """Poses (N, 3, 4) in a world in which the average pose is the identity."""
    average = average_pose(poses)
    moved = poses.copy()
    moved[:, :, 3] -= average[:, 3]
    # No matrix product: BLAS rounds otherwise on other processors, and scenes are told apart by their poses' bits.
    return (average[:, :3].T[:, :, None] * moved[:, None]).sum(2)


def spiral(poses: np.ndarray, focus: float, frames: int) -> np.ndarray:
    """A closed path for a scene taken from one side: a turn within the views' spread, all looking at one point.

    Args:
        poses: (N, 3, 4) of the views.
        focus: distance of that point from the average camera.
        frames: number of poses.

    Returns:
        (frames, 3, 4).
    """
    average = average_pose(poses)
    radii = np.percentile(np.abs((poses[:, :, 3] - average[:, 3]) @ average[:, :3]), 90, axis=0)
    angle = 2 * np.pi * np.arange(frames)[:, None] / frames
    offsets = np.concatenate([np.cos(angle), -np.sin(angle), -np.sin(angle) / 2], 1) * radii
    target = average[:, 3] - focus * average[:, 2]
    return np.stack([look_at(average[:, 3] + average[:, :3] @ each, target, average[:, 1]) for each in offsets])


def circle(poses: np.ndarray, frames: int) -> np.ndarray:
    """A closed path around an object: the views' mean distance and height, all looking where the views' axes meet.

    Args:
        poses: (N, 3, 4) of the views.
        frames: number of poses.

    Returns:
        (frames, 3, 4).
    """
    positions, axes = poses[:, :, 3], poses[:, :, 2]
    # The point nearest to all optical axes: sum (I - a a^T) (x - p) = 0.
    across = np.eye(3) - axes[:, :, None] * axes[:, None, :]
    target = np.linalg.lstsq(across.sum(0), (across @ positions[:, :, None]).sum(0)[:, 0], rcond=None)[0]
    up = _unit(poses[:, :, 1].mean(0))
    offsets = positions - target
    height = (offsets @ up).mean()
    radius = np.linalg.norm(offsets - (offsets @ up)[:, None] * up, axis=1).mean()
    side = _unit(np.cross(up, np.eye(3)[np.argmin(np.abs(up))]))
    angle = 2 * np.pi * np.arange(frames)[:, None] / frames
    ring = np.cos(angle) * side + np.sin(angle) * np.cross(up, side)
    return np.stack([look_at(target + radius * each + height * up, target, up) for each in ring])


def _unit(vector: np.ndarray) -> np.ndarray:
    length = np.sqrt(np.square(vector).sum())  # as in `recentred`, the same on all processors
    if not length > 0:
        raise UserError("the cameras' directions cancel out: there is no average view; give fewer or other views")
    return vector / length
