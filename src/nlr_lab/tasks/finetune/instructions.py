"""Instruction tuning: a pretrained language model learns the answers, and only the answers.

What is learned, cut and dropped is what trl's SFTTrainer learns, cuts and drops (a test holds them side by side), and
its chat templates mark what the assistant says. The trainer is ours, since SFTTrainer puts a forward pass of its own
into the model and neither resumes bit-exactly nor gives every arm the same batches.

Records come out of JSON, JSON lines and `datasets`:

| form   | fields                                                       |
|--------|--------------------------------------------------------------|
| Alpaca | instruction, output, and input where there is one            |
| plain  | prompt, completion (texts or lists of messages)              |
| chat   | messages [{role, content}], or conversations [{from, value}] |

A record of the wrong form is refused with its place. Empty ones are not an error: they are counted.
"""

import ast
import functools
import itertools
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from nlr_lab.runtime.bounds import read_bytes
from nlr_lab.tasks.task import Examples, Measure, Prepared, fingerprint, hold_out
from nlr_lab.tasks.text.data import library_sources
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, one_line, require

from .pretrained import FinetuneTask, Pretrained

if TYPE_CHECKING:
    from .sequences import TokenExamples

_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_PAIRED = ", paired with an input that provides further context"
# For tokenizers that have none. The marks say what the assistant's words are.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "### Assistant:\n{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\n"
    "{% else %}### {{ message['role'] | capitalize }}:\n{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


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

    task_type = "CAUSAL_LM"
    measure = Measure(unit="nats per answer token")

    @property
    def sequence_length(self) -> int:
        return self.instructions.max_length

    def prepare(self, progress: bool = True) -> Prepared:
        """Read, tokenize and mask, and print what was read; nothing is cached. Raise UserError where a file or the
        tokenizer cannot be used, or nothing is left to learn."""
        from .sequences import PackedExamples, PadRight

        data = self.instructions
        if (tokenizer := self.model.tokenizer()).eos_token is None:
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
        if not len(train) or not len(valid):
            raise UserError(f"{data.source}: {len(examples)} rows are left, too few to train and to evaluate on")
        lines, rows = [f"instructions: {summary(facts)}"], cast(Examples, train)
        if "valid" in facts:
            lines.append(f"instructions (evaluated): {summary(facts['valid'])}")
        if pack is not None:
            rows = PackedExamples(train, data.max_length, pack)
            facts["packed_rows"] = len(rows)
            lines.append(f"packed into {len(rows):,} rows of at most {data.max_length:,} tokens")
        if progress:
            print("\n".join(lines))
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

    def load_model(self, prepared: Any, seed: int) -> Any:
        from .sequences import check_packing

        model = self.model.causal()
        rows = model.get_input_embeddings().weight.shape[0]
        if len(prepared.tokenizer) > rows:
            raise UserError(f"the tokenizer has {len(prepared.tokenizer)} tokens and the model {rows} embeddings")
        if self.instructions.packing:
            check_packing(model)
        return model

    def build_on_meta(self) -> Any:
        return self.model.on_meta("causal")


@dataclass(frozen=True)
class Example:
    """A question and its answer: two texts, or a conversation, whose answers of the assistant are all learned."""

    prompt: str | list[dict[str, str]]
    answer: str = ""


def read_examples(source: str, template: str, rows: int | None = None) -> Iterator[Example | str]:
    """Yield the examples of at most so many records of a source (see `InstructionData`), in its order; of an empty one,
    the reason it is none. Raise UserError where there is no such source, or a record has no fields of any form."""
    path = Path(source).expanduser()
    if source == "stdlib":
        records: Iterator[tuple[str, Any]] = (("stdlib", record) for record in _docstrings())
    elif path.is_file():
        records = _of_file(path)
    elif path.exists() or path.suffix in (".json", ".jsonl", ".xz") or source.startswith((".", "/", "~")):
        raise UserError(f"there is no instruction file {source!r}; give a .json or .jsonl file, or a dataset's name")
    else:
        records = _of_dataset(source)
    for where, record in itertools.islice(records, rows):
        yield _example(record, template, where)


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{path} is no UTF-8 text: {one_line(error)}") from error
    whole = text.lstrip()[:1] == "["
    for number, part in enumerate([text] if whole else text.split("\n"), 1):
        if part.strip():
            try:
                found = json.loads(part)
            except (ValueError, RecursionError) as error:
                line = number + getattr(error, "lineno", 1) - 1
                raise UserError(f"{path}, line {line} is not JSON: {getattr(error, 'msg', error)}") from error
            if not whole:
                yield f"{path}, line {number}", found
                continue
            for index, record in enumerate(found, 1):
                yield f"{path}, record {index}", record


def _of_dataset(source: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    name, _, split = source.partition("@")
    try:
        data: Any = load_dataset(name, split=split or "train")
    except Exception as error:  # the hub, the network and the builder each have errors of their own
        what = f"cannot read the dataset {source!r} ({one_line(error, 200)})"
        raise UserError(f"{what}; give a .json or .jsonl file (--source)") from error
    for number, record in enumerate(data, 1):
        yield f"{source}, row {number}", record


def _docstrings() -> Iterator[dict[str, str]]:
    """Yield functions of the standard library, without their docstrings, and the docstrings."""
    for path in library_sources():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            answer = ast.get_docstring(node)
            node.body = node.body[1:] if answer else node.body
            if answer and 20 <= len(answer) <= 400 and len(code := ast.unparse(node)) <= 600:
                yield {"instruction": "Write the docstring of this function.", "input": code, "output": answer}


def _example(record: Any, template: str, where: str) -> Example | str:
    if not isinstance(record, dict):
        raise UserError(f"{where}: a record must be a JSON object, got {type(record).__name__}")
    if "messages" in record or "conversations" in record:
        return _chat(record.get("messages", record.get("conversations")), where)
    if "prompt" in record or "completion" in record:
        prompt, answer = _field(record, "prompt", where, list), _field(record, "completion", where, list)
        if type(prompt) is not type(answer):
            raise UserError(f"{where}: prompt and completion must both be texts, or both lists of messages")
        if isinstance(prompt, list):
            return _chat(prompt + answer, where)
        if not answer.strip():
            return "empty answer"
        return Example(prompt, answer) if prompt.strip() else "empty prompt"
    if "instruction" not in record and "output" not in record:
        what = f"{where}: a record needs instruction and output, prompt and completion, or messages"
        raise UserError(f"{what}; it has {', '.join(map(str, record)) or 'no fields'}")
    instruction, answer = _field(record, "instruction", where), _field(record, "output", where)
    context = _field(record, "input", where) if record.get("input") is not None else ""
    if not instruction.strip() and not context.strip():
        return "empty prompt"
    if not answer.strip():
        return "empty answer"
    if template == "alpaca":
        more = {"paired": _PAIRED, "input": f"### Input:\n{context}\n\n"} if context.strip() else {}
        return Example(_ALPACA.format(instruction=instruction, **{"paired": "", "input": "", **more}), answer)
    asked = f"{instruction}\n{context}".strip() if context.strip() else instruction
    if template == "chat":
        return Example([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}])
    return Example(asked + "\n\n", answer)


def _chat(messages: Any, where: str) -> Example | str:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise UserError(f"{where}: messages must be a list of objects with role and content")
    if messages and "from" in messages[0]:
        messages = [{"role": _ROLES.get(str(each.get("from"))), "content": each.get("value")} for each in messages]
    for index, message in enumerate(messages, 1):
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise UserError(f"{where}: message {index} has no {name}")
    if not any(each["content"].strip() for each in messages if each["role"] == "assistant"):
        return "empty answer"
    if messages[0]["role"] == "assistant":
        return "empty prompt"
    return Example([{"role": each["role"], "content": each["content"]} for each in messages])


def _field(record: dict[str, Any], name: str, where: str, *also: type) -> Any:
    if name not in record:
        raise UserError(f"{where} has no field {name!r}; it has {', '.join(map(str, record))}")
    if not isinstance(value := record[name], (str, *also)):
        raise UserError(f"{where}: {name} must be text, got {type(value).__name__}")
    return value


class Tokens:
    """Examples -> tokens, with -100 on everything that is not an answer. A tokenizer that has no chat template is given
    one where it is needed."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length

    def read(self, source: str, template: str, rows: int | None) -> tuple["TokenExamples", dict[str, Any]]:
        """Return the examples of a source, and how many rows were read, empty, cut and dropped: an example that is cut
        within its prompt has nothing to learn."""
        from .sequences import TokenExamples

        found: list[tuple[np.ndarray, np.ndarray]] = []
        read = cut = 0
        dropped: Counter[str] = Counter()
        for example in read_examples(source, template, rows):
            read += 1
            if isinstance(example, str):
                dropped[example] += 1
                continue
            tokens, learned = self.encode(example)
            cut += len(tokens) > self.max_length
            tokens, learned = tokens[: self.max_length], learned[: self.max_length]
            if learned[1:].any():  # the first token is never predicted
                found.append((tokens, np.where(learned, tokens, -100)))
            else:
                dropped["no answer within max_length"] += 1
        facts = {"rows": read, "cut": cut, "dropped": dict(dropped)}
        return TokenExamples([ids for ids, _ in found], [labels for _, labels in found]), facts

    def encode(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (T,) int32 and whether each is learned (T,)."""
        if isinstance(example.prompt, str):
            end = "" if example.answer.endswith(self.tokenizer.eos_token) else self.tokenizer.eos_token
            prompt = self.tokenizer(text=example.prompt)["input_ids"]
            whole = self.tokenizer(text=f"{example.prompt}{example.answer}{end}")["input_ids"]
        elif re.search(r"\{%-?\s*generation\b", self._template or self.tokenizer.chat_template):
            marks: Any = {"chat_template": self._template, "return_assistant_tokens_mask": True}
            made = self.tokenizer.apply_chat_template(example.prompt, tokenize=True, return_dict=True, **marks)
            return np.array(made["input_ids"], dtype=np.int32), np.array(made["assistant_masks"], dtype=bool)
        else:  # a template that does not mark the answers: only the last one is learned
            last = max(index for index, each in enumerate(example.prompt) if each["role"] == "assistant")
            apply: Any = functools.partial(self.tokenizer.apply_chat_template, tokenize=True, return_dict=True)
            prompt = apply(example.prompt[:last], add_generation_prompt=True)["input_ids"]
            whole = apply(example.prompt[: last + 1])["input_ids"]
        # As trl does: the answer begins where the tokens of the prompt and those of the whole part.
        shared = next((i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), None)
        start = min(len(prompt), len(whole)) if shared is None else shared
        return np.array(whole, dtype=np.int32), np.arange(len(whole)) >= start

    @functools.cached_property
    def _template(self) -> str | None:
        """A template that marks the assistant's words; None for the tokenizer's own."""
        if self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = _CHAT_TEMPLATE
            return None
        trl = require("instruct", "trl")
        try:
            return trl.get_training_chat_template(self.tokenizer) or None
        except ValueError:
            return None  # a template that trl has no marked twin of


def summary(facts: dict[str, Any]) -> str:
    """Say in one line what was read, e.g. "2,000 rows, 3 dropped (2 empty answer, 1 empty prompt), 12 cut"."""
    dropped = facts["dropped"]
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    total = f"{sum(dropped.values()):,} dropped" + (f" ({why})" if why else "")
    return f"{facts['rows']:,} rows, {total}, {facts['cut']:,} longer than max_length"
