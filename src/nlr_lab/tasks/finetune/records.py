"""Instructions of any form as examples: a question and its answer, or a conversation.

Records come out of JSON, JSON lines, parquet, CSV and `datasets`:

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
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nlr_lab.tasks.text.data import dataset_name, json_records, library_sources, load_rows
from nonlinear_lowrank.errors import UserError

ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt, in front of the answer; `paired` and `input` are empty where there is no input."""
_PAIRED = ", paired with an input that provides further context"
_TABLES = (".parquet", ".csv")
_FILES = (".json", ".jsonl", ".xz", *_TABLES)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Example:
    """A question and its answer: two texts, or a conversation, whose answers of the assistant are all learned."""

    prompt: str | list[dict[str, Any]]
    answer: str = ""
    given: int = 0
    """Messages of a conversation that are asked, answers in them included."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of a conversation's template besides the messages, such as tools."""


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
