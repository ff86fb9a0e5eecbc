"""Instruction tuning: a pretrained language model learns the answers, and only the answers.

What is learned, cut and dropped is what trl's SFTTrainer learns, cuts and drops (a test holds them side by side), and
its chat templates mark what the assistant says. The trainer is ours, since SFTTrainer puts a forward pass of its own
into the model and neither resumes bit-exactly nor gives every arm the same batches.

Records come out of JSON, JSON lines and `datasets`:

| form     | fields                                                       |
|----------|--------------------------------------------------------------|
| Alpaca   | instruction, output, and input where there is one            |
| OpenOrca | question, response, and system_prompt where there is one     |
| plain    | prompt, completion (texts or lists of messages)              |
| chat     | messages [{role, content}], or conversations [{from, value}] |

A chat's template also gets what else its messages hold (tool_calls, reasoning_content), and its record's tools (a list,
or one as JSON) and chat_template_kwargs. Any form may have a system prompt (system, or system_prompt), and Alpaca's a
history of earlier [question, answer] for chats. A record of the wrong form is refused with its place. Empty ones are
not an error: they are counted.
"""

import ast
import functools
import hashlib
import itertools
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlr_lab.tasks.task import Measure, Prepared, fingerprint, hold_out
from nlr_lab.tasks.text.data import dataset_name, json_records, library_sources, load_rows
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, require

from .pretrained import FinetuneTask, Pretrained

if TYPE_CHECKING:
    from .sequences import TokenExamples

ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt, in front of the answer; `paired` and `input` are empty where there is no input."""
_PAIRED = ", paired with an input that provides further context"
# For tokenizers that have none. The marks say what the assistant's words are.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "### Assistant:\n{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\n"
    "{% else %}### {{ message['role'] | capitalize }}:\n{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
_TABLES = (".parquet", ".csv")
_FILES = (".json", ".jsonl", ".xz", *_TABLES)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


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
        _check_positions(model, max(*prepared.train.lengths, *prepared.valid.lengths))
        return model


def _check_positions(model: Any, longest: int) -> None:
    """Raise UserError where rows are longer than a model's table of positions; rotary ones have no end."""
    from torch import nn

    limit = getattr(model.config, "max_position_embeddings", None)
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    sizes = [each.num_embeddings for each in tables if each is not model.get_input_embeddings()]
    if limit and longest > limit and any(limit <= size <= limit + 2 for size in sizes):  # OPT's has two rows more
        raise UserError(f"the model has {limit} positions and rows of up to {longest} tokens; lower --max-length")


@dataclass(frozen=True)
class Example:
    """A question and its answer: two texts, or a conversation, whose answers of the assistant are all learned."""

    prompt: str | list[dict[str, Any]]
    answer: str = ""
    given: int = 0
    """Messages of a conversation that are asked, answers in them included."""
    options: dict[str, Any] = field(default_factory=dict)
    """What a conversation's template gets beside the messages, such as tools."""


def read_examples(source: str, template: str, rows: int | None = None) -> Iterator[Example | str]:
    """Yield the examples of at most so many records of a source (see `InstructionData`), in order, or for an empty one
    the reason. Raise UserError where there is no such source, or a record has no fields of any form."""
    path = Path(source).expanduser()
    if source == "stdlib":
        records: Iterable[tuple[str, Any]] = (("stdlib", record) for record in _docstrings())
    elif path.is_file() and path.suffix not in _TABLES:
        records = json_records(path)
    else:
        name, config, split = dataset_name(source)
        if path.is_file():
            rows_of = load_rows(path.suffix[1:], split="train", data_files=str(path))
        elif not Path(name).is_dir() and (path.suffix in _FILES or source.startswith((".", "/", "~"))):
            raise UserError(
                f"there is no instruction file {source!r}; give a .json or .jsonl file, or a dataset's name"
            )
        else:
            rows_of = load_rows(name, config, split=split or "train")
        records = ((f"{source}, row {number}", record) for number, record in enumerate(rows_of, 1))
    for where, record in itertools.islice(records, rows):
        yield _example(record, template, where)


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
    system = _text_of(record, ("system", "system_prompt"), where)
    match record:
        case {"messages": list(messages)} | {"conversations": list(messages)}:
            return _chat(messages, record, where, system)
        case {"prompt": list(question), "completion": list(reply)}:
            return _chat(question + reply, record, where, system, given=len(question))
        case {"prompt": str(prompt), "completion": str(answer)}:
            if template == "chat":
                example = _asked(prompt, "", answer, template, system)
            else:
                example = Example(f"{system}\n\n{prompt}" if system else prompt, answer)
        case {"instruction": str(prompt), "output": str(answer)}:
            context = _text_of(record, ("input",), where)
            example = _asked(prompt, context, answer, template, system, _history(record, template, where))
            prompt += context
        case {"question": str(prompt), "response": str(answer)}:
            example = _asked(prompt, "", answer, template, system)
        case _:
            what = f"{where}: a record needs the texts instruction and output, question and response, prompt and"
            raise UserError(f"{what} completion, or messages; it is {str(record)[:100]}")
    if not prompt.strip():
        return "empty prompt"
    return example if answer.strip() else "empty answer"


def _text_of(record: Any, names: Iterable[str], where: str) -> str:
    """Return the first of these fields that a record has, "" for none or blank; raise UserError for one of no text."""
    found = next((value for name in names if isinstance(record, dict) and (value := record.get(name))), "")
    if not isinstance(found, str):
        raise UserError(f"{where}: a record needs texts in {' and '.join(names)}; it is {str(record)[:100]}")
    return found if found.strip() else ""


def _history(record: dict[str, Any], template: str, where: str) -> list[dict[str, Any]]:
    """Return the earlier turns of an Alpaca record; raise UserError where the template has no place for them."""
    turns = []
    for pair in record.get("history") or ():
        match pair:
            case [str(question), str(answer)] if template == "chat":
                turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            case _:
                what = "a record's history is pairs of a question and an answer, and needs the template chat"
                raise UserError(f"{where}: {what}; it is {str(pair)[:100]}")
    return turns


def _asked(
    instruction: str, context: str, answer: str, template: str, system: str = "", earlier: Iterable[Any] = ()
) -> Example:
    if system and template != "chat":  # the other templates have no place for it
        instruction, context = (f"{system}\n\n{instruction}", context) if context.strip() else (system, instruction)
    if template == "alpaca":
        more = {"paired": _PAIRED, "input": f"### Input:\n{context}\n\n"} if context.strip() else {}
        return Example(ALPACA.format(instruction=instruction, **{"paired": "", "input": "", **more}), answer)
    asked = f"{instruction}\n{context}".strip() if context.strip() else instruction
    if template == "chat":
        turns = [*_system(system), *earlier, {"role": "user", "content": asked}]
        return Example([*turns, {"role": "assistant", "content": answer}], given=len(turns) if earlier else 0)
    return Example(asked + "\n\n", answer)


def _system(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


def _chat(messages: list[Any], record: dict[str, Any], where: str, system: str, given: int = 0) -> Example | str:
    turns = []
    for message in messages:
        match message:
            case {"role": str(), "content": str()} | {"role": str(), "tool_calls": [_, *_]}:
                # Rows of `datasets` have None in all fields that other rows have.
                turns.append({"content": ""} | {name: each for name, each in message.items() if each is not None})
            case {"from": str(name), "value": str(content)} if name in _ROLES:
                turns.append({"role": _ROLES[name], "content": content})
            case _:
                what = "a message needs the texts role and content, or tool_calls"
                raise UserError(f"{where}: {what}; it is {str(message)[:100]}")
    says = [bool(turn["content"].strip() or "tool_calls" in turn) for turn in turns]
    answers = [place for place, turn in enumerate(turns) if turn["role"] == "assistant" and says[place]]
    if not answers:
        return "empty answer"
    if not any(says[place] for place in range(answers[-1]) if turns[place]["role"] != "assistant"):
        return "empty prompt"
    if system and all(turn["role"] != "system" for turn in turns):
        turns, given = [*_system(system), *turns], given and given + 1
    return Example(turns, given=given, options=_template_options(record, where))


def _template_options(record: dict[str, Any], where: str) -> dict[str, Any]:
    tools, options = record.get("tools"), record.get("chat_template_kwargs") or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except ValueError as error:
        raise UserError(f"{where}: a record's tools are not JSON: {error}") from error
    if tools and not isinstance(tools, list):
        raise UserError(f"{where}: a record's tools are a list, or one as JSON, not {str(tools)[:100]}")
    if not isinstance(options, dict):
        raise UserError(f"{where}: a record's chat_template_kwargs are an object, not {str(options)[:100]}")
    return {**({"tools": tools} if tools else {}), **options}


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
