"""Scores of texts against plain arithmetic, lm-eval with a task file of our own, generation."""

import copy
import json
import math

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, TextStreamer

from nlr_lab.evaluation.generation import Sampling, encode_prompt, generate_text
from nlr_lab.evaluation.harness import score_tasks
from nlr_lab.evaluation.losses import TextScore, score_documents, score_sequences
from nlr_lab.tasks.text.tokenizers import encode
from nonlinear_lowrank import NobleConfig, augment
from refusals import assert_refused
from task_helpers import tiny_model

TEXTS = ["def area(radius):\n    return 3.14 * radius ** 2\n", "for name in names:\n    print(name)\n" * 3]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer():
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS, vocab_size=300, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END, bos_token=END)


@pytest.fixture
def model(tokenizer):
    model = tiny_model(tokenizer, positions=64)
    augment(model, NobleConfig(rank=4), verbose=False)
    return model.eval()


@torch.no_grad()
def token_losses(model, ids):
    """Loss of every token but the first, each from one forward pass over all that precedes it."""
    log_probs = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return -log_probs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


@pytest.mark.parametrize(("sequence_length", "batch_size"), [(2, 1), (7, 3), (16, 1), (16, 3), (64, 1)])
def test_windows_predict_every_token_but_the_first_exactly_once(model, tokenizer, sequence_length, batch_size):
    ids = [i for text in TEXTS for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    settings = {"sequence_length": sequence_length, "separator": END, "batch_size": batch_size}
    score = score_documents(model, tokenizer, TEXTS, **settings)
    windows = [ids[start : start + sequence_length] for start in range(0, len(ids) - 1, sequence_length - 1)]
    expected = torch.cat([token_losses(model, window) for window in windows])
    assert score.tokens == len(ids) - 1 == len(expected)
    assert score.loss == pytest.approx(expected.mean().item(), rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(expected.mean()), rel=1e-5)
    size = sum(len(text.encode()) for text in TEXTS)
    assert score.bytes_per_token * score.tokens == pytest.approx(size)
    # Bits per byte has a meaning of its own: the code length of the text in bits over its bytes.
    assert score.bits_per_byte == pytest.approx(expected.sum().item() / math.log(2) / size, rel=1e-5)
    assert json.loads(json.dumps(score.to_json()))["tokens"] == len(expected)
    assert math.isfinite(TextScore(loss=1000.0, tokens=10, bytes_per_token=4.0).perplexity), "of a diverged model"


def test_text_that_looks_like_a_special_token_is_text(model, tokenizer):
    text = f"a {END} b"
    ids, _ = next(encode(tokenizer, [text], None, offsets=False))
    assert tokenizer.eos_token_id not in ids
    score = score_documents(model, tokenizer, [text], sequence_length=64)
    assert (score.tokens, score.loss) == (len(ids) - 1, pytest.approx(token_losses(model, ids.tolist()).mean().item()))
    assert tokenizer(text)["input_ids"].count(tokenizer.eos_token_id) == 1, "the tokenizer is as it was"


def test_packed_sequences_skip_masked_labels_and_ignore_batching(model, tokenizer):
    ids = torch.randint(0, len(tokenizer), (5, 12))
    labels = ids.clone()
    labels[:, 6:9] = -100
    items = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]
    scores = [score_sequences(model, items, bytes_per_token=3.0, batch_size=size) for size in (1, 2, 5)]
    losses = torch.stack([token_losses(model, row.tolist()) for row in ids])[(labels != -100)[:, 1:]]
    for score in scores:
        assert score.tokens == 5 * 8
        assert score.loss == pytest.approx(losses.mean().item(), rel=1e-5)
        assert score.bits_per_byte == pytest.approx(score.loss / math.log(2) / 3.0)


def test_texts_that_cannot_be_scored_are_refused(model, tokenizer):
    assert_refused("at least 2", score_documents, model, tokenizer, [""], sequence_length=16)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    assert_refused("not a finite number.*nlr verify", score_documents, model, tokenizer, TEXTS, sequence_length=16)
    model.resize_token_embeddings(40)
    assert_refused("do not fit", score_documents, model, tokenizer, TEXTS, sequence_length=16)


def test_lm_eval_runs_a_local_task_on_the_live_model(model, tokenizer, tmp_path):
    rows = [{"text": text} for text in TEXTS]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "own_task.yaml").write_text(
        "task: own_task\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.json}}}}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{text}}'\nmetric_list: [{metric: bits_per_byte}]\n"
    )
    metrics = score_tasks(model, tokenizer, ["own_task"], include_path=str(tmp_path))["own_task"]
    assert score_tasks(model, tokenizer, ["own_task"], include_path=str(tmp_path), limit=1)["own_task"]["n"] == 1
    value = next(value for key, value in metrics.items() if key.startswith("bits_per_byte,"))
    # lm-eval predicts the first token too, from a start token in front.
    losses = [token_losses(model, [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]) for text in TEXTS]
    bits = sum(each.sum().item() for each in losses) / math.log(2)
    assert value == pytest.approx(bits / sum(len(text.encode()) for text in TEXTS), rel=1e-4)


@pytest.mark.slow  # lm-eval reads all of its task files
def test_a_task_that_lm_eval_does_not_know_is_refused(model, tokenizer):
    assert_refused("no_such_task", score_tasks, model, tokenizer, ["no_such_task"])


def test_generation_is_seeded_and_streams(model, tokenizer, capsys):
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    text = generate_text(model, tokenizer, "def ", Sampling(max_new_tokens=20, seed=3), streamer)
    assert capsys.readouterr().out == f"{text}\n"
    texts = [generate_text(model, tokenizer, "def ", Sampling(max_new_tokens=20, seed=seed)) for seed in range(3, 8)]
    assert texts[0] == text
    assert len(set(texts)) > 1


@torch.no_grad()
def test_greedy_generation_takes_the_most_likely_token_each_time(model, tokenizer):
    ids = tokenizer("for name")["input_ids"]
    expected = list(ids)
    for _ in range(6):
        expected.append(int(model(input_ids=torch.tensor([expected])).logits[0, -1].argmax()))
        if expected[-1] == tokenizer.eos_token_id:
            break
    for top_k in (0, 50):
        sampling = Sampling(max_new_tokens=6, temperature=0, top_k=top_k)
        text = generate_text(model, tokenizer, "for name", sampling)
        assert text == tokenizer.decode(expected[len(ids) :], skip_special_tokens=True)


@pytest.fixture
def chatty(tokenizer):
    """A tokenizer that puts a start before a text and an end behind it, with a chat template."""
    own = copy.deepcopy(tokenizer)
    own.bos_token, own.eos_token = "a", "z"
    first, last = own.convert_tokens_to_ids(["a", "z"])
    single, special = "a $A z", [("a", first), ("z", last)]
    own.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    own.chat_template = (
        "{% for m in messages %}u{{ m['content'] }}.{% endfor %}{% if add_generation_prompt %}s{% endif %}"
    )
    return own


def test_a_prompt_starts_as_the_tokenizer_starts_texts_and_goes_on(model, chatty):
    def text(prompt, **settings):
        ids, _ = encode_prompt(model, chatty, prompt, Sampling(**settings))
        return chatty.decode(ids[0], clean_up_tokenization_spaces=False)

    assert text("def x") == "adef x"
    assert text("") == "a"
    assert text("def x", chat=True) == "udef x.s", "the template says what is before and behind it"


def test_generation_ends_where_the_model_says(model, chatty, monkeypatch):
    endless = generate_text(model, chatty, "def ", Sampling(max_new_tokens=12, temperature=0))
    assert len(endless) > 3
    stop = chatty(endless[2])["input_ids"][1]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [stop])
    written = generate_text(model, chatty, "def ", Sampling(max_new_tokens=12, temperature=0))
    assert endless.startswith(written)
    assert len(written) <= 3


def test_chats_without_a_prompt_or_a_template_are_refused(model, tokenizer, chatty):
    assert_refused("a chat needs a prompt", generate_text, model, chatty, "", Sampling(chat=True))
    assert_refused("a tokenizer with a chat template", generate_text, model, tokenizer, "x", Sampling(chat=True))


def test_requests_that_cannot_be_drawn_are_refused(model, tokenizer):
    for prompt, sampling in (("def ", Sampling(max_new_tokens=64)), ("def " * 64, Sampling())):
        assert_refused("64 positions", generate_text, model, tokenizer, prompt, sampling)
    generate_text(model, tokenizer, "def ", Sampling())  # as many as fit
    generate_text(model, tokenizer, "", Sampling(max_new_tokens=4))  # starts a document


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_model_is_refused_in_generation(model, tokenizer, temperature, value):
    broken = copy.deepcopy(model)
    next(broken.parameters()).data.fill_(value)
    assert_refused("nlr verify", generate_text, broken, tokenizer, "def ", Sampling(temperature=temperature))


def test_prompt_and_continuation_may_fill_the_positions(model, tokenizer):
    room = 64 - len(tokenizer("def ")["input_ids"])
    for asked in (None, room):
        assert encode_prompt(model, tokenizer, "def ", Sampling(max_new_tokens=asked))[1] == room


def test_temperature_and_top_k_choose_the_tokens(model, tokenizer):
    def text(**settings):
        return generate_text(model, tokenizer, "def ", Sampling(max_new_tokens=20, **settings))

    assert text(temperature=100.0, top_k=0) != text(temperature=0.01, top_k=0)
    assert text(temperature=9.0, top_k=1) == text(temperature=0)
