"""Autoregressive image tokens (noble.txt, section 4.2.2): the language model's backbone on grids of image codes.

A class token, then the codes of an image row by row; next-token prediction, no dropout and no augmentation. Init is
that of `tasks.language_model`; the embedding's rows of the classes are drawn like those of the codes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nlr_lab.tasks.text.language_model import DenseInit, GlmBackbone, draw_init
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.image_tokens import ImageTokensConfig, ImageTokensForCausalLM
from nonlinear_lowrank.hub.rotary import check_head_dim

from .token_data import ImageTokenData, prepare_images

if TYPE_CHECKING:
    from .token_data import EncodedImages

_CLASSES = 10  # on meta, where the source has not been read


@dataclass(frozen=True, kw_only=True)
class ImageTokenTask:
    """Next-token prediction on image tokens, given the class."""

    tokens: ImageTokenData
    """Where the images come from, and their tokenizer."""
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
        """Tokens of an image, the class token included."""
        return self.tokens.sequence_length

    def prepare(self, progress: bool = True) -> "EncodedImages":
        """Encoded, cached images."""
        return prepare_images(self.tokens, progress=progress)

    def build_model(
        self, prepared: "EncodedImages", dense_init: DenseInit | None = None, *, seed: int = 0
    ) -> ImageTokensForCausalLM:
        """The plain float32 model on the CPU.

        Args:
            prepared: gives the codes and the classes.
            dense_init: overrides the backbone's.
            seed: of every draw. Embedding and head are the same for every dense_init.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ImageTokensForCausalLM(self._config(prepared.vocab_size, len(prepared.classes)))
        draw_init(model, self.backbone.embedding_std, dense_init or self.backbone.dense_init, seed)
        return model

    def build_on_meta(self) -> ImageTokensForCausalLM:
        """The plain model on the meta device: shapes and counts, no memory; with ten classes where none are told."""
        with torch.device("meta"):
            return ImageTokensForCausalLM(self._config(self.tokens.codes, self.tokens.classes or _CLASSES))

    def _config(self, codes: int, classes: int) -> ImageTokensConfig:
        values: dict[str, Any] = self.backbone.config(codes, self.sequence_length).to_dict()
        values.pop("model_type")
        values["rope_parameters"] = {**values["rope_parameters"], "rope_theta": self.rope_theta}
        side = self.tokens.side
        return ImageTokensConfig(**values, num_classes=classes, grid_rows=side, grid_columns=side)
