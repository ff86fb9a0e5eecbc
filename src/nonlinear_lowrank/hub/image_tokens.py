"""A class-conditional language model of image tokens, as a Hugging Face model of its own type (docs/models.md).

GLM with a class token in front of the codes and rotary positions on the grid (noble.txt, section 4.2.2: "2D RoPE").
`generate` needs nothing of its own: the position p in the sequence gives the place in the grid, 0 for the class token
and for every other row 1 + (p - 1) // columns, column 1 + (p - 1) % columns. All weights are drawn by transformers.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GlmConfig, GlmForCausalLM, GlmModel

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_head_dim, check_integer


@strict
class ImageTokensConfig(GlmConfig):
    """GLM's config, for images instead of text.

    `vocab_size` counts the codes of the image tokenizer, which is what the head predicts. The input embedding has
    `num_classes` rows more: class c is token vocab_size + c. `max_position_embeddings` follows from the grid.

    Raises:
        UserError: heads whose dimension is not divisible by 4, a grid or a number of classes below 1, or tied
            embeddings, which have different numbers of rows.
    """

    model_type = "nlr_image_tokens"

    vocab_size: int = 512
    num_classes: int = 10
    grid_rows: int = 8
    grid_columns: int = 8
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
            check_integer(name, getattr(self, name), minimum=1)
        if self.tie_word_embeddings:
            raise UserError("tie_word_embeddings must be false: the input embedding has rows for classes too")


class GridRotary(nn.Module):
    """Cosines and sines of positions on the grid, in the layout of transformers' GLM; it has no tensors.

    Of each head's dimensions the first half turns by the token's row, the second half by its column, each as a rotary
    embedding of head_dim / 2 dimensions turns text: pair j of a half by place * theta ** (-2j / (head_dim / 2)).
    Raises UserError where head_dim is not divisible by 4.
    """

    def __init__(self, head_dim: int, columns: int, theta: float = 10_000.0) -> None:
        super().__init__()
        check_head_dim(head_dim)
        self.head_dim, self.columns, self.theta = head_dim, columns, theta

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each (B, T, head_dim) in x's type, for positions (B, T); computed in float32 or wider."""
        exact = torch.promote_types(x.dtype, torch.float32)
        image, first = position_ids.clamp_min(1) - 1, position_ids < 1
        places = (1 + image // self.columns, 1 + image % self.columns)
        pairs = self.head_dim // 4
        frequencies = self.theta ** -(torch.arange(pairs, device=x.device, dtype=exact) / pairs)
        halves = [place.masked_fill(first, 0).to(exact)[..., None] * frequencies for place in places]
        angles = torch.cat(halves * 2, dim=-1)  # GLM reads the first half, an angle a pair, and wants the full width
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, columns={self.columns}, theta={self.theta:g}"


class ImageTokensModel(GlmModel):
    """The backbone; see the module's documentation."""

    config_class = ImageTokensConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size + config.num_classes, config.hidden_size)
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        rotary: Any = GridRotary(head_dim, config.grid_columns, config.rope_parameters["rope_theta"])
        self.rotary_emb = rotary
        self.post_init()


class ImageTokensForCausalLM(GlmForCausalLM):
    """The backbone under a head of codes; see the module's documentation."""

    config_class = ImageTokensConfig

    def __init__(self, config: Any) -> None:
        super(GlmForCausalLM, self).__init__(config)  # GLM's own would draw a backbone that is thrown away
        self.model = ImageTokensModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(ImageTokensConfig.model_type, ImageTokensConfig, exist_ok=True)
AutoModel.register(ImageTokensConfig, ImageTokensModel, exist_ok=True)
AutoModelForCausalLM.register(ImageTokensConfig, ImageTokensForCausalLM, exist_ok=True)
