"""Settings of neural fields (coordinate networks): the networks, and the problems that they are fitted to.

Importing this imports neither torch nor what reads the data: `prepare` does.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, check_number, check_share

if TYPE_CHECKING:
    from .image import ImageProblem
    from .nerf import NerfProblem
    from .occupancy import OccupancyProblem

Activation = Literal["gaussian", "relu", "siren"]
RadianceActivation = Literal["gaussian", "relu"]
Density = Literal["relu", "softplus"]
Axis = Literal["x", "y", "z"]


def check_integers(settings: object, minimum: int, *names: str) -> None:
    """Raise UserError unless these settings are integers of at least `minimum`."""
    for name in names:
        check_integer(name, getattr(settings, name), minimum=minimum)


@dataclass(frozen=True, kw_only=True)
class FieldConfig:
    """Shape of a coordinate network; the paper's for occupancy by default."""

    in_features: int = 3
    """Coordinates of a position."""
    out_features: int = 1
    """Numbers of a value."""
    width: int = 256
    """Width of every hidden layer."""
    hidden_layers: int = 2
    """width x width linears between the first and the last: these are factored."""
    activation: Activation = "gaussian"
    """exp(-z^2 / (2 s^2)), max(z, 0), or SIREN's sin(omega_0 z)."""
    spread: float = 0.05
    """s of the Gaussian. 0.05 beat 0.1 clearly on shapes."""
    frequency: float = 30.0
    """omega_0 of SIREN."""
    octaves: int = 0
    """Positional encoding: x goes in with sin and cos of pi x, 2 pi x, ..., 2^(octaves - 1) pi x. 0: x alone."""
    factored: Literal["hidden", "all"] = "hidden"
    """Linears that a factored method takes: the width x width ones, as published, or every one that gets smaller."""

    def __post_init__(self) -> None:
        check_integers(self, 1, "in_features", "out_features", "width")
        check_integers(self, 0, "hidden_layers", "octaves")
        for name in ("spread", "frequency"):
            check_number(name, getattr(self, name), above=0)
        check_choice("activation", self.activation, get_args(Activation))
        check_choice("factored", self.factored, ("hidden", "all"))

    @property
    def encoded(self) -> int:
        """Inputs of the first linear."""
        return self.in_features * (1 + 2 * self.octaves)


@dataclass(frozen=True, kw_only=True)
class RadianceConfig:
    """Shape of a radiance field; the paper's by default."""

    width: int = 256
    """Width of the layers that see the position."""
    layers: int = 8
    """Number of these layers."""
    view_width: int = 128
    """Width of the layer that sees the direction."""
    activation: RadianceActivation = "gaussian"
    """exp(-z^2 / (2 s^2)), or max(z, 0), which without an encoding blurs."""
    spread: float = 0.2
    """s of the Gaussian. Eight layers as they are drawn vary by about 23,000 rad per unit of position at s = 0.05, 500
    at 0.1, 50 at 0.15, 12 at 0.2 and 3 at 0.3; pixels of a view 252 wide are told apart by up to 400."""
    density: Density = "softplus"
    """Activation of alpha's output: log(1 + exp(z)), or NeRF's max(z, 0), of which two draws in eight start all but
    empty (density at 2 % of the points or fewer) and then learn no depth: nothing passes a gradient there."""
    octaves: int = 0
    """Positional encoding of the position, as in NeRF (10 there). 0: none, as in the paper."""
    view_octaves: int = 0
    """The same for the direction (4 in NeRF)."""

    def __post_init__(self) -> None:
        check_integers(self, 1, "width", "layers", "view_width")
        check_integers(self, 0, "octaves", "view_octaves")
        check_number("spread", self.spread, above=0)
        check_choice("activation", self.activation, get_args(RadianceActivation))
        check_choice("density", self.density, get_args(Density))


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """The image that is fitted, and the network."""

    source: str = "china"
    """An image file, or one of the embedded photographs: china, flower."""
    crop: int = 0
    """Side of a square out of the middle; 0: the whole image."""
    size: int = 0
    """The longer side is brought down to so many pixels, after the crop; 0: as it is."""
    points: int = 16384
    """Pixels of a step, drawn anew in each; 0: all of them."""
    field: FieldConfig = field(default_factory=lambda: FieldConfig(in_features=2, out_features=3))
    """The network."""

    def __post_init__(self) -> None:
        check_integers(self, 0, "crop", "size", "points")

    def prepare(self) -> "ImageProblem":
        """Read the image; raise UserError for no such file, no image or an empty one, or a crop larger than it."""
        from . import image

        return image.prepare(self)


@dataclass(frozen=True, kw_only=True)
class NerfSettings:
    """A scene, how its rays are sampled, and the network."""

    source: str = "demo"
    """"demo", three balls in formulas; or a folder or .npz file (docs/nerf.md lists the forms)."""
    downscale: int = 1
    """Factor by which pictures get smaller, by side."""
    held_out: tuple[int, ...] | None = None
    """Views that are scored and not trained on, from 0. None: every 8th, or the scene's own test views; those are never
    trained on, named here or not."""
    ndc: bool = True
    """LLFF scenes: rays in normalised device coordinates."""
    near: float = 2.0
    """Blender scenes: depth at which rays begin."""
    far: float = 6.0
    """Blender scenes: depth at which rays end."""
    rays: int = 256
    """Rays of a training step, drawn from all pixels of all training views."""
    samples: int = 32
    """Samples on each ray, stratified."""
    fine_samples: int = 0
    """More of them where the coarse ones found something, for a second network. 0: one network, coarse only."""
    frames: int = 12
    """Frames of the path of cameras that is rendered at the end; 0: none."""
    frame_downscale: int = 2
    """Factor by which frames are smaller than the views, by side."""
    field: RadianceConfig = field(default_factory=RadianceConfig)
    """The network."""

    def __post_init__(self) -> None:
        check_integers(self, 0, "fine_samples", "frames")
        check_integers(self, 1, "downscale", "rays", "frame_downscale")
        check_integers(self, 2, "samples")
        if self.held_out is not None:
            object.__setattr__(self, "held_out", tuple(self.held_out))  # JSON turns tuples into lists

    def prepare(self) -> "NerfProblem":
        """Read the scene; raise UserError where there is none, or it is not what it should be."""
        from .nerf import prepare

        return prepare(self)


@dataclass(frozen=True, kw_only=True)
class OccupancySettings:
    """The shape that is fitted, and the network."""

    source: str = "knot"
    """A mesh file (.obj, .ply, .stl, .npz), or the embedded shape: knot."""
    repair: bool = False
    """Close the mesh's holes, each by a fan of triangles to its middle."""
    resolution: int = 128
    """n: training points are drawn from a lattice of n^3; the paper has 512."""
    points: int = 8192
    """Points of a step, drawn anew in each."""
    surface_share: float = 0.7
    """Share of them from a band about the surface, weighted so that the expected loss stays the whole box's. 0: all of
    them evenly."""
    surface_band: float = 0.03
    """Reach of the band to both sides, along each axis; the box has sides of 2."""
    held_out: int = 96
    """IoU is measured at so many points, cubed, at random places off the lattice."""
    mesh_resolution: int = 128
    """Points along each axis where the field is read for the mesh that is written."""
    field: FieldConfig = field(default_factory=FieldConfig)
    """The network."""
    up: Axis = "y"
    """The axis that points up in pictures."""
    azimuth: float = 30.0
    """Degrees that the eye is turned about it."""
    elevation: float = 15.0
    """Degrees that the eye is raised."""
    picture_height: int = 480
    """Pixels; the width follows from the shape."""

    def __post_init__(self) -> None:
        check_integer("points", self.points, minimum=1)
        check_integer("picture_height", self.picture_height, minimum=16)
        check_share("surface_share", self.surface_share)
        if not 0 < self.surface_band <= 2:
            raise UserError(f"surface_band must be above 0 and at most 2, got {self.surface_band!r}")
        for name in ("azimuth", "elevation"):
            if not -360 <= getattr(self, name) <= 360:
                raise UserError(f"{name} must be degrees from -360 to 360, got {getattr(self, name)!r}")
        check_choice("up", self.up, get_args(Axis))
        if (self.field.in_features, self.field.out_features) != (3, 1):
            raise UserError("the network of a shape has in_features 3 and out_features 1")

    def prepare(self) -> "OccupancyProblem":
        """Read the mesh; raise UserError for no such mesh, an open one, or a grid that does not fit memory."""
        from .occupancy import prepare

        return prepare(self)
