"""The masked language model: which tokens are hidden, what the backbone is, runs, and tokenizers with a mask."""

import math

import numpy as np
import pytest
import torch

from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import Masking
from nlr_lab.tasks.text.packed import MaskedBlocks, TokenBlocks, prepare_text
from pretraining_helpers import corpus as write_corpus
from pretraining_helpers import masked_task
from refusals import assert_refused
from seeds import rng

LENGTH, VOCABULARY, MASK, SPECIAL = 512, 1000, 4, (0, 1, 2, 3, 4)
SIZES = {"layers": 2, "width": 32, "heads": 2, "hidden": 48}


def blocks(folder, sequences=200, masking=None, seed=None, tokens=None):
    tokens = rng().integers(0, VOCABULARY, sequences * LENGTH) if tokens is None else tokens
    np.save(folder / "tokens.npy", tokens.astype(np.uint16))
    facts = {"mask": MASK, "special": SPECIAL, "vocab_size": VOCABULARY, "seed": seed}
    return MaskedBlocks(blocks=TokenBlocks(folder / "tokens.npy", LENGTH), masking=masking or Masking(), **facts)


def whole(dataset, indices):
    items = [dataset[index] for index in indices]
    originals = np.concatenate([dataset.blocks.block(index % len(dataset)) for index in indices]).astype(np.int64)
    shown, labels = (np.concatenate([item[name].numpy() for item in items]) for name in ("input_ids", "labels"))
    return originals, shown, labels


@pytest.mark.parametrize("seed", [None, 5], ids=["evaluation", "training"])
def test_fifteen_percent_of_which_eighty_ten_ten(tmp_path, seed):
    dataset = blocks(tmp_path, seed=seed)
    original, shown, labels = whole(dataset, range(200))
    chosen, special = labels != -100, np.isin(original, SPECIAL)
    assert (labels[chosen] == original[chosen]).all()
    assert (shown[~chosen] == original[~chosen]).all()
    assert not (chosen & special).any()
    count = chosen.sum()
    # Four standard deviations of a binomial.
    assert chosen[~special].mean() == pytest.approx(0.15, abs=4 * math.sqrt(0.15 * 0.85 / (~special).sum()))
    hidden, same = shown[chosen] == MASK, shown[chosen] == original[chosen]
    other = ~hidden & ~same
    for share, expected in ((hidden, 0.8), (other, 0.1), (same, 0.1)):
        assert share.mean() == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / count) + 2e-3)
    drawn = shown[chosen][other]
    assert len(np.unique(drawn)) > 500, "random tokens come from the whole vocabulary"
    # The first position is as likely as any.
    first = labels.reshape(200, LENGTH)[:, 0] != -100
    assert 0.02 < first.mean() < 0.35


def test_masks_follow_seed_sequence_and_pass_alone(tmp_path):
    dataset = blocks(tmp_path, sequences=6)
    training, again = dataset.seeded(3), dataset.seeded(3)
    assert (dataset.seed, dataset.counts_passes, training.counts_passes) == (None, False, True)
    assert all(torch.equal(training[4][name], again[4][name]) for name in ("input_ids", "labels"))
    masks = [training[4], training[4 + 6], training[5], dataset.seeded(4)[4], dataset[4]]
    places = {tuple(torch.nonzero(item["labels"] != -100).flatten().tolist()) for item in masks}
    assert len(places) == len(masks)
    same = blocks(tmp_path, tokens=np.load(tmp_path / "tokens.npy"))
    assert torch.equal(dataset[4]["input_ids"], same[4]["input_ids"])


def test_every_sequence_has_something_to_predict(tmp_path):
    dataset = blocks(tmp_path, masking=Masking(probability=1e-9))
    _, _, labels = whole(dataset, range(200))
    assert ((labels.reshape(200, LENGTH) != -100).sum(1) == 1).all()
    only = np.full(LENGTH * 2, SPECIAL[1])
    assert (blocks(tmp_path, tokens=only)[1]["labels"] == -100).all()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("masked")).parent


def test_a_wordpiece_of_the_text_itself(corpus, monkeypatch, tmp_path):
    monkeypatch.setenv("NLR_CACHE", str(tmp_path))
    settings = {"source": str(corpus / "corpus.txt"), "sequence_length": 16, "vocab_size": 300}
    packed = prepare_text(TextData(**settings, tokenizer="wordpiece"), progress=False)
    tokenizer = packed.tokenizer
    assert packed.vocab_size == len(tokenizer) == 300
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]
    tokens = np.load(packed.train.path)
    assert tokens[-1] == tokenizer.sep_token_id
    documents = (corpus / "corpus.txt").read_text().split("\n<|endoftext|>\n")
    ends = np.flatnonzero(tokens == tokenizer.sep_token_id)
    assert tokenizer.decode(tokens[: ends[0]].tolist()) in documents
    assert tokenizer("ABC")["input_ids"] == tokenizer("abc")["input_ids"]
    other = prepare_text(TextData(**settings), progress=False)
    assert other.fingerprint != packed.fingerprint, "a BPE of the same size has a cache of its own"


@pytest.mark.shared_data
def test_berts_own_vocabulary(shared_data, corpus, tmp_path):
    settings = {"source": str(corpus / "corpus.txt"), "sequence_length": 16, "cache_dir": str(tmp_path)}
    packed = prepare_text(TextData(**settings, tokenizer=str(shared_data / "bert_uncased")), progress=False)
    tokenizer = packed.tokenizer
    assert packed.vocab_size == 30522
    # As printed in BERT's own README and model cards.
    assert tokenizer("Hello, World!")["input_ids"] == [7592, 1010, 2088, 999]
    assert tokenizer.tokenize("John Johanson's house") == ["john", "johan", "##son", "'", "s", "house"]
    specials = tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    assert specials == [0, 100, 101, 102, 103]
    file = prepare_text(TextData(**settings, tokenizer=str(shared_data / "bert_uncased" / "vocab.txt")), progress=False)
    assert file.fingerprint == packed.fingerprint


def test_tokenizers_without_a_mask_are_refused(corpus, tmp_path):
    def prepare(tokenizer):
        masked_task(corpus / "corpus.txt", tokenizer=str(tokenizer), cache_dir=str(tmp_path)).prepare(progress=False)

    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    assert_refused(r"has no \[MASK\]", prepare, tmp_path / "words")
    text = TextData(source=str(corpus / "corpus.txt"), vocab_size=300, sequence_length=16, cache_dir=str(tmp_path))
    prepare_text(text, progress=False).tokenizer.save_pretrained(tmp_path / "bpe")
    assert_refused("no mask token", prepare, tmp_path / "bpe")
