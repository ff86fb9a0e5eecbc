"""Several instructions in a row: each once, none seen by another, and the loss that they have alone."""

import itertools
import sys

import numpy as np
import pytest
import torch

import finetune_helpers
import model_helpers
import nonlinear_lowrank as nlr
from nlr_lab.tasks.finetune.sequences import PadRight, TokenExamples, check_packing, pack_examples
from nlr_lab.training import run_training
from nonlinear_lowrank import UserError
from refusals import assert_refused
from seeds import rng

pack_dataset = pytest.importorskip("trl").pack_dataset

CAUSAL = [name for name in model_helpers.FAMILIES if hasattr(model_helpers.FAMILIES[name]().config, "vocab_size")]


def make_examples(count=40, length=24, vocabulary=60):
    generator = rng()
    ids = [generator.integers(3, vocabulary, generator.integers(2, length + 1)).astype(np.int32) for _ in range(count)]
    learned = [generator.random(len(each)) < 0.6 for each in ids]
    return TokenExamples(ids, [np.where(mask, each, -100) for each, mask in zip(ids, learned, strict=True)])


def bounds(row):
    """Places where the examples of a row begin and end."""
    return itertools.pairwise([*np.flatnonzero(row["position_ids"].numpy() == 0), len(row["position_ids"])])


def test_every_example_is_there_once_and_whole():
    examples = make_examples()
    packed = pack_examples(examples, 24, pack_dataset)
    found = []
    for row, length in zip(packed, packed.lengths, strict=True):
        assert {len(each) for each in row.values()} == {length}
        assert length <= 24
        for start, end in bounds(row):
            assert row["position_ids"][start:end].tolist() == list(range(end - start))
            assert row["labels"][start] == -100
            found.append((row["input_ids"][start:end].tolist(), row["labels"][start + 1 : end].tolist()))
    wanted = [(ids.tolist(), labels[1:].tolist()) for ids, labels in zip(examples.ids, examples.labels, strict=True)]
    assert sorted(found) == sorted(wanted)
    assert len(packed) < len(examples)


@pytest.mark.parametrize("family", CAUSAL)
def test_losses_are_those_of_the_examples_alone_or_the_model_is_refused(family):
    model = model_helpers.FAMILIES[family]().double().eval()
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        pytest.skip("no language model")
    examples = make_examples(vocabulary=model.config.vocab_size)
    try:
        check_packing(model)
    except UserError as error:
        assert "omit packing" in str(error)  # noqa: PT017
        assert family not in ("llama", "gpt2")
        return
    nlr.augment(model, nlr.NobleConfig(rank=4, up_scale=1.0), verbose=False)
    model.double()
    pad = PadRight(pad_id=0, multiple=8)
    packed = pack_examples(examples, 24, pack_dataset)
    rows = pad(list(packed))
    assert set(rows) == {"input_ids", "labels", "position_ids"}
    with torch.no_grad():
        together = model(**rows, use_cache=False, num_items_in_batch=1).loss
        alone = sum(model(**pad([each]), use_cache=False, num_items_in_batch=1).loss for each in examples)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)  # softmax is in float32
    near, far = distances_from_alone(model, packed)
    assert near <= 1e-12
    assert far > 1e-3  # it matters


@torch.no_grad()
def distances_from_alone(model, packed):
    """The farthest that any logit of an example is, in its row, from what it is alone: with positions, and without."""
    near = far = 0.0
    for row in packed:
        ids, positions = row["input_ids"][None], row["position_ids"][None]
        apart = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        mixed = model(input_ids=ids, use_cache=False).logits[0]
        for start, end in bounds(row):
            alone = model(input_ids=ids[:, start:end], use_cache=False).logits[0]
            near = max(near, float((apart[start:end] - alone).abs().max()))
            far = max(far, float((mixed[start:end] - alone).abs().max()))
    return near, far


def test_a_run_is_shorter_by_what_was_padding(tmp_path, monkeypatch):
    finetune_helpers.root(tmp_path)
    steps = {}
    for packing in (False, True):
        task = finetune_helpers.instruction_task(tmp_path, packing=packing, max_length=128)
        recipe = finetune_helpers.recipe(task, "sine-lora:r=2,omega=200", steps=0, epochs=1)
        result = run_training(recipe, tmp_path / f"out-{packing}", quiet=True)
        assert np.isfinite(result.curve[-1][1])
        steps[packing] = result.steps
    assert steps[True] < steps[False]
    assert "packed_rows" in (tmp_path / "out-True" / "result.json").read_text()
    monkeypatch.setitem(sys.modules, "trl", None)
    assert_refused(r"trl is needed here: pip install '.*\[instruct\]'", task.prepare, progress=False)


def test_a_model_that_mixes_examples_up_is_refused():
    class Blind(torch.nn.Module):
        """Its attention knows of no positions."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, input_ids, position_ids=None, **options):
            return self.inner(input_ids=input_ids, **options)

    assert_refused("Blind does not keep packed examples apart", check_packing, Blind(model_helpers.llama()))
    check_packing(model_helpers.llama())
