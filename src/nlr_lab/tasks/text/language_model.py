"""Language models on packed text: the paper's GLM (noble.txt, section 4.1.1), GPT-3's OPT without biases
(nonlinear_queries.md, "Key Experimental Results"), and BERT's objective on a EuroBERT (noble.txt, section 4.1.2).

Init of every tensor; draws depend on the seed alone, never on the global generator:

| tensor                         | dense_init | distribution                                   |
|--------------------------------|------------|------------------------------------------------|
| input embedding                | any        | N(0, embedding_std^2)                          |
| output head                    | any        | N(0, 0.02^2), the same in all arms; OPT's is   |
|                                |            | the embedding                                  |
| positions (OPT)                | any        | N(0, 0.02^2)                                   |
| linears between (q, k, v, o,   | stock      | N(0, 0.02^2), transformers' own                |
| and the MLP's), no biases      | noble      | N(0, (0.5 / sqrt(d_in))^2)                     |
|                                | kaiming    | U(+-1 / sqrt(d_in)), nn.Linear's own           |
| norm weights                   | any        | 1                                              |
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from nlr_lab.tasks.task import Measure, Prepared, Task, fingerprint
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, check_number, check_share

from .data import TextData

if TYPE_CHECKING:
    import torch
    from torch import nn

DenseInit = Literal["stock", "noble", "kaiming"]

_CHOICES = "'wordpiece', a folder with BERT's vocab.txt, or a hub name such as bert-base-uncased"


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

    model_class: ClassVar[str]
    """Name of the class in transformers."""
    tokens: ClassVar[tuple[str, ...]] = ("eos_token_id",)
    """Special tokens of the tokenizer that the config has."""
    _head_step: ClassVar[int] = 2
    """Divisor of a head's width."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "hidden"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.width % (step := self._head_step * self.heads):
            even = " of even size" if self._head_step == 2 else ""
            what = f"width {self.width} does not split into {self.heads} heads{even}"
            raise UserError(f"{what}; choose a multiple of {step}")
        check_number("embedding_std", self.embedding_std, above=0)
        check_share("dropout", self.dropout)
        check_dense_init(self.dense_init)

    def _config(self, model_type: str, vocab_size: int, sequence_length: int, **more: Any) -> Any:
        """Return transformers' config of these sizes, without special tokens: a class's own lie far outside a small
        vocabulary, or leave a row of the embedding untrained."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            model_type,
            vocab_size=vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            attention_dropout=self.dropout,
            max_position_embeddings=sequence_length,
            **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | more,
        )

    def _rotary(self, **more: Any) -> dict[str, Any]:
        """Return what the configs with rotary positions and a gated MLP share."""
        return {
            "intermediate_size": self.hidden,
            "num_key_value_heads": self.heads,
            "head_dim": self.width // self.heads,
            "hidden_act": "gelu",
            "attention_bias": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, **more},
        }


@dataclass(frozen=True, kw_only=True)
class GlmBackbone(Backbone):
    """A GLM. Every linear is separate but the gate-up projection, one linear of width -> 2 x hidden."""

    model_class = "GlmForCausalLM"

    def config(self, vocab_size: int, sequence_length: int, eos_token_id: int | None = None) -> Any:
        """Return transformers' config of these sizes."""
        rotary = self._rotary(partial_rotary_factor=1.0)
        config = self._config("glm", vocab_size, sequence_length, **rotary, eos_token_id=0)
        config.eos_token_id = eos_token_id  # given as an argument, None would mean GLM's own three
        return config


@dataclass(frozen=True, kw_only=True)
class OptBackbone(Backbone):
    """An OPT without biases. Every linear is separate: q, k, v, out, fc1, fc2; `hidden` is the width between the last
    two. At 12 layers of width 768 that is GPT-3 small: 84,973,056 parameters outside the embeddings."""

    model_class = "OPTForCausalLM"
    _head_step = 1

    def config(self, vocab_size: int, sequence_length: int, **more: Any) -> Any:
        """Return transformers' config of these sizes. OPT's own defaults are ReLU, biases, and dropout 0.1."""
        sizes: Any = {"word_embed_proj_dim": self.width, "ffn_dim": self.hidden, "dropout": self.dropout}
        sizes |= {"activation_function": "gelu", "enable_bias": False}
        return self._config("opt", vocab_size, sequence_length, **sizes, **more)


@dataclass(frozen=True, kw_only=True)
class EncoderBackbone(Backbone):
    """A EuroBERT: the GLM's block with attention to both sides, every linear separate."""

    model_class = "EuroBertForMaskedLM"
    tokens = ("mask_token_id", "pad_token_id")

    def config(self, vocab_size: int, sequence_length: int, **tokens: Any) -> Any:
        """Return transformers' config of these sizes and of the tokens mask_token_id and pad_token_id."""
        more = {**self._rotary(), "mlp_bias": False, "mask_token_id": 0, **tokens}
        return self._config("eurobert", vocab_size, sequence_length, **more)


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """A model of any class on packed text."""

    text: TextData
    """Source of the text, tokenizer, and sequence length."""
    backbone: Any
    """The model that is not changed."""
    init_from: str = ""
    """Continued pretraining: a folder with a model (of save_pretrained or nlr convert, a run, one of its checkpoints)
    whose architecture and weights the run starts from, in place of `backbone`'s. Its tokenizer must be the text's."""

    @property
    def sequence_length(self) -> int:
        return self.text.sequence_length

    def prepare(self, progress: bool = True) -> Prepared:
        from .sources import prepare_source

        return prepare_source(self.text, progress=progress)

    def build_model(self, prepared: Any, dense_init: DenseInit | None = None, *, seed: int = 0) -> Any:
        if self.init_from:
            from .start import load_start

            return load_start(self.init_from, prepared, self.text.sequence_length, dense_init)
        tokens = {name: getattr(prepared.tokenizer, name, None) for name in self.backbone.tokens}
        config = self._config(prepared.vocab_size, **tokens)
        return build_drawn(self.backbone.model_class, config, self.backbone, dense_init, seed)

    def build_on_meta(self) -> Any:
        if self.init_from:
            from nonlinear_lowrank.hub.loading import model_on_meta

            from .start import start_folder

            return model_on_meta(start_folder(self.init_from))
        return build_meta(self.backbone.model_class, self._config(self.text.known_vocab_size()))

    def _config(self, vocab_size: int, **tokens: int | None) -> Any:
        return self.backbone.config(vocab_size, self.text.sequence_length, **tokens)


@dataclass(frozen=True, kw_only=True)
class LanguageModelTask(TextTask):
    """Next-token prediction on packed text, by a GLM."""

    backbone: GlmBackbone
    """The model without branches."""


@dataclass(frozen=True, kw_only=True)
class OptLanguageModelTask(TextTask):
    """Next-token prediction on packed text, by an OPT."""

    backbone: OptBackbone
    """The model that is not changed."""
    tie_embeddings: bool = True
    """Use the input embedding as the output head."""

    def _config(self, vocab_size: int, **tokens: int | None) -> Any:
        return super()._config(vocab_size, **tokens, tie_word_embeddings=self.tie_embeddings)


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Shares of the tokens that are predicted and replaced. The defaults are BERT's."""

    probability: float = 0.15
    """Probability that a token is predicted. Special tokens never are; at least one token of a sequence is."""
    mask_share: float = 0.8
    """Share of those that [MASK] replaces."""
    random_share: float = 0.1
    """Share of those that a random token of the vocabulary replaces; the rest stay as they are."""

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise UserError(f"probability must be above 0 and below 1, got {self.probability!r}")
        for name in ("mask_share", "random_share"):
            check_number(name, getattr(self, name), minimum=0)
        if (both := self.mask_share + self.random_share) > 1:
            raise UserError(f"mask_share and random_share must not exceed 1 together, got {both:g}")


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModelTask(TextTask):
    """Prediction of hidden tokens in packed text.

    Which tokens are hidden follows from the run's seed, the sequence and the pass over the text alone: all arms of a
    comparison see the same masks, and so does a run that is resumed. The masks of the evaluation are always the same.
    """

    backbone: EncoderBackbone
    """The model without branches."""
    masking: Masking = Masking()
    """Shares of the tokens that are hidden."""
    tie_embeddings: bool = False
    """Use the input embedding as the output head."""

    def _config(self, vocab_size: int, **tokens: int | None) -> Any:
        return super()._config(vocab_size, **tokens, tie_word_embeddings=self.tie_embeddings)

    def __post_init__(self) -> None:
        if self.text.tokenizer == "bpe":
            raise UserError(f"hidden tokens need a tokenizer with a mask token, which 'bpe' has not; choose {_CHOICES}")

    measure = Measure(unit="nats per masked token")

    def prepare(self, progress: bool = True) -> Prepared:
        """Return packed text with its masks; raise UserError where its tokenizer has no mask token."""
        from .packed import MaskedBlocks

        text = super().prepare(progress)
        tokenizer = text.tokenizer
        if getattr(tokenizer, "mask_token_id", None) is None:
            raise UserError(f"the tokenizer {self.text.tokenizer!r} has no mask token; choose {_CHOICES}")
        options: Any = {"mask": tokenizer.mask_token_id, "special": tokenizer.all_special_ids}
        train, valid = (
            MaskedBlocks(blocks=blocks, masking=self.masking, vocab_size=text.vocab_size, seed=seed, **options)
            for blocks, seed in ((text.train, 0), (text.valid, None))
        )
        facts = {**text.facts, "text_fingerprint": text.fingerprint}
        facts.pop("valid_bytes_per_token", None)  # a masked token's loss does not measure the text's bytes
        return replace(
            text,
            train=train,
            valid=valid,
            valid_bytes_per_token=None,
            predicts_next=False,
            fingerprint=fingerprint("masked", text.fingerprint, self.masking),
            facts=facts,
        )


def build_drawn(model_class: Any, config: Any, backbone: Any, dense_init: DenseInit | None, seed: int) -> Any:
    """Build a plain model on tokens and draw this file's table, by the backbone's dense_init unless it is overridden;
    what is not in the table is drawn by transformers."""
    import torch

    model = build_plain(model_class, config, seed)
    # One generator a kind: an arm's dense init must not shift the embedding's draws.
    generator = torch.Generator().manual_seed(2 * seed + 1)
    torch.nn.init.normal_(model.get_input_embeddings().weight, 0.0, backbone.embedding_std, generator)
    draw_linears(model.model, dense_init or backbone.dense_init, seed)
    return model


def build_plain(model_class: Any, config: Any, seed: int) -> Any:
    """Build a model, of a class or a name of transformers', with transformers' own init, drawn from the seed."""
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (getattr(transformers, model_class) if isinstance(model_class, str) else model_class)(config)


def build_meta(model_class: Any, config: Any) -> Any:
    """Build a model on the meta device."""
    import torch

    with torch.device("meta"):
        return build_plain(model_class, config, 0)


def draw_linears(module: "nn.Module", dense_init: DenseInit, seed: int) -> None:
    """Draw the weights of a part's linears by this file's table, in place; "stock" leaves them."""
    import torch

    generator = torch.Generator().manual_seed(2 * seed + 2)
    for each in module.modules():
        if isinstance(each, torch.nn.Linear):
            draw_matrix(each.weight, dense_init, generator)


def draw_matrix(weight: "torch.Tensor", dense_init: DenseInit, generator: "torch.Generator | None" = None) -> None:
    """Draw a weight (d_out, d_in) by this file's table, in place; "stock" leaves it as transformers drew it."""
    from torch import nn

    if dense_init == "noble":
        nn.init.normal_(weight, 0.0, 0.5 / math.sqrt(weight.shape[1]), generator)
    elif dense_init == "kaiming":
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)


def check_dense_init(value: object) -> None:
    """Raise UserError unless the value names an init of this file's table."""
    check_choice("init", value, get_args(DenseInit))
