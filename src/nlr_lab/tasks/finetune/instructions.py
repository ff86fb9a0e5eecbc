"""Instruction tuning: a pretrained language model learns the answers, and only the answers.

What is learned, cut and dropped is what trl's SFTTrainer learns, cuts and drops (a test holds them side by side), and
its chat templates mark what the assistant says. The trainer is ours, since SFTTrainer puts a forward pass of its own
into the model and neither resumes bit-exactly nor gives every arm the same batches. Records and their forms: `records`.
"""

import functools
import hashlib
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nlr_lab.tasks.task import Measure, Prepared, fingerprint, hold_out
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, require

from .pretrained import FinetuneTask, Pretrained
from .records import Example, read_examples

if TYPE_CHECKING:
    from .sequences import TokenExamples

# For tokenizers that have none. The marks say what the assistant's words are.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "### Assistant:\n{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\n"
    "{% else %}### {{ message['role'] | capitalize }}:\n{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class InstructionData:
    """Settings of instructions: source, template and length."""

    source: str = "stdlib"
    """A .json or .jsonl file (also .xz), a .parquet or .csv file, a dataset's folder or name ("name:config@split"), or
    "stdlib": docstrings of Python's own library."""
    valid_source: str | None = None
    """Instructions to evaluate on; None: a share of the source."""
    held_out: float = 0.05
    """Share of the rows to evaluate on when there is no valid_source."""
    eval_rows: int = 512
    """Rows that are evaluated, at most."""
    rows: int | None = None
    """Read only this many first records; None: all."""
    template: str = "alpaca"
    """Words around instruction and input: "alpaca" (Stanford's), "plain" (none), or "chat" (the tokenizer's)."""
    max_length: int = 512
    """Tokens of prompt and answer; longer ones lose their end."""
    packing: bool = False
    """Several examples a row of at most max_length tokens, which do not see each other: no padding, so fewer rows an
    epoch. Needs trl."""

    def __post_init__(self) -> None:
        check_choice("template", self.template, ("alpaca", "plain", "chat"))
        if not 0 < self.held_out < 0.9:
            raise UserError(f"held_out must be above 0 and below 0.9, got {self.held_out!r}")
        check_integer("eval_rows", self.eval_rows, minimum=1)
        check_integer("max_length", self.max_length, minimum=4)
        if self.rows is not None:
            check_integer("rows", self.rows, minimum=2)


@dataclass(frozen=True, kw_only=True)
class InstructionTask(FinetuneTask):
    """Instructions and the language model that is tuned on them."""

    instructions: InstructionData
    """The data."""
    model: Pretrained
    """The language model."""

    kind = "causal"
    measure = Measure(unit="nats per answer token")

    @property
    def sequence_length(self) -> int:
        return self.instructions.max_length

    def prepare(self, progress: bool = True) -> Prepared:
        """Read, tokenize and mask, and print what was read; nothing is cached. Raise UserError where a file or the
        tokenizer cannot be used, or nothing is left to learn."""
        from .sequences import PadRight, pack_examples

        data, tokenizer = self.instructions, self.model.tokenizer()
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer of {self.model.checkpoint!r} has no end-of-text token to end answers with")
        pack = require("instruct", "trl").pack_dataset if data.packing else None
        examples, facts = tokenize(tokenizer, data.source, data.template, data.max_length, data.rows)
        said = []
        if data.valid_source is None:
            kept, held = hold_out(len(examples), data.held_out)
            train, valid = examples.select(kept), examples.select(held)
        else:
            train = examples
            valid, facts["valid"] = tokenize(tokenizer, data.valid_source, data.template, data.max_length)
            said.append(f"instructions (evaluated): {summary(facts['valid'])}")
        train, valid = _apart(train, valid, facts), valid.select(range(min(len(valid), data.eval_rows)))
        said.insert(0, f"instructions: {summary(facts)}")
        if not len(train) or not len(valid):
            left = f"{data.source}: {len(train)} rows are left to train and {len(valid)} to evaluate on"
            raise UserError(f"{left} ({'; '.join(said)}); give more rows, or raise --max-length")
        rows = train
        if pack is not None:
            rows = pack_examples(train, data.max_length, pack)
            facts["packed_rows"] = len(rows)
            said.append(f"packed into {len(rows):,} rows of at most {data.max_length:,} tokens")
        if progress:
            print("\n".join(said))
        seen = [np.concatenate(pair) for side in (train, valid) for pair in zip(side.ids, side.labels, strict=True)]
        return Prepared(
            train=rows,
            valid=valid.by_length(),
            tokenizer=tokenizer,
            lengths_vary=True,
            collate=PadRight(pad_id=tokenizer.pad_token_id, multiple=8),
            fingerprint=fingerprint(*seen, len(train), *(["packed"] if data.packing else [])),
            facts={**facts, "train_rows": len(train), "evaluated_rows": len(valid)},
        )

    def build_model(self, prepared: Any, dense_init: Any = None, *, seed: int = 0) -> Any:
        from .sequences import check_packing

        model = super().build_model(prepared, dense_init, seed=seed)
        rows = model.get_input_embeddings().weight.shape[0]
        if len(prepared.tokenizer) > rows:
            raise UserError(f"the tokenizer has {len(prepared.tokenizer)} tokens and the model {rows} embeddings")
        if self.instructions.packing:
            check_packing(model)
        _check_positions(model, prepared)
        return model


def _check_positions(model: Any, prepared: Any) -> None:
    """Raise UserError where examples are longer than a model's table of positions; rotary ones have no end."""
    from torch import nn

    packed = prepared.train.more.get("position_ids", ())  # begin at 0 with each example, and rows are not filled up
    multiple = prepared.collate.multiple
    filled = -(-max([*prepared.valid.lengths, *(() if packed else prepared.train.lengths)]) // multiple) * multiple
    longest = max([filled, *(int(each.max()) + 1 for each in packed)])
    limit = getattr(model.config, "max_position_embeddings", None)
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    sizes = [each.num_embeddings for each in tables if each is not model.get_input_embeddings()]
    if limit and longest > limit and any(limit <= size <= limit + 2 for size in sizes):  # OPT's has two rows more
        raise UserError(f"the model has {limit} positions and rows have up to {longest}; lower --max-length")


def tokenize(
    tokenizer: Any, source: str, template: str, max_length: int, rows: int | None = None
) -> tuple["TokenExamples", dict[str, Any]]:
    """Return the examples of a source as tokens, with -100 on everything that is not an answer; and how many rows were
    read, empty, cut and dropped: an example that is cut within its prompt has nothing to learn."""
    from .sequences import TokenExamples

    ids, labels, cut = [], [], 0
    found = list(read_examples(source, template, rows and rows + 1))
    more = {"more": True} if rows is not None and len(found) > rows else {}
    found = found[:rows]
    dropped = Counter(each for each in found if isinstance(each, str))
    for tokens, learned in encode(tokenizer, (each for each in found if isinstance(each, Example))):
        cut += len(tokens) > max_length
        tokens, learned = tokens[:max_length], learned[:max_length]
        if learned[1:].any():  # the first token is never predicted
            ids.append(tokens)
            labels.append(np.where(learned, tokens, -100))
        else:
            dropped["no answer within max_length"] += 1
    return TokenExamples(ids, labels), {"rows": len(found), **more, "cut": cut, "dropped": dict(dropped)}


def _apart(train: "TokenExamples", valid: "TokenExamples", facts: dict[str, Any]) -> "TokenExamples":
    """Return the examples to train on that equal none of the held-out ones, and count the others in the facts."""
    held_out = set(map(_content, valid.ids, valid.labels))
    kept = [row for row, each in enumerate(map(_content, train.ids, train.labels)) if each not in held_out]
    if len(kept) == len(train):
        return train
    facts["dropped"]["also held out"] = len(train) - len(kept)
    return train.select(kept)


def _content(ids: np.ndarray, labels: np.ndarray) -> bytes:
    return hashlib.sha256(ids.tobytes() + labels.tobytes()).digest()


def encode(tokenizer: Any, examples: Iterable[Example]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield of each example its tokens (T,) int32 and whether each is learned (T,). A tokenizer that has no chat
    template is given one where it is needed. Raise UserError where a template fails, or shows no tools."""
    template_for = functools.cache(functools.partial(_chat_template, tokenizer))
    for example in examples:
        if isinstance(example.prompt, str):
            end = "" if example.answer.endswith(tokenizer.eos_token) else tokenizer.eos_token
            prompt = tokenizer(text=example.prompt)["input_ids"]
            whole = tokenizer(text=f"{example.prompt}{example.answer}{end}")["input_ids"]
            yield _behind(prompt, whole)
            continue
        template = template_for("tools" in example.options)
        apply: Any = functools.partial(_apply_template, tokenizer, template, example.options)
        # The marks are told by characters, which tokenizers in Python do not know.
        if tokenizer.is_fast and re.search(r"\{%-?\s*generation\b", template):
            made = apply(example.prompt, return_assistant_tokens_mask=True)
            learned = np.array(made["assistant_masks"], dtype=bool)
            if example.given:
                asked = apply(example.prompt[: example.given], add_generation_prompt=True)["input_ids"]
                learned[: _common(asked, made["input_ids"])] = False
            yield np.array(made["input_ids"], dtype=np.int32), learned
            continue
        *earlier, last = (index for index, each in enumerate(example.prompt) if each["role"] == "assistant")
        if any(index >= example.given for index in earlier):
            why, fix = "the chat template marks no answers", "mark them with {% generation %} in the template"
            if not tokenizer.is_fast:
                why, fix = "the tokenizer is one in Python", "choose a model with a fast one"
            warnings.warn(f"{why}: only a chat's last is learned; {fix}", stacklevel=2)
        asked = apply(example.prompt[:last], add_generation_prompt=True)["input_ids"]
        yield _behind(asked, apply(example.prompt[: last + 1])["input_ids"])


def _behind(prompt: list[int], whole: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens, and which are learned: as trl does, from where those of the prompt and of the whole part."""
    return np.array(whole, dtype=np.int32), np.arange(len(whole)) >= _common(prompt, whole)


def _apply_template(
    tokenizer: Any, template: str, options: dict[str, Any], messages: list[dict[str, Any]], **how: Any
) -> Any:
    """Return what the chat template makes of messages; raise UserError where it fails, or shows no tools."""
    from jinja2 import TemplateError

    for name in ("tools", "tool_calls"):
        used = name in options or any(name in message for message in messages)
        if used and not re.search(rf"\b{name}\b", template):
            raise UserError(f"the tokenizer's chat template shows no {name}; choose a model whose template does")
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=True, return_dict=True, **how, **options
        )
    except (TemplateError, TypeError) as error:
        raise UserError(f"the chat template fails on {str(messages)[:100]}: {error}") from error


def _common(one: list[int], other: list[int]) -> int:
    """Return how many first tokens are the same."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def _chat_template(tokenizer: Any, tools: bool) -> str:
    """Return a template that marks the assistant's words, or the tokenizer's own where trl has no marked twin of it."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _CHAT_TEMPLATE
        return _CHAT_TEMPLATE
    trl = require("instruct", "trl")
    own: str = tokenizer.get_chat_template(tools=[{}] if tools else None)  # some have one of their own for tools
    try:
        return trl.get_training_chat_template(tokenizer) or own
    except ValueError:
        return own


def summary(facts: dict[str, Any]) -> str:
    """Say in one line what was read, e.g. "2,000 rows, 3 dropped (2 empty answer, 1 empty prompt), 12 cut"."""
    dropped = facts["dropped"]
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    total = f"{sum(dropped.values()):,} dropped" + (f" ({why})" if why else "")
    first, rest = ("the first ", "; --task.instructions.rows None reads all") if "more" in facts else ("", "")
    return f"{first}{facts['rows']:,} rows, {total}, {facts['cut']:,} longer than max_length{rest}"
