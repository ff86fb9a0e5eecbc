"""BERT's objective: tokens that were hidden are predicted from both sides (noble.txt, section 4.1.2).

The backbone is EuroBERT: bidirectional attention, rotary positions, GeGLU, RMSNorm, no biases, an untied head;
that is the language model's block of section 4.1.1 without the causal mask. Gate and up projection are two
linears here. Init as in the table of `language_model`.

Which tokens are hidden follows from the run's seed, the sequence and the pass over the text alone: all arms of a
comparison see the same masks, and so does a run that is resumed. The masks of the evaluation are always the same.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nlr_lab.tasks.task import Measure, Prepared, Task, fingerprint
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_number

from .data import TextData
from .language_model import Backbone, DenseInit, build_drawn, build_meta

if TYPE_CHECKING:
    from transformers import EuroBertConfig

_CHOICES = "'wordpiece', a folder with BERT's vocab.txt, or a hub name such as bert-base-uncased"


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
        if self.mask_share + self.random_share > 1:
            both = self.mask_share + self.random_share
            raise UserError(f"mask_share and random_share must not exceed 1 together, got {both:g}")


@dataclass(frozen=True, kw_only=True)
class EncoderBackbone(Backbone):
    """A EuroBERT: attention to both sides, every linear separate."""

    def config(
        self, vocab_size: int, sequence_length: int, *, mask: int = 0, pad: int | None = None
    ) -> "EuroBertConfig":
        """Return the transformers config of these sizes; `mask` and `pad` are tokens."""
        from transformers import EuroBertConfig

        return EuroBertConfig(
            **self._rotary_sizes(vocab_size, sequence_length),
            mlp_bias=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=pad,
            mask_token_id=mask,
        )


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModelTask(Task):
    """Prediction of hidden tokens in packed text."""

    text: TextData
    """Source of the text, tokenizer, and sequence length."""
    backbone: EncoderBackbone
    """The model without branches."""
    masking: Masking = Masking()
    """Shares of the tokens that are hidden."""

    def __post_init__(self) -> None:
        if self.text.tokenizer == "bpe":
            raise UserError(f"hidden tokens need a tokenizer with a mask token, which 'bpe' has not; choose {_CHOICES}")

    @property
    def measure(self) -> Measure:
        """The loss of the tokens that are predicted."""
        return Measure(unit="nats per masked token")

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""
        return self.text.sequence_length

    def prepare(self, progress: bool = True) -> Prepared:
        """Return tokenized, packed, cached text with its masks.

        Raises:
            UserError: the text cannot be used, or its tokenizer has no mask token.
        """
        from .masking import MaskedBlocks
        from .packed import prepare_text

        text = prepare_text(self.text, progress=progress)
        if text.tokenizer.mask_token_id is None:
            raise UserError(f"the tokenizer {self.text.tokenizer!r} has no mask token; choose {_CHOICES}")
        tokens: Any = {"mask": text.tokenizer.mask_token_id, "special": text.tokenizer.all_special_ids}
        tokens["vocab_size"] = text.vocab_size
        # A masked token's loss is no measure of the text's bytes.
        facts = {name: value for name, value in text.describe().items() if name != "valid_bytes_per_token"}
        return Prepared(
            train=MaskedBlocks(text.train, self.masking, **tokens, seed=0),
            valid=MaskedBlocks(text.valid, self.masking, **tokens),
            tokenizer=text.tokenizer,
            vocab_size=text.vocab_size,
            predicts_next=False,
            fingerprint=fingerprint("masked", text.fingerprint, self.masking),
            facts={**facts, "text_fingerprint": text.fingerprint},
        )

    def build_model(self, prepared: Any, dense_init: DenseInit | None = None, *, seed: int = 0) -> Any:
        """Return the plain model; embedding and head are the same for every dense_init."""
        tokens = {"mask": prepared.tokenizer.mask_token_id, "pad": prepared.tokenizer.pad_token_id}
        config = self.backbone.config(prepared.vocab_size, self.text.sequence_length, **tokens)
        return build_drawn("EuroBertForMaskedLM", config, self.backbone, dense_init, seed)

    def build_on_meta(self, vocab_size: int | None = None) -> Any:
        """Return the plain model on the meta device."""
        config = self.backbone.config(vocab_size or self.text.vocab_size, self.text.sequence_length)
        return build_meta("EuroBertForMaskedLM", config)
