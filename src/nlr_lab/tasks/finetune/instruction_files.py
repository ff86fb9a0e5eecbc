"""Instruction data: records out of JSON, JSON lines and `datasets`, and what each asks and answers.

| form     | fields                                                       | becomes                     |
|----------|--------------------------------------------------------------|-----------------------------|
| Alpaca   | instruction, output, and input where there is one            | prompt and answer           |
| plain    | prompt, completion (texts or lists of messages)              | the same                    |
| chat     | messages [{role, content}], or conversations [{from, value}] | a conversation              |

A record of the wrong form is refused with its line. Empty ones are not an error: they are counted.
"""

import ast
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlr_lab.runtime.bounds import read_bytes
from nlr_lab.tasks.text.corpus import Corpus
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

Messages = list[dict[str, str]]

_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
TEMPLATES = ("alpaca", "plain", "chat")


@dataclass(frozen=True)
class Example:
    """A question and its answer: two texts, or a conversation (then `answer` is empty)."""

    prompt: str | Messages
    answer: str = ""

    @property
    def is_chat(self) -> bool:
        """Return whether it is a conversation, in which every answer of the assistant is learned."""
        return not isinstance(self.prompt, str)


def read_examples(source: str, template: str, rows: int | None = None) -> Iterator[Example | str]:
    """Yield the examples of a source, in its order; of an empty record, the reason it is none.

    Args:
        source: a .json or .jsonl file (also .xz), a dataset's name, or "stdlib": docstrings of the running
            Python's own library, asked for by the code.
        template: of Alpaca records: "alpaca" (Stanford Alpaca's words), "plain" (the instruction and the input),
            or "chat" (one message of a user).
        rows: at most so many records.

    Raises:
        UserError: no such file or dataset, no JSON, or a record without the fields of any form.
    """
    for count, (where, record) in enumerate(_records(source)):
        if rows is not None and count >= rows:
            return
        yield _example(record, template, where)


def _records(source: str) -> Iterator[tuple[str, Any]]:
    path = Path(source).expanduser()
    if source == "stdlib":
        return (("stdlib", record) for record in _docstrings())
    if path.is_file():
        return _of_file(path)
    if path.exists() or path.suffix in (".json", ".jsonl", ".xz") or source.startswith((".", "/", "~")):
        raise UserError(f"there is no instruction file {source!r}; give a .json or .jsonl file, or a dataset's name")
    return _of_dataset(source)


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{path} is no UTF-8 text: {one_line(error)}") from error
    if text.lstrip()[:1] == "[":
        yield from _of_array(path, text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} is not JSON: {error}") from error


def _of_array(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of a JSON array with the lines that they begin on, which json.load does not tell."""
    decoder = json.JSONDecoder()
    place, line, counted = text.index("[") + 1, 1, 0
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if text[place : place + 1] == "]":
            return
        line, counted = line + text.count("\n", counted, place), place
        try:
            record, place = decoder.raw_decode(text, place)
        except ValueError as error:
            at = line + text.count("\n", counted, getattr(error, "pos", counted))
            raise UserError(f"{path}, line {at} is not JSON: {getattr(error, 'msg', error)}") from error
        yield f"{path}, line {line}", record


def _of_dataset(source: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    name, _, split = source.partition("@")
    try:
        data: Any = load_dataset(name, split=split or "train")
    except Exception as error:  # the hub, the network and the builder each have errors of their own
        why = one_line(error, 200)
        raise UserError(
            f"cannot read the dataset {source!r} ({why}); give a .json or .jsonl file (--source)"
        ) from error
    for index in range(len(data)):
        yield f"{source}, row {index + 1}", data[index]


def _docstrings() -> Iterator[dict[str, str]]:
    """Yield functions of the standard library, without their docstrings, and the docstrings."""
    for path in Corpus(source="stdlib").files():
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            answer = ast.get_docstring(node)
            node.body = node.body[1:] if answer else node.body
            if answer and 20 <= len(answer) <= 400:
                code = ast.unparse(node)
                if len(code) <= 600:
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
        fields = ", ".join(map(str, record)) or "no fields"
        raise UserError(
            f"{where}: a record needs instruction and output, prompt and completion, or messages; it has {fields}"
        )
    instruction, answer = _field(record, "instruction", where), _field(record, "output", where)
    context = _field(record, "input", where) if record.get("input") is not None else ""
    if not instruction.strip() and not context.strip():
        return "empty prompt"
    if not answer.strip():
        return "empty answer"
    asked = f"{instruction}\n{context}".strip() if context.strip() else instruction
    if template == "chat":
        return Example([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}])
    if template == "plain":
        return Example(asked + "\n\n", answer)
    form = _ALPACA_INPUT if context.strip() else _ALPACA
    return Example(form.format(instruction=instruction, input=context), answer)


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
    value = record[name]
    if not isinstance(value, (str, *also)):
        raise UserError(f"{where}: {name} must be text, got {type(value).__name__}")
    return value
