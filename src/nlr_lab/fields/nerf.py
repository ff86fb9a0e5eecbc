"""Neural radiance fields: a scene's views, fitted by volume rendering, scored on views that were held out.

Source: Mildenhall et al. 2020, "NeRF"; sine_lowrank.txt, section 4.3 and appendix A.2.4.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import require

from .model import Radiance
from .problem import FieldMethod
from .rendering import Cameras, Rays, ndc_rays, pixel_rays, render
from .scenes import DEMO_SIZE, Scene, demo_scene, read_scene
from .settings import NerfSettings

_POINTS = 1 << 14  # that are evaluated at once where no gradient is needed
_WINDOW = 11  # pixels of SSIM's window, by side
_GAP = 4  # pixels between two pictures
_FRAME_MS = 100


def prepare(settings: NerfSettings) -> "NerfProblem":
    if settings.source == "demo":
        unused = [name for name in ("ndc", "near", "far") if getattr(settings, name) != getattr(NerfSettings, name)]
        if unused:
            raise UserError(f"{unused[0]} does nothing: the demo's scene has bounds of its own; omit it")
        scene = demo_scene(size=max(DEMO_SIZE // settings.downscale, 1), held_out=settings.held_out)
        return NerfProblem(scene, settings)
    own = {name: getattr(settings, name) for name in ("downscale", "held_out", "ndc", "near", "far")}
    return NerfProblem(read_scene(settings.source, **own), settings)


class NerfProblem:
    """A radiance field for a scene (see `problem.Problem`); of the settings sampling and network count.

    Raises:
        UserError: the views are too small to be scored, or frames are wanted and no path can be made of the cameras.
    """

    score = "psnr"

    def __init__(self, scene: Scene, settings: NerfSettings) -> None:
        height, width = scene.cameras.height, scene.cameras.width
        small = f"{scene.name} has views of {width} x {height} pixels"
        if min(height, width) < _WINDOW:
            raise UserError(f"{small}; SSIM needs {_WINDOW} x {_WINDOW}: give a smaller downscale")
        if settings.frames and min(height, width) < settings.frame_downscale:
            times = settings.frame_downscale
            raise UserError(f"{small}; frames cannot be {times} times smaller: give a smaller frame_downscale")
        require("fields", "skimage")  # report a missing package before the work, not after
        self.scene, self.settings = scene, settings
        self._path: Cameras | None = None
        if settings.frames:
            try:
                self._path = scene.path(settings.frames).reduced(settings.frame_downscale)
            except UserError as error:
                why = f"no path can be made for the frames of {scene.name}: {error}"
                raise UserError(f"{why}, or set frames to 0") from error
        self.name = scene.name
        said = repr((scene.fingerprint, settings.rays, settings.samples, settings.fine_samples, settings.field))
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()
        self._images = torch.from_numpy(scene.images)
        self._trained = torch.tensor(scene.trained)
        self._counts = [count for count in (settings.samples, settings.fine_samples) if count]

    def build(self, method: FieldMethod, generator: torch.Generator) -> nn.Module:
        """Build a `Radiance`; omega, where it was left open, is the one published for NeRF at this rank."""
        return Radiance(self.settings.field, method.resolved("nerf"), self.settings.fine_samples > 0, generator)

    def batch(self, step: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw rays through random pixels of training views: origins, directions, views, colours (rays, 3); places.

        The places are those of the samples within their bins, (rays, samples), and of the fine ones if there are any.
        """
        rays, cameras = self.settings.rays, self.scene.cameras
        view = self._trained[torch.randint(len(self._trained), (rays,), generator=generator)]
        row, column = (torch.randint(n, (rays,), generator=generator) for n in (cameras.height, cameras.width))
        jitters = [torch.rand(rays, count, generator=generator) for count in self._counts]
        return *self._rays(cameras, view, row, column), self._images[view, row, column], *jitters

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean squared error of colour, summed over the coarse and the fine picture (NeRF, equation (6))."""
        origins, directions, views, colours, *jitters = batch
        passes = self._render(model, Rays(origins, directions, views), *jitters)
        return torch.stack([(each - colours).square().mean() for each in passes]).sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """PSNR (dB) and SSIM (the Gaussian window of Wang et al. 2004), each the mean over the held-out views."""
        metrics = require("fields", "skimage.metrics")
        scores = []
        for view in self.scene.held_out:
            truth, seen = self.scene.images[view], self.view(model, self.scene.cameras, view)
            window = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
            similarity = metrics.structural_similarity(truth, seen, data_range=1.0, channel_axis=-1, **window)
            with np.errstate(divide="ignore"):  # of equal pictures it is infinite
                scores.append((metrics.peak_signal_noise_ratio(truth, seen, data_range=1.0), similarity))
        psnr, ssim = np.mean(scores, axis=0)
        return {"psnr": float(psnr), "ssim": float(ssim)}

    def picture(self, model: nn.Module | None) -> np.ndarray:
        """Return the first held-out view, (height, width, 3) uint8; None: as it is."""
        view = self.scene.held_out[0]
        return _bytes(self.scene.images[view] if model is None else self.view(model, self.scene.cameras, view))

    def write(self, model: nn.Module, folder: Path) -> list[Path]:
        """Write each held-out view with the truth to its left, and the path as frames and as one moving picture."""
        pictures = {}
        for view in self.scene.held_out:
            truth, seen = self.scene.images[view], self.view(model, self.scene.cameras, view)
            beside = np.concatenate([truth, np.ones((len(truth), _GAP, 3), np.float32), seen], 1)
            pictures[folder / f"view-{view:03d}.png"] = Image.fromarray(_bytes(beside))
        frames = []
        if self._path is not None:
            frames = [Image.fromarray(_bytes(self.view(model, self._path, each))) for each in range(len(self._path))]
            (folder / "path").mkdir()
            pictures |= {folder / "path" / f"frame-{number:03d}.png": frame for number, frame in enumerate(frames)}
        for file, picture in pictures.items():
            picture.save(file)
        files = list(pictures)
        if frames:
            files.insert(1, folder / "path.gif")
            frames[0].save(files[1], save_all=True, append_images=frames[1:], duration=_FRAME_MS, loop=0)
        return files

    @torch.no_grad()
    def view(self, model: nn.Module, cameras: Cameras, number: int) -> np.ndarray:
        """Render what a camera sees, samples at the middles of their bins: (height, width, 3) float32 in [0, 1]."""
        device, width = next(model.parameters()).device, cameras.width
        place = torch.arange(cameras.height * width)
        rays = self._rays(cameras, torch.full_like(place, number), place // width, place % width)
        at_once, colours = max(1, _POINTS // sum(self._counts)), []
        for some in zip(*(each.to(device).split(at_once) for each in rays), strict=True):
            middles = [torch.full((len(some[0]), count), 0.5, device=device) for count in self._counts]
            colours.append(self._render(model, Rays(*some), *middles)[-1].clamp(0, 1).cpu())
        return torch.cat(colours).reshape(cameras.height, cameras.width, 3).numpy()

    def _rays(self, cameras: Cameras, view: Tensor, row: Tensor, column: Tensor) -> Rays:
        """Return rays through pixels in the coordinates that the network sees, float32."""
        rays = pixel_rays(cameras, view, row, column)
        if self.scene.ndc:
            # The views' own cameras say what the box is, so that all pictures of the scene share it.
            box = self.scene.cameras
            focal_x, focal_y = (float(each) for each in box.intrinsics[0, :2])
            rays = ndc_rays(rays, 2 * focal_x / box.width, 2 * focal_y / box.height)
        return Rays(*(each.float() for each in rays))

    def _render(self, model: nn.Module, rays: Rays, jitter: Tensor, fine_jitter: Tensor | None = None) -> list[Tensor]:
        scene, fine = self.scene, None if fine_jitter is None else partial(model, fine=True)
        bounds: dict[str, Any] = {"near": scene.near, "far": scene.far, "background": scene.background}
        return render(model, fine, rays, jitter, fine_jitter, **bounds)


def _bytes(colours: np.ndarray) -> np.ndarray:
    """[0, 1] to uint8, rounded."""
    return np.rint(colours * 255).astype(np.uint8)
