"""The config of `hub.image_tokens`, apart from it: that imports transformers' modeling code, which takes seconds."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.glm.configuration_glm import GlmConfig

from nonlinear_lowrank.errors import UserError


@strict
class ImageTokensConfig(GlmConfig):
    """GLM's config, for images instead of text.

    `vocab_size` counts the codes of the image tokenizer, which is what the head predicts. The input embedding has
    `num_classes` rows more: class c is token vocab_size + c. `max_position_embeddings` is always the class token and
    the grid. There is no end-of-text token: every image has the same number of tokens.

    Raises:
        UserError: heads whose dimension is not divisible by 4, a grid or a number of classes below 1, or tied
            embeddings, which have different numbers of rows.
    """

    model_type = "nlr_image_tokens"

    vocab_size: int = 512
    num_classes: int = 10
    """Classes that an image can be asked for."""
    grid_rows: int = 8
    """Rows of tokens."""
    grid_columns: int = 8
    """Tokens in a row."""
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        ends = self.eos_token_id
        kwargs.setdefault("partial_rotary_factor", 1.0)
        self.max_position_embeddings = 1 + self.grid_rows * self.grid_columns
        super().__post_init__(**kwargs)
        self.eos_token_id = ends  # where there is none, GLM puts its own three
        for name in ("num_classes", "grid_rows", "grid_columns"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tie_word_embeddings:
            raise UserError(
                "tie_word_embeddings must be false: the input embedding has classes and codes, the head codes alone"
            )


AutoConfig.register(ImageTokensConfig.model_type, ImageTokensConfig, exist_ok=True)
