"""The paper's language model: a GLM backbone on packed text (noble.txt, section 4.1.1).

Init of every tensor; draws depend on the seed alone, never on the global generator:

| tensor                         | dense_init | distribution                         |
|--------------------------------|------------|--------------------------------------|
| input embedding                | any        | N(0, embedding_std^2)                |
| output head                    | any        | N(0, 0.02^2), the same in all arms   |
| linears between (q, k, v, o,   | stock      | N(0, 0.02^2), transformers' own      |
| gate-up, down), no biases      | noble      | N(0, (0.5 / sqrt(d_in))^2)           |
|                                | kaiming    | U(+-1 / sqrt(d_in)), nn.Linear's own |
| norm weights                   | any        | 1                                    |
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import nn
from transformers import GlmConfig, GlmForCausalLM

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .data import TextData, prepare_text

if TYPE_CHECKING:
    from .data import PackedText

DenseInit = Literal["stock", "noble", "kaiming"]

HEAD_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """Sizes and init of a transformer on tokens, whatever its class."""

    layers: int
    """Number of transformer blocks."""
    width: int
    """d, the model width; a multiple of heads, and of 2 x heads with rotary positions, which turn pairs."""
    heads: int
    """Attention heads, each width / heads wide; keys and values have as many."""
    hidden: int
    """Width of the MLP; where it is gated, gate and up projection are both width -> hidden."""
    embedding_std: float = 0.02
    """Standard deviation of the input embedding, equal in all arms."""
    dense_init: DenseInit = "stock"
    """Init of the linears: see the table of this file. An arm may override it."""
    dropout: float = 0.0
    """Dropout on the attention weights, the only one these backbones have (OPT: also on what each block adds)."""

    _head_multiple: ClassVar[int] = 2
    """What a head's width must be a multiple of."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "hidden"):
            check_integer(name, getattr(self, name), minimum=1)
        step = self._head_multiple * self.heads
        if self.width % step:
            even = " of even size" if self._head_multiple == 2 else ""
            raise UserError(
                f"width {self.width} does not split into {self.heads} heads{even}; choose a multiple of {step}"
            )
        if not 0 < self.embedding_std < math.inf:
            raise UserError(f"embedding_std must be a finite number above 0, got {self.embedding_std!r}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, got {self.dropout!r}")
        check_dense_init(self.dense_init)


@dataclass(frozen=True, kw_only=True)
class GlmBackbone(Backbone):
    """A GLM. Every linear is separate but the gate-up projection, one linear of width -> 2 x hidden."""

    def config(self, vocab_size: int, sequence_length: int, eos_token_id: int | None = None) -> GlmConfig:
        """The transformers config of these sizes."""
        config = GlmConfig(
            vocab_size=vocab_size,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=self.width // self.heads,
            hidden_act="gelu",
            attention_dropout=self.dropout,
            attention_bias=False,
            max_position_embeddings=sequence_length,
            initializer_range=HEAD_STD,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
            # GLM's own special tokens lie far outside a small vocabulary.
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=0 if eos_token_id is None else eos_token_id,
        )
        if eos_token_id is None:
            config.eos_token_id = None  # given as an argument, None would mean GLM's own three
        return config


@dataclass(frozen=True, kw_only=True)
class NextTokenTask:
    """Next-token prediction on packed text, by a backbone of any class: a subclass names both classes."""

    text: TextData
    """Where the text comes from, its tokenizer, and the sequence length."""
    backbone: Any
    """The model that is not changed."""

    _model_class: ClassVar[Any]
    """The transformers class of the backbone's config."""

    def prepare(self, progress: bool = True) -> "PackedText":
        """Tokenized, packed, cached text."""
        return prepare_text(self.text, progress=progress)

    def build_model(self, prepared: "PackedText", dense_init: DenseInit | None = None, *, seed: int = 0) -> Any:
        """The plain float32 model on the CPU.

        Args:
            prepared: gives the vocabulary and the end-of-text token.
            dense_init: overrides the backbone's.
            seed: of every draw. Embedding and head are the same for every dense_init.
        """
        config = self._config(prepared.vocab_size, prepared.tokenizer.eos_token_id)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self._model_class(config)
        draw_init(model, self.backbone.embedding_std, dense_init or self.backbone.dense_init, seed)
        return model

    def build_on_meta(self, vocab_size: int | None = None) -> Any:
        """The plain model on the meta device: shapes and counts, no memory."""
        with torch.device("meta"):
            return self._model_class(self._config(vocab_size or self.text.vocab_size, None))

    def _config(self, vocab_size: int, eos_token_id: int | None) -> Any:
        return self.backbone.config(vocab_size, self.text.sequence_length, eos_token_id)


@dataclass(frozen=True, kw_only=True)
class LanguageModelTask(NextTokenTask):
    """Next-token prediction on packed text, by a GLM."""

    backbone: GlmBackbone
    """The model without branches."""

    _model_class = GlmForCausalLM


@torch.no_grad()
def draw_init(model: Any, embedding_std: float, dense_init: DenseInit, seed: int) -> None:
    """Draws this file's table into a built model, in place; the head, outside `model.model`, stays as it was drawn."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    # One generator a kind: an arm's dense init must not shift the embedding's draws.
    embedding.weight.normal_(0.0, embedding_std, generator=torch.Generator().manual_seed(2 * seed + 1))
    draw_linears(model.model, dense_init, seed)


@torch.no_grad()
def draw_linears(module: nn.Module, dense_init: DenseInit, seed: int) -> None:
    """Draws the weights of a part's linears by this file's table, in place; "stock" leaves them."""
    if dense_init == "stock":
        return
    generator = torch.Generator().manual_seed(2 * seed + 2)
    for each in module.modules():
        if isinstance(each, nn.Linear):
            draw_linear(each, dense_init, generator)


@torch.no_grad()
def draw_linear(linear: nn.Linear, dense_init: DenseInit, generator: torch.Generator | None = None) -> None:
    """Draws one linear's weight by this file's table, in place; "stock" leaves it as transformers drew it."""
    if dense_init == "noble":
        linear.weight.normal_(0.0, 0.5 / math.sqrt(linear.in_features), generator=generator)
    elif dense_init == "kaiming":
        nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5), generator=generator)


def check_dense_init(value: object) -> None:
    """Raises UserError unless the value names an init of this file's table."""
    if value not in get_args(DenseInit):
        raise UserError(f"unknown init {value!r}; choose one of {', '.join(get_args(DenseInit))}")
