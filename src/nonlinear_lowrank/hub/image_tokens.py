"""A class-conditional language model of image tokens, as a Hugging Face model of its own type.

GLM (`tasks.language_model`: separate q, k, v, o, one fused gate-up projection, GeGLU, RMSNorm, no biases, causal)
with rotary positions on the grid (`layers.rotary`). Input ids are (B, 1 + rows x columns): the class token, then the
codes row by row. The embedding has a row for each code and each class, the head one for each code: a class is never
predicted, so the loss is that of the codes alone. `generate` needs nothing of its own: the prompt is the class token,
and the position in the sequence, with a cache or without, gives the place in the grid.

| tensor                     | distribution                                                      |
|----------------------------|-------------------------------------------------------------------|
| embedding, linears, head   | N(0, initializer_range^2), transformers'; the task draws its own  |
| norms                      | 1                                                                 |

The model type is `nlr_image_tokens`: a process without this package fails by that name.
"""

from typing import Any

from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, GlmForCausalLM, GlmModel

from .image_tokens_config import ImageTokensConfig
from .rotary import GridRotary


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


AutoModel.register(ImageTokensConfig, ImageTokensModel, exist_ok=True)
AutoModelForCausalLM.register(ImageTokensConfig, ImageTokensForCausalLM, exist_ok=True)
