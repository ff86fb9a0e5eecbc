"""The tokens of an instruction that are learned: those of the answers."""

import re
from collections import Counter
from typing import Any

import numpy as np

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import require

from .instruction_files import Example, read_examples
from .sequences import TokenExamples

# For tokenizers that have none. The marks say what the assistant's words are.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "### Assistant:\n{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\n"
    "{% else %}### {{ message['role'] | capitalize }}:\n{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)

_MARKED = re.compile(r"\{%-?\s*generation\b")


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
        """Return the examples of a source, and how many rows were read, empty, cut and dropped.

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
        """Return tokens (T,) int32 and whether each is learned (T,)."""
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
        """Return a template that marks the assistant's words; "" for the tokenizer's own."""
        if self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = _CHAT_TEMPLATE
            return ""
        try:
            return require("instruct", "trl").get_training_chat_template(self.tokenizer) or ""
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            return ""  # a template that trl has no marked twin of


def summary(facts: dict[str, Any]) -> str:
    """Say in one line what was read, e.g. "2,000 rows, 3 dropped (2 empty answer, 1 empty prompt), 12 cut"."""
    dropped = facts["dropped"]
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    total = f"{sum(dropped.values()):,} dropped" + (f" ({why})" if why else "")
    return f"{facts['rows']:,} rows, {total}, {facts['cut']:,} longer than max_length"


def _learned_after(prompt: list[int], whole: list[int]) -> tuple[np.ndarray, np.ndarray]:
    shared = next((i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), None)
    start = min(len(prompt), len(whole)) if shared is None else shared
    return np.array(whole, dtype=np.int32), np.arange(len(whole)) >= start
