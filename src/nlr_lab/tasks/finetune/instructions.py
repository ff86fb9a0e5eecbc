"""Instruction tuning: a pretrained language model learns the answers, and only the answers.

What is learned, cut and dropped is what trl's SFTTrainer learns, cuts and drops (a test holds them side by
side), and its chat templates mark what the assistant says. The trainer is ours, since SFTTrainer puts a forward
pass of its own into the model and neither resumes bit by bit nor gives every arm the same batches.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from nlr_lab.tasks.task import AdapterSetup, Collate, Measure, fingerprint, hold_out
from nonlinear_lowrank.errors import UserError

from .instruction_files import TEMPLATES, Example, read_examples
from .pretrained import Pretrained
from .sequences import PackedExamples, PadRight, TokenExamples, check_packing

# For tokenizers that have none. The marks say what the assistant's words are.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "### Assistant:\n{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\n"
    "{% else %}### {{ message['role'] | capitalize }}:\n{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)

_MARKED = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True, kw_only=True)
class InstructionData:
    """Which instructions, and how they become tokens."""

    source: str = "stdlib"
    """A .json or .jsonl file (also .xz), a dataset's name, or "stdlib": docstrings of Python's own library."""
    valid_source: str | None = None
    """Instructions to evaluate on; None: a share of the source."""
    held_out: float = 0.05
    """Share of the rows to evaluate on when there is no valid_source."""
    eval_rows: int = 512
    """Rows that are evaluated, at most."""
    rows: int | None = None
    """Read the first so many records; None: all."""
    template: str = "alpaca"
    """Words around instruction and input: "alpaca" (Stanford's), "plain" (none), or "chat" (the tokenizer's)."""
    max_length: int = 512
    """Tokens of prompt and answer; longer ones lose their end."""
    packing: bool = False
    """Several examples a row of at most max_length tokens, which do not see each other: no padding, so fewer rows an
    epoch. Needs trl."""

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise UserError(f"unknown template {self.template!r}; choose one of {', '.join(TEMPLATES)}")
        if not 0 < self.held_out < 0.9:
            raise UserError(f"held_out must be above 0 and below 0.9, got {self.held_out!r}")
        for name, least in (("eval_rows", 1), ("rows", 2), ("max_length", 4)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise UserError(f"{name} must be an integer of at least {least}, got {value!r}")


@dataclass(frozen=True)
class PreparedInstructions:
    """Tokenized instructions."""

    train: TokenExamples | PackedExamples
    valid: TokenExamples
    tokenizer: Any
    collate: Collate
    fingerprint: str
    facts: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """What the data are, for the record: rows read, dropped and cut."""
        return {**self.facts, "fingerprint": self.fingerprint}


@dataclass(frozen=True, kw_only=True)
class InstructionTask:
    """Instructions and the language model that is tuned on them."""

    instructions: InstructionData
    """The data."""
    model: Pretrained
    """The language model."""

    @property
    def measure(self) -> Measure:
        """The loss on the answers."""
        return Measure(unit="nats per answer token")

    @property
    def sequence_length(self) -> int:
        """Tokens of an example, at most."""
        return self.instructions.max_length

    def prepare(self, progress: bool = True) -> PreparedInstructions:
        """Reads, tokenizes and masks; nothing is cached.

        Args:
            progress: print how many rows there are, and how many were empty, cut and dropped.

        Raises:
            UserError: a file or the tokenizer cannot be used, or nothing is left to learn.
        """
        data = self.instructions
        tokenizer = self.model.tokenizer()
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer of {self.model.checkpoint!r} has no end-of-text token to end answers with")
        tokens = Tokens(tokenizer, data.max_length)
        examples, facts = tokens.read(data.source, data.template, data.rows)
        if data.valid_source is None:
            kept, held = hold_out(len(examples), data.held_out)
            train, valid = examples.select(kept), examples.select(held[: data.eval_rows])
        else:
            train = examples
            valid, facts["valid"] = tokens.read(data.valid_source, data.template, None)
            valid = valid.select(range(min(len(valid), data.eval_rows)))
        if progress:
            for where, each in (("", facts), (" (evaluated)", facts.get("valid"))):
                if each is not None:
                    print(f"instructions{where}: {summary(each)}")
        if not len(train) or not len(valid):
            raise UserError(f"{data.source}: {len(examples)} rows are left, too few to train and to evaluate on")
        parts = [np.concatenate([ids, labels]) for side in (train, valid) for ids, labels in _pairs(side)]
        rows = _packed(train, data.max_length) if data.packing else train
        if data.packing:
            facts["packed_rows"] = len(rows)
            if progress:
                print(f"packed into {len(rows):,} rows of at most {data.max_length:,} tokens")
        return PreparedInstructions(
            train=rows,
            valid=valid.by_length(),
            tokenizer=tokenizer,
            collate=PadRight(pad_id=tokenizer.pad_token_id, multiple=8),
            fingerprint=fingerprint(*parts, len(train), *(["packed"] if data.packing else [])),
            facts={**facts, "train_rows": len(train), "evaluated_rows": len(valid)},
        )

    def build_model(self, prepared: Any, dense_init: str | None = None, *, seed: int = 0) -> nn.Module:
        """The pretrained model; nothing in it is drawn."""
        if dense_init is not None:
            raise UserError("init= is for models that are trained from scratch; this recipe tunes a pretrained one")
        model = self.model.causal()
        rows = model.get_input_embeddings().weight.shape[0]
        if len(prepared.tokenizer) > rows:
            raise UserError(f"the tokenizer has {len(prepared.tokenizer)} tokens and the model {rows} embeddings")
        if self.instructions.packing:
            check_packing(model)
        return model

    def build_on_meta(self) -> nn.Module:
        """The same on the meta device."""
        return self.model.on_meta("causal")

    def adapter_setup(self, model: nn.Module) -> AdapterSetup:
        """What adapters need to know."""
        return self.model.adapters(model, "CAUSAL_LM")


class Tokens:
    """Examples -> tokens, with -100 on everything that is not an answer.

    Args:
        tokenizer: of the model; given a chat template if it has none and one is needed.
        max_length: tokens of an example.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self._chat_template: str | None = None

    def read(self, source: str, template: str, rows: int | None) -> tuple[TokenExamples, dict[str, Any]]:
        """The examples of a source, and how many rows were read, empty, cut and dropped.

        An example that is cut within its prompt has nothing to learn, and is dropped.
        """
        ids: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        count: Counter[str] = Counter()
        for example in read_examples(source, template, rows):
            count["rows"] += 1
            if isinstance(example, str):
                count[example] += 1
                continue
            tokens, learned = self.encode(example)
            if len(tokens) > self.max_length:
                count["cut"] += 1
                tokens, learned = tokens[: self.max_length], learned[: self.max_length]
            # The first token is never predicted.
            if not learned[1:].any():
                count["no answer within max_length"] += 1
                continue
            ids.append(tokens)
            labels.append(np.where(learned, tokens, -100))
        dropped = {name: count[name] for name in count if name not in ("rows", "cut")}
        return TokenExamples(ids, labels), {"rows": count["rows"], "cut": count["cut"], "dropped": dropped}

    def encode(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (T,) int32 and whether each is learned (T,)."""
        if example.is_chat:
            return self._encode_chat(example)
        end = "" if example.answer.endswith(self.tokenizer.eos_token) else self.tokenizer.eos_token
        # As trl does: the answer begins where the tokens of the prompt and those of the whole part.
        prompt = self.tokenizer(text=example.prompt)["input_ids"]
        whole = self.tokenizer(text=f"{example.prompt}{example.answer}{end}")["input_ids"]
        return _learned_after(prompt, whole)

    def _encode_chat(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        if self._chat_template is None:
            self._chat_template = self._choose_template()
        template = self._chat_template or None
        if _MARKED.search(template or self.tokenizer.chat_template):
            made = self.tokenizer.apply_chat_template(
                example.prompt,
                chat_template=template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            return np.array(made["input_ids"], dtype=np.int32), np.array(made["assistant_masks"], dtype=bool)
        # A template that does not mark the answers: only the last one is learned.
        last = max(index for index, each in enumerate(example.prompt) if each["role"] == "assistant")  # type: ignore[index]
        prompt = self._apply(example.prompt[:last], add_generation_prompt=True)
        return _learned_after(prompt, self._apply(example.prompt[: last + 1]))

    def _apply(self, messages: Any, **options: Any) -> list[int]:
        made = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        return made["input_ids"]

    def _choose_template(self) -> str:
        """A template that marks the assistant's words; "" for the tokenizer's own."""
        if self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = _CHAT_TEMPLATE
            return ""
        try:
            from trl import get_training_chat_template  # type: ignore[attr-defined]
        except ImportError as error:
            raise UserError(
                f"trl is needed for conversations ({error}); pip install 'nonlinear-lowrank[instruct]'"
            ) from None
        try:
            return get_training_chat_template(self.tokenizer) or ""
        except ValueError:  # a template that trl has no marked twin of
            return ""


def summary(facts: dict[str, Any]) -> str:
    """One line on what was read, e.g. "2,000 rows, 3 dropped (2 empty answer, 1 empty prompt), 12 cut"."""
    dropped = facts["dropped"]
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    total = f"{sum(dropped.values()):,} dropped" + (f" ({why})" if why else "")
    return f"{facts['rows']:,} rows, {total}, {facts['cut']:,} longer than max_length"


def _learned_after(prompt: list[int], whole: list[int]) -> tuple[np.ndarray, np.ndarray]:
    shared = 0
    for mine, other in zip(prompt, whole, strict=False):
        if mine != other:
            break
        shared += 1
    learned = np.arange(len(whole)) >= shared
    return np.array(whole, dtype=np.int32), learned


def _packed(examples: TokenExamples, length: int) -> PackedExamples:
    try:
        from trl import pack_dataset
    except ImportError as error:
        raise UserError(f"packing needs trl ({error}); pip install 'nonlinear-lowrank[instruct]'") from None
    return PackedExamples(examples, length, pack_dataset)


def _pairs(examples: TokenExamples) -> Any:
    return zip(examples.ids, examples.labels, strict=True)
