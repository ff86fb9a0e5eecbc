"""Commonsense answers looked for in generated text: against one prompt at a time."""

import re

import pytest
import torch

from nlr_lab.evaluation.harness import MAX_NEW_TOKENS, PROMPTS, find_answer, score_answers
from nlr_lab.evaluation.local_tasks import answers_of, find_local_tasks
from nlr_lab.tasks.finetune.records import read_examples
from refusals import assert_refused
from task_helpers import answer_tokenizer, commonsense_rows, tiny_model, write_lines


@pytest.fixture(scope="module")
def tokenizer():
    return answer_tokenizer()


@pytest.fixture
def model(tokenizer):
    return tiny_model(tokenizer)


@torch.no_grad()
def write(model, tokenizer, prompt, beams):
    """One prompt at a time, unpadded."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(input_ids=ids, num_beams=beams, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("beams", [1, 4])
def test_the_first_answer_in_the_written_text_counts(model, tokenizer, tmp_path, prompt, beams):
    rows = commonsense_rows("ARC-Easy", 9)
    found = []
    for row in rows:
        text = write(model, tokenizer, PROMPTS[prompt].format(instruction=row["instruction"]), beams)
        found.append(next(iter(re.findall(r"answer[1-5]", text)), ""))
        number = int(found[-1][-1]) if found[-1] else 0
        if 0 < number <= len(row["parts"]["choices"]) and len(found) % 3:
            row["answer"] = found[-1]  # right where the model answers, but for each third question
    write_lines(tmp_path / "ARC-Easy.jsonl", rows)
    local = find_local_tasks(["arc_easy_local"], tmp_path)
    done = []
    settings = {"prompt": prompt, "beams": beams, "batch_size": 4}
    scores = score_answers(model, tokenizer, local, **settings, progress=lambda *counts: done.append(counts))
    scores = scores["arc_easy_local"]
    assert scores["acc,none"] == pytest.approx(sum(a == row["answer"] for a, row in zip(found, rows, strict=True)) / 9)
    assert scores["answered,none"] == pytest.approx(sum(map(bool, found)) / 9)
    assert (scores["n"], scores["published_n"]) == (9, 2376)
    assert done == [(4, 9), (8, 9), (9, 9)]


@pytest.mark.parametrize(
    ("test", "text", "answer"),
    [
        ("boolq", "it is untrue, that is false", "true"),  # wherever it stands, as in the release
        ("piqa", "Solution2 or solution1", "solution1"),  # as it is written
        ("siqa", "answer5", "answer5"),
        ("hellaswag", "ending3 ending1", "ending3"),
        ("winogrande", "option3", ""),
        ("arc_easy", "answer1\n\n### Response:\nanswer4", "answer1"),  # the release splits at each
        ("arc_easy", "answer1\n\n### Response:\n", "answer1"),
    ],
)
def test_answers_are_found_as_the_release_finds_them(test, text, answer):
    assert find_answer(text, answers_of(f"{test}_local")) == answer


def test_prompts_are_those_of_the_release_and_of_nlr_finetune(tmp_path):
    lines = PROMPTS["llm-adapters"].format(instruction="Why {not}?").split("\n")
    assert lines[0].endswith("completes the request. ")
    assert lines[1:5] == ["", " " * 16 + "### Instruction:", " " * 16 + "Why {not}?", ""]
    assert lines[5:] == [" " * 16 + "### Response:", " " * 16]
    plain = PROMPTS["alpaca"].format(instruction="Why {not}?")
    assert plain.split() == " ".join(lines).split()
    assert plain.endswith("\n\n### Instruction:\nWhy {not}?\n\n### Response:\n")
    row = commonsense_rows("piqa", 1)[0] | {"instruction": "Why {not}?"}
    (example,) = read_examples(str(write_lines(tmp_path / "train.jsonl", [row])), "alpaca")
    assert example.prompt == plain


def test_long_prompts_lose_their_beginning_and_are_counted(tokenizer, tmp_path):
    write_lines(tmp_path / "boolq.jsonl", commonsense_rows("boolq", 2))
    local = find_local_tasks(["boolq_local"], tmp_path)
    model = tiny_model(tokenizer, positions=MAX_NEW_TOKENS + 8)
    given, generate = [], model.generate
    model.generate = lambda **inputs: given.extend(inputs["input_ids"].tolist()) or generate(**inputs)
    assert score_answers(model, tokenizer, local, beams=1)["boolq_local"]["truncated"] == 2
    prompts = [PROMPTS["alpaca"].format(instruction=doc["instruction"]) for doc in local.tasks[0].docs]
    assert sorted(given) == sorted(tokenizer(prompt)["input_ids"][-8:] for prompt in prompts)
    few = tiny_model(tokenizer, positions=MAX_NEW_TOKENS)
    assert_refused(f"{MAX_NEW_TOKENS} positions, and answers alone take", score_answers, few, tokenizer, local)
    assert_refused("no prompt 'vicuna'; choose from alp", score_answers, model, tokenizer, local, prompt="vicuna")


def test_a_checkpoints_own_generation_settings_change_no_answer(model, tokenizer, tmp_path):
    write_lines(tmp_path / "ARC-Easy.jsonl", commonsense_rows("ARC-Easy", 9))
    local = find_local_tasks(["arc_easy_local"], tmp_path)
    expected = score_answers(model, tokenizer, local, beams=1)
    model.generation_config.update(repetition_penalty=9.0, no_repeat_ngram_size=1)
    assert score_answers(model, tokenizer, local, beams=1) == expected
