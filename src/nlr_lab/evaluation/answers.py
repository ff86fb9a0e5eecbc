"""The eight commonsense tests, answered in generated text: the evaluation of LLM-Adapters, which DoRA follows.

Hu et al. (arXiv:2304.01933), commonsense_evaluate of their release: the instruction in an Alpaca prompt, beam search
with 4 beams and at most 32 new tokens, left padding; of the text behind the last "### Response:", the first
occurrence of a possible answer ("true", "solution2", "answer3") counts, whatever stands around it. No occurrence
is a wrong answer.

A model is asked with the prompt that it was tuned with: `alpaca` is that of `nlr finetune`; the release's own is
indented by 16 spaces, a slip of its source code that models tuned by it have learned.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nonlinear_lowrank.errors import UserError

from .harness import Metrics, add_groups
from .local_tasks import LocalTasks, answers_of
from .losses import check_batch

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
    """Ask each question and look for the answer in what the model writes.

    Args:
        model: a causal language model, with or without an adapter of peft; left in evaluation mode.
        tokenizer: the one it was trained with.
        local: tests out of `local_tasks.TESTS`, from `find_local_tasks`.
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
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = positions - MAX_NEW_TOKENS
    if room < 1:
        raise UserError(
            f"the model has {positions} positions; answers alone take {MAX_NEW_TOKENS}: evaluate a model with more"
        )
    model.eval()
    done, total = 0, sum(len(task.docs[:limit]) for task in local.tasks)
    scores: dict[str, Metrics] = {}
    for task in local.tasks:
        docs = task.docs[:limit]
        prompts = [PROMPTS[prompt].format(instruction=doc["instruction"]) for doc in docs]
        encoded = [tokenizer(text, verbose=False)["input_ids"] for text in prompts]
        texts: dict[int, str] = {}
        for batch in _generate(model, tokenizer, [ids[-room:] for ids in encoded], beams, batch_size):
            texts |= batch
            done += len(batch)
            progress(done, total)
        found = [find_answer(texts[index], answers_of(task.name)) for index in range(len(docs))]
        scores[task.name] = {
            **_share("acc", [answer == doc["answer"] for answer, doc in zip(found, docs, strict=True)]),
            **_share("answered", [bool(answer) for answer in found]),
            "n": len(docs),
            "published_n": task.published,
        }
        if truncated := sum(len(ids) > room for ids in encoded):
            scores[task.name]["truncated"] = truncated
    add_groups(scores, local.groups)
    return scores


def find_answer(text: str, answers: Sequence[str]) -> str:
    """Return the first answer that occurs behind the last "### Response:"; "" for none."""
    found = re.search("|".join(map(re.escape, answers)), text.rpartition(_RESPONSE)[2])
    return found[0] if found else ""


def _share(name: str, hits: Sequence[bool]) -> Metrics:
    n, share = len(hits), sum(hits) / len(hits)
    error = (share * (1 - share) / (n - 1)) ** 0.5 if n > 1 else "N/A"
    return {f"{name},none": share, f"{name}_stderr,none": error}


def _generate(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], beams: int, batch_size: int
) -> Iterator[dict[int, str]]:
    """Yield what the model writes after each prompt, by the prompt's number; the longest are run first."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    check_batch(model, min(batch_size, len(order)), len(prompts[order[0]]), beams=beams)
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = tokenizer.eos_token_id or 0  # masked: any token will do
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        longest = len(prompts[batch[0]])
        gaps = [longest - len(prompts[index]) for index in batch]
        rows = [[padding] * gap + prompts[index] for gap, index in zip(gaps, batch, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        with torch.inference_mode():
            written = model.generate(
                input_ids=torch.tensor(rows, device=model.device),  # (B, T)
                attention_mask=torch.tensor(mask, device=model.device),
                num_beams=beams,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=MAX_NEW_TOKENS,
                pad_token_id=padding,
            )
        texts = tokenizer.batch_decode(written[:, longest:], skip_special_tokens=True)
        yield dict(zip(batch, texts, strict=True))
