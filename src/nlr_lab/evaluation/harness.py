"""Scores of tasks of EleutherAI's lm-evaluation-harness, and of the commonsense tests answered in generated text.

`score_answers` is the evaluation of LLM-Adapters (Hu et al., arXiv:2304.01933, commonsense_evaluate of their release):
of what is written before another "### Response:", the first occurrence of a possible answer counts, wherever it is.
The prompts are those of `nlr finetune` and of the release, whose accidental indent its models have learned.
"""

import contextlib
import io
import logging
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nlr_lab.runtime.tables import number_table, render_table
from nlr_lab.tasks.finetune.records import ALPACA
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import require

from .local_tasks import LocalGroup, LocalTask, LocalTasks, answers_of
from .losses import check_batch

MAX_NEW_TOKENS = 32
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # lm-eval's names, first wins
_RESPONSE = "### Response:"
_INDENT = " " * 16
PROMPTS: dict[str, str] = {
    "alpaca": ALPACA.format(paired="", instruction="{instruction}", input=""),
    "llm-adapters": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request. \n\n"
        f"{_INDENT}### Instruction:\n{_INDENT}{{instruction}}\n\n{_INDENT}{_RESPONSE}\n{_INDENT}"
    ),
}

Metrics = dict[str, Any]
"""Numbers by lm-eval's names: "acc,none", "acc_stderr,none"; "n" is the number of questions that were scored."""


def score_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str] = (),
    *,
    local: LocalTasks | None = None,
    include_path: str | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, Metrics]:
    """Run tasks of lm-eval on a causal language model, with or without an adapter of peft; metrics by task and group.

    `tasks` are names of lm-eval's own, with task files of one's own in `include_path` and so many `shots` before each
    question (None: the task's own); `local` tasks, from `find_local_tasks`, read nothing over the network, and
    their metrics count under "truncated" the questions that lost their beginning. `limit` is of the questions of each
    task.

    Raises:
        UserError: lm-eval is not installed, or does not know a task; the model has fewer positions than an answer
            takes; a batch takes more memory than is free.
    """
    # lm-eval warns of what is intended: a live model, a task without a version, each number of examples.
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        harness = _harness(model, tokenizer, batch_size)
        scores = _score_local(harness, local, limit) if local is not None and local.tasks else {}
        return scores | (_score_named(harness, tasks, include_path, shots, limit) if tasks else {})
    finally:
        logger.setLevel(before)


def _harness(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Any:
    """Return the model as lm-eval takes it; it counts what it truncates instead of warning once for each."""
    base: Any = require("eval", "lm_eval.models.huggingface").HFLM
    quiet = not sys.stderr.isatty()

    class CountingHFLM(base):  # type: ignore[misc]
        truncated: frozenset[str] = frozenset()
        """Contexts that were longer than the model's positions."""

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm or quiet)

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            for strings, _, tail in requests:
                if len(tail) > self.max_length:
                    raise _too_few(self.max_length, f"the answer {strings[1][:40]!r} alone takes {len(tail):,}")
            longest = self.max_length + 1
            self.truncated |= {strings[0] for strings, head, tail in requests if len(head) + len(tail) > longest}
            # Requests that differ in their last token alone are one row of a batch.
            rows = {hash(tuple(head + tail[:-1])): len(head) + len(tail) - 1 for _, head, tail in requests}
            if rows:
                check_batch(model, min(batch_size, len(rows)), min(self.max_length, max(rows.values())))
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            for request in requests:
                asked = [request.args[1][name] for name in _LENGTHS if request.args[1].get(name) is not None]
                if (length := int(asked[0]) if asked else self.max_gen_toks) >= self.max_length:
                    raise _too_few(self.max_length, f"{request.task_name} asks for {length:,} new tokens")
            if requests:
                longest = len(self.tok_encode(max((request.args[0] for request in requests), key=len)))
                check_batch(model, min(batch_size, len(requests)), min(self.max_length, longest), beams=1)
            return super().generate_until(requests, disable_tqdm=disable_tqdm or quiet)

    return CountingHFLM(pretrained=model.eval(), tokenizer=tokenizer, backend="causal", batch_size=batch_size)


def _too_few(positions: int, what: str) -> UserError:
    fix = "evaluate a model with more, or leave its task out of --tasks"
    return UserError(f"the model has {positions:,} positions, and {what}: {fix}")


def _score_local(harness: Any, local: LocalTasks, limit: int | None) -> dict[str, Metrics]:
    from lm_eval.evaluator import evaluate

    # evaluate, not simple_evaluate: that one starts programs to describe the machine, and asks the hub for a hash.
    results = evaluate(harness, {task.name: _load(task) for task in local.tasks}, limit=limit, log_samples=True)
    scores = {}
    for task in local.tasks:
        samples = results["samples"][task.name]
        counts = {"n": len(samples), "published_n": task.published, "shots": len(task.shots)}
        scores[task.name] = _numbers(results, task.name) | counts
        if truncated := len({sample["arguments"][0][0] for sample in samples} & harness.truncated):
            scores[task.name]["truncated"] = truncated
    add_groups(scores, local.groups)
    return scores


def _load(task: LocalTask) -> Any:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    class QuietTask(ConfigurableTask):  # type: ignore[misc]
        def build_all_requests(self, **kwargs: Any) -> None:
            with contextlib.redirect_stderr(io.StringIO()):  # a bar for each of 57 subjects
                super().build_all_requests(**kwargs)

    parts = {"test": Dataset.from_list(list(task.docs))}
    config = {**task.config, "task": task.name, "custom_dataset": lambda **_: parts}
    if task.shots:
        parts["dev"] = Dataset.from_list(list(task.shots))
    else:  # lm-eval looks for the examples' part also where none are taken
        config = {key: value for key, value in config.items() if not key.startswith("fewshot_")}
    return QuietTask(config=config)


def _score_named(
    harness: Any, tasks: Sequence[str], include_path: str | None, shots: int | None, limit: int | None
) -> dict[str, Metrics]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # lm-eval reads 10,000 task files at every start (12 seconds); a task of one's own does not need them.
    manager = TaskManager(include_path=include_path, include_defaults=False) if include_path else None
    if manager is None or not set(tasks) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=include_path)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise UserError(f"lm-eval has no task {', '.join(unknown)}; a task file of your own needs --include-path")
    results = simple_evaluate(
        model=harness, tasks=list(tasks), task_manager=manager, num_fewshot=shots, limit=limit, log_samples=False
    )
    scores = {name: _numbers(results, name) for name in results["results"]}
    for name, count in results.get("n-samples", {}).items():
        scores[name]["n"] = count["effective"]
    return scores


def _numbers(results: Any, task: str) -> Metrics:
    return {key: value for key, value in results["results"][task].items() if "," in key}


def score_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    local: LocalTasks,
    *,
    prompt: str = "alpaca",
    beams: int = 4,
    limit: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Metrics]:
    """Ask each question of local commonsense tests, and look for the answer in what a causal language model writes.

    `prompt` is of `PROMPTS`, `limit` of the questions of each test; a batch of questions has `beams` rows of each.
    `progress` is called with the number of questions that are done, and of all. Returned are by test and group
    "acc,none", the share of right answers, and "answered,none", that in which any was found, with standard errors; "n";
    and "truncated", prompts that lost their beginning.

    Raises:
        UserError: no such prompt, the model has no room for an answer, or a batch takes more memory than is free.
    """
    if prompt not in PROMPTS:
        raise UserError(f"there is no prompt {prompt!r}; choose from {', '.join(PROMPTS)}")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = positions - MAX_NEW_TOKENS
    if room < 1:
        raise _too_few(positions, f"answers alone take {MAX_NEW_TOKENS}")
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
        n = len(docs)
        found = [find_answer(texts[index], answers_of(task.name)) for index in range(n)]
        right = sum(answer == doc["answer"] for answer, doc in zip(found, docs, strict=True))
        scores[task.name] = _share("acc", right / n, n) | _share("answered", sum(map(bool, found)) / n, n)
        scores[task.name] |= {"n": n, "published_n": task.published}
        if truncated := sum(len(ids) > room for ids in encoded):
            scores[task.name]["truncated"] = truncated
    add_groups(scores, local.groups)
    return scores


def find_answer(text: str, answers: Sequence[str]) -> str:
    """Return the first answer that occurs in a continuation before another "### Response:"; "" for none."""
    found = re.search("|".join(map(re.escape, answers)), text.partition(_RESPONSE)[0])
    return found[0] if found else ""


def _share(name: str, share: float, n: int) -> Metrics:
    """Return a share of n questions, and its standard error as lm-eval gives that of a task."""
    error = math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else "N/A"
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
                repetition_penalty=1.0,  # not those that come with the checkpoint
                no_repeat_ngram_size=0,
                length_penalty=1.0,
                min_new_tokens=None,
                suppress_tokens=None,
                max_new_tokens=MAX_NEW_TOKENS,
                pad_token_id=padding,
            )
        texts = tokenizer.batch_decode(written[:, longest:], skip_special_tokens=True)
        yield dict(zip(batch, texts, strict=True))


def add_groups(scores: dict[str, Metrics], groups: Sequence[LocalGroup]) -> None:
    """Put the groups behind their members; two of one name share an entry.

    A pooled group has the share of right answers over all questions; another the mean of its members' shares, whose
    errors are independent.
    """
    for group in groups:
        members = [scores[name] for name in group.members]
        n = sum(member["n"] for member in members)
        if group.pooled:
            entry = _share(group.metric, sum(member["acc,none"] * member["n"] for member in members) / n, n)
        else:
            errors = [member["acc_stderr,none"] for member in members]
            known = all(isinstance(each, float) for each in errors)
            entry = {
                f"{group.metric},none": sum(member["acc,none"] for member in members) / len(members),
                f"{group.metric}_stderr,none": math.hypot(*errors) / len(errors) if known else "N/A",
            }
        entry |= {"n": n, "published_n": group.published}
        if truncated := sum(member.get("truncated", 0) for member in members):
            entry["truncated"] = truncated
        scores.setdefault(group.name, {}).update(entry)


def task_table(scores: Mapping[str, Mapping[str, Any]], hidden: Collection[str] = ()) -> list[str]:
    """One line a metric, with its standard error and the number of questions, then what makes it incomparable, of
    `score_tasks` or `score_answers`; tasks that are `hidden` are only counted."""
    shown = {task: metrics for task, metrics in scores.items() if task not in hidden}
    table, notes = number_table("task", "metric", "value", "stderr", "n"), []
    table.columns[1].justify = "left"
    for task, metrics in shown.items():
        count = f"{metrics['n']:,}" if "n" in metrics else ""
        for key, value in metrics.items():
            name, comma, way = key.partition(",")
            if comma and not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr,{way}")
                number = f"{value:.4f}" if isinstance(value, float) else str(value)
                spread = f"{error:.4f}" if isinstance(error, float) else ""
                table.add_row(task, name if way == "none" else key, number, spread, count)
        n, published = metrics.get("n"), metrics.get("published_n", metrics.get("n"))
        if published != n:
            what = f"{task} is {n:,} questions, the published test {published:,}"
            notes.append(f"note: {what}: not comparable with published figures")
        if "truncated" in metrics:
            what = f"{metrics['truncated']:,} prompts did not fit the model's positions and lost their beginning"
            notes.append(f"note: {task}: {what}")
    if unseen := len(scores) - len(shown):
        notes.insert(0, f"and {unseen} subjects, which --out FILE writes")
    return [render_table(table, 200), *notes]
