"""Instruction tuning: a pretrained language model learns the answers, and only the answers.

What is learned, cut and dropped is what trl's SFTTrainer learns, cuts and drops (a test holds them side by
side), and its chat templates mark what the assistant says. The trainer is ours, since SFTTrainer puts a forward
pass of its own into the model and neither resumes bit-exactly nor gives every arm the same batches.
"""

from dataclasses import dataclass
from typing import Any

from nlr_lab.tasks.task import AdapterSetup, Measure, Prepared, fingerprint, hold_out
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, require

from .instruction_files import TEMPLATES
from .pretrained import FinetuneTask, Pretrained


@dataclass(frozen=True, kw_only=True)
class InstructionData:
    """Settings of instructions: source, template and length."""

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
        check_choice("template", self.template, TEMPLATES)
        if not 0 < self.held_out < 0.9:
            raise UserError(f"held_out must be above 0 and below 0.9, got {self.held_out!r}")
        for name, least in (("eval_rows", 1), ("rows", 2), ("max_length", 4)):
            if name != "rows" or self.rows is not None:
                check_integer(name, getattr(self, name), minimum=least)


@dataclass(frozen=True, kw_only=True)
class InstructionTask(FinetuneTask):
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

    def prepare(self, progress: bool = True) -> Prepared:
        """Read, tokenize and mask; nothing is cached.

        Args:
            progress: print how many rows there are, and how many were empty, cut and dropped.

        Raises:
            UserError: a file or the tokenizer cannot be used, or nothing is left to learn.
        """
        import numpy as np

        from .answers import Tokens, summary
        from .sequences import PackedExamples, PadRight

        data = self.instructions
        tokenizer = self.model.tokenizer()
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer of {self.model.checkpoint!r} has no end-of-text token to end answers with")
        pack = require("instruct", "trl").pack_dataset if data.packing else None
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
        pairs = [pair for side in (train, valid) for pair in zip(side.ids, side.labels, strict=True)]
        rows = train if pack is None else PackedExamples(train, data.max_length, pack)
        if pack is not None:
            facts["packed_rows"] = len(rows)
            if progress:
                print(f"packed into {len(rows):,} rows of at most {data.max_length:,} tokens")
        packed = ["packed"] if pack is not None else []
        return Prepared(
            train=rows,
            valid=valid.by_length(),
            tokenizer=tokenizer,
            lengths_vary=True,
            collate=PadRight(pad_id=tokenizer.pad_token_id, multiple=8),
            fingerprint=fingerprint(*(np.concatenate(pair) for pair in pairs), len(train), *packed),
            facts={**facts, "train_rows": len(train), "evaluated_rows": len(valid)},
        )

    def build_model(self, prepared: Any, dense_init: Any = None, *, seed: int = 0) -> Any:
        """Return the pretrained model; nothing in it is drawn."""
        self.check_init(dense_init)
        model = self.model.causal()
        rows = model.get_input_embeddings().weight.shape[0]
        if len(prepared.tokenizer) > rows:
            raise UserError(f"the tokenizer has {len(prepared.tokenizer)} tokens and the model {rows} embeddings")
        if self.instructions.packing:
            from .sequences import check_packing

            check_packing(model)
        return model

    def build_on_meta(self) -> Any:
        """Return the same on the meta device."""
        return self.model.on_meta("causal")

    def adapter_setup(self, model: Any) -> AdapterSetup:
        """Return what adapters need to know."""
        return self.model.adapters(model, "CAUSAL_LM")
