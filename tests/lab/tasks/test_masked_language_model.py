"""The masked language model: which tokens are hidden, what the backbone is, runs, and tokenizers with a mask."""

import json
import math
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model_helpers import parameters
from nlr_lab.cli import main as cli
from nlr_lab.runtime.storage import step_folders
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.masked_language_model import EncoderBackbone, MaskedLanguageModelTask, Masking
from nlr_lab.tasks.text.masking import MaskedBlocks
from nlr_lab.tasks.text.packed import TokenBlocks, prepare_text
from nlr_lab.training import Arm, Recipe, TrainConfig, run_training
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model
from seeds import rng
from training_helpers import SEEN

LENGTH, VOCABULARY, MASK, SPECIAL = 512, 1000, 4, (0, 1, 2, 3, 4)
SIZES = {"layers": 2, "width": 32, "heads": 2, "hidden": 48}
TOKENS = SimpleNamespace(vocab_size=97, tokenizer=SimpleNamespace(pad_token_id=0, mask_token_id=4))


def blocks(folder, sequences=200, masking=None, seed=None, tokens=None):
    if tokens is None:
        tokens = rng().integers(0, VOCABULARY, sequences * LENGTH)
    np.save(folder / "tokens.npy", tokens.astype(np.uint16))
    plain = TokenBlocks(folder / "tokens.npy", LENGTH)
    return MaskedBlocks(plain, masking or Masking(), mask=MASK, special=SPECIAL, vocab_size=VOCABULARY, seed=seed)


def whole(dataset, indices):
    items = [dataset[index] for index in indices]
    originals = np.concatenate([dataset.blocks.block(index % len(dataset)) for index in indices]).astype(np.int64)
    shown, labels = (np.concatenate([item[name].numpy() for item in items]) for name in ("input_ids", "labels"))
    return originals, shown, labels


# --- masks ---------------------------------------------------------------------------------------------------


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
    training = dataset.seeded(3)
    assert dataset.seed is None
    assert training.counts_passes
    assert not dataset.counts_passes
    torch.manual_seed(0)
    one, two = training[4], dataset.seeded(3)[4]
    assert torch.equal(one["input_ids"], two["input_ids"])
    assert torch.equal(one["labels"], two["labels"])
    masks = [training[4], training[4 + 6], training[5], dataset.seeded(4)[4], dataset[4]]
    places = [tuple(torch.nonzero(item["labels"] != -100).flatten().tolist()) for item in masks]
    assert len(set(places)) == len(places)
    assert torch.equal(
        dataset[4]["input_ids"], blocks(tmp_path, tokens=np.load(tmp_path / "tokens.npy"))[4]["input_ids"]
    )


def test_every_sequence_has_something_to_predict(tmp_path):
    dataset = blocks(tmp_path, masking=Masking(probability=1e-9))
    _, _, labels = whole(dataset, range(200))
    assert ((labels.reshape(200, LENGTH) != -100).sum(1) == 1).all()
    only = np.full(LENGTH * 2, SPECIAL[1])
    assert (blocks(tmp_path, tokens=only)[1]["labels"] == -100).all()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"probability": 0.0}, "probability"),
        ({"probability": 1.0}, "probability"),
        ({"mask_share": 1.1}, "mask_share"),
        ({"random_share": -0.1}, "random_share"),
        ({"mask_share": 0.8, "random_share": 0.3}, "together"),
    ],
)
def test_bad_masking(settings, word):
    with pytest.raises(UserError, match=word):
        Masking(**settings)


# --- the backbone --------------------------------------------------------------------------------------------


def task(source="stdlib", **fields):
    text = {"source": str(source), "tokenizer": "wordpiece", "vocab_size": 300, "sequence_length": 16}
    sizes = {**SIZES, **fields.pop("sizes", {})}
    return MaskedLanguageModelTask(
        text=TextData(**text, eval_sequences=7, valid_fraction=0.1, **fields),
        backbone=EncoderBackbone(embedding_std=1.0, **sizes),
    )


def test_the_papers_sizes_on_meta():
    paper = task(sizes={"layers": 12, "width": 768, "heads": 12, "hidden": 2048})
    model = paper.build_on_meta(30522)
    block = 4 * 768 * 768 + 3 * 768 * 2048 + 2 * 768
    assert parameters(model) == 2 * 30522 * 768 + 12 * block + 768 == 131_835_648
    assert all(parameter.is_meta for parameter in model.parameters())
    for rank in (64, 128, 256):
        changed = Arm.parse(f"noble:rank={rank}").apply(paper.build_on_meta(30522))
        linears = [(768, 768)] * 4 + [(768, 2048)] * 2 + [(2048, 768)]
        added = 12 * sum(rank * (a + b) + rank * rank + 4 * rank for a, b in linears)
        assert parameters(changed) - parameters(model) == added


def test_attention_goes_both_ways_and_positions_matter():
    model = task().build_model(TOKENS, "kaiming").double().eval()
    tokens = torch.randint(5, 97, (1, 16))
    later = tokens.clone()
    later[0, -1] = (tokens[0, -1] + 1) % 97
    with torch.no_grad():
        before, after = model(input_ids=tokens).logits, model(input_ids=later).logits
        turned = model(input_ids=tokens.flip(1)).logits.flip(1)
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-4
    assert (before - turned).abs().max() > 1e-3
    names = {name.split(".")[-1] for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    assert names == {*(f"{letter}_proj" for letter in "qkvo"), "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    config = model.config
    assert (config.pad_token_id, config.mask_token_id, config.hidden_act) == (0, 4, "gelu")
    assert model.model.rotary_emb.inv_freq.shape == (8,), "rotary positions turn the whole head"


@pytest.mark.parametrize("dense_init", ["stock", "noble", "kaiming"])
def test_init_table(dense_init):
    model = task(sizes={"width": 256, "hidden": 320, "heads": 4}).build_model(TOKENS, dense_init, seed=11)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(1.0, rel=0.03)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.03)
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            d_in = module.in_features
            std = {"stock": 0.02, "noble": 0.5 / math.sqrt(d_in), "kaiming": 1 / math.sqrt(3 * d_in)}[dense_init]
            assert module.weight.std().item() == pytest.approx(std, rel=0.03), name


def test_arms_start_alike_where_they_are_alike():
    torch.manual_seed(1)
    one = task().build_model(TOKENS, seed=3)
    torch.manual_seed(2)
    two, noble = (
        task().build_model(TOKENS, "noble", seed=3),
        Arm.parse("noble:rank=4").apply(task().build_model(TOKENS, seed=3)),
    )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(one.get_parameter(name), two.get_parameter(name))
        assert torch.equal(one.get_parameter(name), noble.get_parameter(name))
    assert not torch.equal(one.model.layers[0].mlp.up_proj.weight, two.model.layers[0].mlp.up_proj.weight)


# --- runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    order = random.Random(random.getrandbits(32))
    words = ["".join(order.choices("abcdefghijklmn", k=order.randint(2, 5))) for _ in range(200)]
    texts = [" ".join(order.choices(words, k=60)) for _ in range(60)]
    (folder / "corpus.txt").write_text("\n<|endoftext|>\n".join(texts))
    return folder


def recipe(corpus, arm="noble:rank=4", **train):
    settings = {"steps": 6, "batch_size": 4, "lr": 1e-2, "eval_every": 3, "save_every": 3, "log_every": 1}
    return Recipe(
        name="tiny",
        task=task(corpus / "corpus.txt", cache_dir=str(corpus / "cache"), sizes={"dropout": 0.1}),
        arm=Arm.parse(arm),
        train=TrainConfig(**{**settings, "tracker": "none", "threads": 1, **train}),
    )


def test_evaluation_is_the_mean_over_the_masked_tokens(corpus, tmp_path):
    own = recipe(corpus)
    prepared = own.task.prepare(progress=False)
    assert len(prepared.valid) == 7, "no multiple of the batch"
    result = run_training(own, tmp_path / "run", prepared=prepared, quiet=True)
    assert Recipe.from_json(own.to_json()) == own
    assert result.bits_per_byte is None
    assert "valid_bytes_per_token" not in json.loads((tmp_path / "run" / "result.json").read_text())["data"]
    model = load_model(tmp_path / "run" / "model")
    nats, tokens = 0.0, 0
    for index in range(7):
        item = prepared.valid[index]
        with torch.no_grad():
            logits = model(input_ids=item["input_ids"][None]).logits[0].double()
        kept = item["labels"] != -100
        nats -= float(logits.log_softmax(-1)[kept, item["labels"][kept]].sum())
        tokens += int(kept.sum())
    assert result.final_loss == pytest.approx(nats / tokens, rel=1e-5)


def test_all_arms_see_the_same_masks_in_every_micro_batch(corpus, tmp_path):
    batches = {}
    for name, settings in {"a": {}, "b": {"gradient_accumulation": 2}, "seed": {"seed": 1}}.items():
        SEEN.clear()
        draws = {"a": 0, "b": 100, "seed": 0}[name]
        run_training(recipe(corpus, f"training_helpers:spy,draws={draws}", **settings), tmp_path / name, quiet=True)
        batches[name] = torch.stack(SEEN)
    assert torch.equal(batches["a"], batches["b"])
    assert not torch.equal(batches["a"], batches["seed"])


def test_resuming_is_exact(corpus, tmp_path):
    # 60 texts are about 400 sequences: the twelve batches of 80 go through them more than once.
    settings = {"batch_size": 80, "steps": 12, "save_every": 6, "eval_every": 6}
    prepared = recipe(corpus).task.prepare(progress=False)
    assert len(prepared.train) < 80 * 12
    run_training(recipe(corpus, **settings), tmp_path / "whole", prepared=prepared, quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()
    shutil.rmtree(tmp_path / "cut" / "model")
    shutil.rmtree(step_folders(tmp_path / "cut" / "checkpoints")[12])
    run_training(recipe(corpus, **settings), tmp_path / "cut", resume=True, quiet=True)
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "whole" / "result.json").read_text().partition('"seconds"')[0] == (
        tmp_path / "cut" / "result.json"
    ).read_text().partition('"seconds"')[0]


def test_a_saved_model_is_the_same_in_a_fresh_process(corpus, tmp_path):
    run_training(recipe(corpus), tmp_path / "run", quiet=True)
    tokens = torch.randint(5, 200, (2, 16))
    with torch.no_grad():
        expected = load_model(tmp_path / "run" / "model")(input_ids=tokens).logits
    torch.save({"tokens": tokens, "logits": expected}, tmp_path / "expected.pt")
    code = (
        "import sys, torch, nonlinear_lowrank\n"
        "from transformers import AutoModelForMaskedLM, AutoTokenizer\n"
        "torch.set_num_threads(1)\n"
        "model = AutoModelForMaskedLM.from_pretrained(sys.argv[1] + '/run/model').eval()\n"
        "seen = torch.load(sys.argv[1] + '/expected.pt')\n"
        "with torch.no_grad(): found = model(input_ids=seen['tokens']).logits\n"
        "assert torch.equal(found, seen['logits'])\n"
        "assert AutoTokenizer.from_pretrained(sys.argv[1] + '/run/model').mask_token == '[MASK]'\n"
        "print(type(model).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip() == "NonlinearLowrankEuroBertForMaskedLM", done.stderr


def test_the_command_trains_and_evaluate_repeats(corpus, tmp_path, capsys):
    sizes = "--layers 1 --width 16 --heads 2 --hidden 16 --sequence-length 16 --vocab-size 300 --eval-sequences 5"
    steps = "--steps 4 --batch-size 2 --warmup-steps 1 --eval-every 2 --save-every 4 --tracker none"
    options = ["--source", corpus / "corpus.txt", "--cache-dir", corpus / "cache", *sizes.split(), *steps.split()]
    arguments = ["train", "mlm-demo", "--arm", "noble:rank=4", "--out", tmp_path / "run", *options]
    assert cli.main([str(each) for each in arguments]) == 0
    out = capsys.readouterr().out
    assert "nats per masked token" in out
    assert "nlr generate" not in out
    assert cli.main(["evaluate", str(tmp_path / "run"), "--output", str(tmp_path / "score.json")]) == 0
    score = json.loads((tmp_path / "score.json").read_text())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert score["held_out"]["loss"] == pytest.approx(result["final_loss"], rel=1e-5)
    assert "nats per masked token" in capsys.readouterr().out
    assert cli.main(["generate", str(tmp_path / "run"), "--prompt", "a"]) == 2
    assert "no causal language model" in capsys.readouterr().err


# --- tokenizers ----------------------------------------------------------------------------------------------


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
    assert packed.vocab_size == 30522
    # As printed in BERT's own README and model cards.
    assert packed.tokenizer("Hello, World!")["input_ids"] == [7592, 1010, 2088, 999]
    assert packed.tokenizer.tokenize("John Johanson's house") == ["john", "johan", "##son", "'", "s", "house"]
    assert packed.tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [
        *(0, 100, 101, 102, 103)
    ]
    file = prepare_text(TextData(**settings, tokenizer=str(shared_data / "bert_uncased" / "vocab.txt")), progress=False)
    assert file.fingerprint == packed.fingerprint


def test_tokenizers_without_a_mask(corpus, tmp_path):
    with pytest.raises(UserError, match="'wordpiece'"):
        MaskedLanguageModelTask(text=TextData(), backbone=EncoderBackbone(**SIZES))
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    with pytest.raises(UserError, match=r"has no '\[MASK\]'"):
        task(corpus / "corpus.txt", sizes={}).__class__(
            text=TextData(source=str(corpus / "corpus.txt"), tokenizer=str(tmp_path / "words")),
            backbone=EncoderBackbone(**SIZES),
        ).prepare(progress=False)
    packed = prepare_text(
        TextData(source=str(corpus / "corpus.txt"), vocab_size=300, cache_dir=str(tmp_path / "cache")), progress=False
    )
    packed.tokenizer.save_pretrained(tmp_path / "bpe")
    own = MaskedLanguageModelTask(
        text=TextData(
            source=str(corpus / "corpus.txt"), tokenizer=str(tmp_path / "bpe"), cache_dir=str(tmp_path / "cache")
        ),
        backbone=EncoderBackbone(**SIZES),
    )
    with pytest.raises(UserError, match="no mask token"):
        own.prepare(progress=False)
