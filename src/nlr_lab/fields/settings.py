"""Settings of neural fields (coordinate networks): networks, problems that they are fitted to, the fit, and recipes.

Importing this imports neither torch nor what reads the data: `prepare` does.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

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
OccupancyLoss = Literal["cross-entropy", "squared"]
Schedule = Literal["cosine", "linear", "exponential", "constant"]


def check_integers(settings: object, minimum: int, *names: str) -> None:
    """Raise UserError unless these settings are integers of at least `minimum`."""
    for name in names:
        check_integer(name, getattr(settings, name), minimum=minimum)


@dataclass(frozen=True, kw_only=True)
class FieldConfig:
    """Shape of a coordinate network; by default the paper's for occupancy, which prints no `spread`."""

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
    """s of the Gaussian. 0.05 beat 0.1, which the paper's released code has, clearly on shapes."""
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
    """Pixels to which the longer side is reduced, after the crop; 0: as it is."""
    points: int = 16384
    """Pixels per step, redrawn in each; 0: all of them."""
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
    """"demo", three balls in formulas; or a folder or .npz file (docs/fields.md lists the forms)."""
    downscale: int = 1
    """Factor by which each side of the pictures shrinks."""
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
        """Read the scene; raise UserError where it is missing or malformed."""
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
    """Points per step, redrawn in each."""
    loss: OccupancyLoss = "cross-entropy"
    """"cross-entropy" of the log-odds, or "squared": the squared error of the output to -0.5 outside and 0.5
    inside. The paper's released code fits 0 and 1, inside above 0.5: the same except for the start of the last bias."""
    surface_share: float = 0.7
    """Share of them from a band about the surface, weighted so that the expected loss stays the whole box's. 0: all of
    them evenly."""
    surface_band: float = 0.03
    """Reach of the band to both sides, along each axis; the box has sides of 2."""
    held_out: int = 96
    """IoU is measured at this number of points, cubed, at random places off the lattice."""
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
        check_choice("loss", self.loss, get_args(OccupancyLoss))
        check_choice("up", self.up, get_args(Axis))
        if (self.field.in_features, self.field.out_features) != (3, 1):
            raise UserError("the network of a shape has in_features 3 and out_features 1")

    def prepare(self) -> "OccupancyProblem":
        """Read the mesh; raise UserError for no such mesh, an open one, or a grid that does not fit memory."""
        from .occupancy import prepare

        return prepare(self)


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """The optimization of a fit: Adam, all parameters at one learning rate, no weight decay."""

    steps: int = 2000
    """Optimizer steps."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """From the peak to `end` times the peak."""
    end: float = 0.01
    """The last step's learning rate as a share of the peak."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Adam's."""
    eps: float = 1e-8
    """Adam's."""
    max_grad_norm: float = 0.0
    """Gradients are clipped to this norm; 0: not clipped."""
    seed: int = 0
    """Seed of the initial draw and of every batch."""
    eval_every: int = 0
    """Steps between evaluations; 0: a tenth of all. The last step is always evaluated."""
    save_every: int = 500
    """Steps between checkpoints; 0: none."""
    keep_checkpoints: int = 1
    """Number of the newest that are kept."""
    compile: bool = False
    """Compile the model by torch.compile; takes half a minute first."""
    threads: int | None = None
    """CPU threads; None: torch's own choice."""
    device: str = ""
    """cpu, cuda or cuda:0; empty: the GPU where there is one."""

    def __post_init__(self) -> None:
        check_integers(self, 1, "steps", "keep_checkpoints", *(["threads"] if self.threads is not None else []))
        check_integers(self, 0, "warmup_steps", "seed", "eval_every", "save_every")
        if self.seed >= 2**31:
            raise UserError(f"seed must be below 2^31, got {self.seed}")
        for name in ("lr", "eps"):
            check_number(name, getattr(self, name), above=0)
        check_number("max_grad_norm", self.max_grad_norm, minimum=0)
        check_choice("schedule", self.schedule, get_args(Schedule))
        if not 0 <= self.end <= 1 or (self.schedule == "exponential" and self.end == 0):
            raise UserError(f"end must be a share of the peak, from 0 (exponential: above 0) to 1, got {self.end!r}")
        if self.warmup_steps > self.steps:
            raise UserError(f"warmup_steps ({self.warmup_steps}) must not exceed steps ({self.steps})")
        if self.schedule == "constant" and self.end != type(self).end:
            raise UserError("end does nothing with schedule='constant'; omit it")
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON turns tuples into lists
        if len(self.betas) != 2 or not all(isinstance(each, int | float) and 0 <= each < 1 for each in self.betas):
            raise UserError(f"betas must be two numbers of at least 0 and below 1, got {self.betas!r}")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step (from 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup_steps) / max(self.steps - 1 - self.warmup_steps, 1)
        if self.schedule == "exponential":
            return self.lr * self.end**done
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.lr * (self.end + (1 - self.end) * left)

    def evaluates(self, step: int) -> bool:
        """Return whether there is an evaluation after so many steps."""
        return step == self.steps or step % (self.eval_every or max(self.steps // 10, 1)) == 0


@dataclass(frozen=True, kw_only=True)
class FieldRecipe:
    """A problem, and the methods that `nlr compare` compares on it."""

    name: str = ""
    description: str = ""
    problem: Any
    """One of those above, or another dataclass whose `prepare()` gives a `problem.Problem`."""
    method: str
    """Short form of the method that `nlr fit` fits by default (`problem.FieldMethod`)."""
    train: FitConfig
    arms: tuple[str, ...] = ()
    """Short forms of the methods that are compared (`problem.FieldArm`)."""
    seeds: int = 3
    tune_lr: tuple[float, ...] = ()
    """Learning rates that every arm is tuned over; empty: the recipe's."""
