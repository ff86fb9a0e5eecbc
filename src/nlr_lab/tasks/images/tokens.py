"""Autoregressive image tokens (noble.txt, section 4.2.2): the language model's backbone on grids of image codes.

A class token, then the codes of an image row by row; next-token prediction, no dropout and no augmentation. Init is
that of `tasks.text.language_model`; the embedding's rows of the classes are drawn like those of the codes.
"""

from dataclasses import dataclass
from typing import Any

from nlr_lab.tasks.task import Prepared, Task
from nlr_lab.tasks.text.language_model import DenseInit, GlmBackbone, build_drawn, build_meta
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_head_dim, check_integer

_CLASSES = 10  # on meta, where the source has not been read


@dataclass(frozen=True, kw_only=True)
class ImageTokenData:
    """Settings of image tokens: source and tokenizer."""

    source: str = "digits"
    """"digits" (scikit-learn's), a .npz file (also .npz.xz), a folder of classes, or a dataset's name."""
    size: int = 8
    """Pixels of a side: the shorter one is scaled to it, of the longer one the middle is kept."""
    tokenizer: str = "patches"
    """"patches" (the nearest of mean patches, fitted on the training images), or a VQModel of diffusers: a folder or
    a hub name such as amused/amused-512."""
    patch: int = 4
    """Pixels of a token's side; a VQModel has its own, which this must be."""
    codes: int = 512
    """Different tokens; a VQModel has its own number, which this must be."""
    classes: int | None = None
    """Classes that the source must have; None: as many as it has."""
    train_images: int | None = None
    """Use this many of the training images, a fixed random choice; None: all."""
    eval_images: int = 1024
    """Held-out images that are evaluated, chosen likewise; fewer where there are fewer."""
    cache_dir: str | None = None
    """Folder of cached tokens; None: $NLR_CACHE, else the user's cache folder."""

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("patch", 1), ("codes", 2), ("eval_images", 1)):
            check_integer(name, getattr(self, name), minimum=least)
        for name in ("classes", "train_images"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)
        if self.size % self.patch:
            what = f"images of {self.size} pixels do not divide into patches of {self.patch}"
            raise UserError(f"{what}; choose a multiple of {self.patch}")

    @property
    def side(self) -> int:
        """Tokens in a row, and rows."""
        return self.size // self.patch

    @property
    def sequence_length(self) -> int:
        """Tokens of an image, the class token included."""
        return 1 + self.side**2


@dataclass(frozen=True, kw_only=True)
class ImageTokenTask(Task):
    """Next-token prediction on image tokens, given the class."""

    tokens: ImageTokenData
    """Source of the images, and their tokenizer."""
    backbone: GlmBackbone
    """The model without branches; each head is a multiple of 4 wide."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths, of rows and of columns alike; the language model's."""

    def __post_init__(self) -> None:
        check_head_dim(self.backbone.width // self.backbone.heads)
        if not 1 < self.rope_theta < float("inf"):
            raise UserError(f"rope_theta must be a finite number above 1, got {self.rope_theta!r}")

    @property
    def sequence_length(self) -> int:
        return self.tokens.sequence_length

    def prepare(self, progress: bool = True) -> Prepared:
        from .encoding import prepare_images

        return prepare_images(self.tokens, progress=progress)

    def build_model(self, prepared: Any, dense_init: DenseInit | None = None, *, seed: int = 0) -> Any:
        model_class, config = self._model(prepared.vocab_size, len(prepared.classes))
        return build_drawn(model_class, config, self.backbone, dense_init, seed)

    def build_on_meta(self) -> Any:
        return build_meta(*self._model(self.tokens.codes, self.tokens.classes or _CLASSES))

    def _model(self, codes: int, classes: int) -> tuple[Any, Any]:
        from nonlinear_lowrank.hub.image_tokens import ImageTokensConfig, ImageTokensForCausalLM

        values: dict[str, Any] = self.backbone.config(codes, self.sequence_length).to_dict()
        values.pop("model_type")
        values["rope_parameters"] = {**values["rope_parameters"], "rope_theta": self.rope_theta}
        side = self.tokens.side
        config = ImageTokensConfig(**values, num_classes=classes, grid_rows=side, grid_columns=side)
        return ImageTokensForCausalLM, config
