"""The eight commonsense tests, answered in generated text: the evaluation of LLM-Adapters, which DoRA follows.

Hu et al. (arXiv:2304.01933), commonsense_evaluate of their release: the instruction in an Alpaca prompt, beam search
with 4 beams and at most 32 new tokens, left padding; of the text behind the last "### Response:", the first
occurrence of a possible answer ("true", "solution2", "answer3") counts, whatever stands around it. No occurrence
is a wrong answer.

A model is asked with the prompt that it was tuned with: `alpaca` is that of `nlr finetune`; the release's own is
indented by 16 spaces, a slip of its source code that models tuned by it have learned.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nonlinear_lowrank.errors import UserError

from .batches import check_batch
from .commonsense import TESTS
from .harness import Metrics, add_groups
from .task_file import LocalTask, LocalTasks

BEAMS = 4
MAX_NEW_TOKENS = 32
_RESPONSE = "### Response:"
_INDENT = " " * 16
PROMPTS: dict[str, str] = {
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{{instruction}}\n\n{_RESPONSE}\n"
    ),
    "llm-adapters": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request. \n\n"
        f"{_INDENT}### Instruction:\n{_INDENT}{{instruction}}\n\n{_INDENT}{_RESPONSE}\n{_INDENT}"
    ),
}


def score_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    local: LocalTasks,
    *,
    prompt: str = "alpaca",
    beams: int = BEAMS,
    limit: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Metrics]:
    """Asks each question and looks for the answer in what the model writes.

    Args:
        model: a causal language model, with or without an adapter of peft; left in evaluation mode.
        tokenizer: the one it was trained with.
        local: tests out of `commonsense.TESTS`, from `find_local_tasks`.
        prompt: of `PROMPTS`.
        beams: of the beam search; 1 is greedy.
        limit: at most this many questions of each test.
        batch_size: questions per batch; each has `beams` rows.
        progress: called with the number of questions that are done, and of all.

    Returns:
        By test and group: "acc,none", the share of right answers, with its standard error; "answered,none", the
        share in which any answer was found; "n"; "truncated" when prompts were longer than the model's
        positions and lost their beginning.

    Raises:
        UserError: no such prompt, the model has no room for an answer, or a batch takes more memory than is free.
    """
    if prompt not in PROMPTS:
        raise UserError(f"there is no prompt {prompt!r}; there are {', '.join(PROMPTS)}")
    model.eval()
    tasks = {task.name: list(task.docs)[:limit] for task in local.tasks}
    total, done = sum(len(docs) for docs in tasks.values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    scores: dict[str, Metrics] = {}
    for task in local.tasks:
        docs = tasks[task.name]
        prompts = [PROMPTS[prompt].format(instruction=doc["instruction"]) for doc in docs]
        texts, truncated = _generate(model, tokenizer, prompts, beams, batch_size, advance)
        found = [find_answer(text, TESTS[task.name].answers) for text in texts]
        scores[task.name] = _metrics(task, found, [doc["answer"] for doc in docs])
        if truncated:
            scores[task.name]["truncated"] = truncated
    add_groups(scores, local.groups)
    return scores


def find_answer(text: str, answers: Sequence[str]) -> str:
    """The first answer that occurs behind the last "### Response:"; "" for none."""
    found = re.search("|".join(map(re.escape, answers)), text.rpartition(_RESPONSE)[2])
    return found[0] if found else ""


def _metrics(task: LocalTask, found: Sequence[str], right: Sequence[str]) -> Metrics:
    n = len(right)
    metrics: Metrics = {}
    for name, hits in (
        ("acc", [a == b for a, b in zip(found, right, strict=True)]),
        ("answered", [bool(answer) for answer in found]),
    ):
        share = sum(hits) / n
        metrics[f"{name},none"] = share
        metrics[f"{name}_stderr,none"] = (share * (1 - share) / (n - 1)) ** 0.5 if n > 1 else "N/A"
    return {**metrics, "n": n, "published_n": task.published}


def _generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    beams: int,
    batch_size: int,
    advance: Callable[[int], None],
) -> tuple[list[str], int]:
    """What the model writes after each prompt, and how many prompts were cut; the longest are run first."""
    config = model.config.get_text_config()
    room = (getattr(config, "max_position_embeddings", None) or 2**31) - MAX_NEW_TOKENS
    if room < 1:
        raise UserError(
            f"the model has {room + MAX_NEW_TOKENS} positions; answers alone take {MAX_NEW_TOKENS}: evaluate a model "
            "with more"
        )
    encoded = [tokenizer(prompt, verbose=False)["input_ids"] for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda index: -len(encoded[index]))
    if order:
        check_batch(model, min(batch_size, len(order)), min(room, len(encoded[order[0]])), beams=beams)
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = tokenizer.eos_token_id or 0  # masked: any token will do
    texts = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        rows = [encoded[index][-room:] for index in batch]
        longest = max(map(len, rows))
        input_ids = torch.tensor([[padding] * (longest - len(row)) + row for row in rows])  # (B, T)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            written = model.generate(
                input_ids=input_ids.to(model.device),
                attention_mask=mask.to(model.device),
                num_beams=beams,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=MAX_NEW_TOKENS,
                pad_token_id=padding,
            )
        for index, row in zip(batch, written[:, longest:].tolist(), strict=True):
            texts[index] = str(tokenizer.decode(row, skip_special_tokens=True))
        advance(len(batch))
    return texts, sum(len(ids) > room for ids in encoded)
