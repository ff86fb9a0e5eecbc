"""The config of `hub.pooled`, apart from it: that imports transformers' modeling code, which takes seconds."""

from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig


class MeanPooledConfig(PreTrainedConfig):
    """The encoder's config and where its weights are.

    Args:
        encoder: the encoder's config, as its `to_dict` gives it.
        encoder_checkpoint: name or folder of the encoder, for a folder without weights.
        **kwargs: PreTrainedConfig's (num_labels, ...).
    """

    model_type = "nlr_mean_pooled"

    def __init__(self, encoder: dict[str, Any] | None = None, encoder_checkpoint: str = "", **kwargs: Any) -> None:
        self.encoder = encoder or {}
        self.encoder_checkpoint = encoder_checkpoint
        self.hidden_size = self.encoder.get("hidden_size", 0)
        self.vocab_size = self.encoder.get("vocab_size", 0)
        super().__init__(**kwargs)

    def encoder_config(self) -> PreTrainedConfig:
        """The encoder's config as an object."""
        values = dict(self.encoder)
        return AutoConfig.for_model(values.pop("model_type"), **values)


AutoConfig.register(MeanPooledConfig.model_type, MeanPooledConfig, exist_ok=True)
