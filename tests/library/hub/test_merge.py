"""`nlr merge`: plain models from adapters, measured; refusals that leave nothing behind."""

import json
from functools import partial

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from safetensors.torch import load_file, save_file
from torch import nn

from adapter_helpers import FAMILIES, ROWS, batch
from cli_helpers import run
from model_helpers import llama
from nonlinear_lowrank import SineLoraConfig, SineLowRankConfig, UserError, augment
from nonlinear_lowrank.hub import load_model, merging
from nonlinear_lowrank.hub.loading import load_causal_adapter
from nonlinear_lowrank.hub.merging import merge_adapter
from rounding_helpers import assert_close_by_norm

# Configs of adapters that change something from the start.
LORA, SINE_LORA = partial(LoraConfig, init_lora_weights=False), partial(SineLoraConfig, init_lora_weights=False)
MERGING = [row for row in ROWS if row.merges]
SINE = next(row for row in MERGING if row.name == "sine-llama")


def make_adapter(root, row, config=None, dtype=torch.float32):
    """Folders base, adapter and what they give together on a batch."""
    family = FAMILIES[row.family]
    row.base().to(dtype).save_pretrained(root / "base")
    (root / "base" / "tokenizer_config.json").write_text('{"from": "base"}')
    (root / "base" / "vocab.txt").write_text("base")
    base = family.auto.from_pretrained(root / "base")
    inputs = batch(base)
    model = get_peft_model(base, config or row.config()).eval()
    with torch.no_grad():
        logits = model(**inputs).logits
    model.save_pretrained(root / "adapter")
    (root / "adapter" / "tokenizer_config.json").write_text('{"from": "adapter"}')
    return root / "adapter", inputs, logits


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.float64, 1e-9)], ids=["float32", "float64"])
@pytest.mark.parametrize("row", MERGING, ids=lambda row: row.name)
def test_merging_gives_a_model_with_the_same_outputs(tmp_path, row, dtype, bound):
    adapter, inputs, expected = make_adapter(tmp_path, row, dtype=dtype)
    report = merge_adapter(adapter, tmp_path / "out")
    assert report.difference <= bound * report.scale
    merged = FAMILIES[row.family].auto.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert_close_by_norm(merged(**inputs).logits, expected, bound)
    # The rational layer stays, else none of our code is needed.
    nora = row.name.startswith("nora")
    ours = {type(module).__name__ for module in merged.modules() if type(module).__module__.startswith("nonlinear")}
    assert ("RationalActivation" in ours) == nora == ("loading it needs `import nonlinear_lowrank`" in str(report))
    assert not any(name.startswith(("Nora", "Sine")) for name in ours)
    assert nora or not ours
    assert merged.config.model_type.startswith("nonlinear_lowrank_") == nora
    assert not any("nlr_" in key for key in load_file(tmp_path / "out" / "model.safetensors"))
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"from": "adapter"}'
    assert (tmp_path / "out" / "vocab.txt").read_text() == "base"
    assert not list((tmp_path / "out").glob("adapter*"))


@pytest.mark.parametrize("row", [row for row in MERGING if not row.name.startswith("nora")], ids=lambda row: row.name)
def test_merged_files_are_those_of_a_plain_model(tmp_path, row):
    """For other programs: config (with the class), names, shapes and types of all tensors; and no code of ours."""
    adapter, *_ = make_adapter(tmp_path, row)
    merge_adapter(adapter, tmp_path / "out")
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("base", "out")]
    assert configs[0] == configs[1]
    tensors = [load_file(tmp_path / each / "model.safetensors") for each in ("base", "out")]
    kinds = [{name: (each.shape, each.dtype) for name, each in files.items()} for files in tensors]
    assert kinds[0] == kinds[1]
    assert any(not each.equal(tensors[1][name]) for name, each in tensors[0].items())
    assert not list((tmp_path / "out").glob("*.py"))


@pytest.mark.parametrize(
    ("kind", "stored", "dtype"),
    [
        (LORA, torch.float32, torch.bfloat16),
        (SINE_LORA, torch.bfloat16, torch.bfloat16),
        (SINE_LORA, torch.float32, torch.float16),
    ],
)
def test_merging_rounds_to_a_narrower_type_once(tmp_path, kind, stored, dtype):
    config = kind(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapter, _, _ = make_adapter(tmp_path, SINE, config=config, dtype=stored)
    name = "auto" if dtype == stored else str(dtype).removeprefix("torch.")
    report = merge_adapter(adapter, tmp_path / "low", dtype=name)
    merge_adapter(adapter, tmp_path / "wide", dtype="float32")
    low, wide = (load_file(tmp_path / each / "model.safetensors") for each in ("low", "wide"))
    assert all(torch.equal(low[key], value.to(dtype)) for key, value in wide.items())
    assert report.difference > 0  # against what the adapter gives in float32


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("kind", "targets", "whole"),
    [
        (SINE_LORA, ["q_proj", "lm_head"], None),
        *((LORA, targets, None) for targets in (["q_proj", "lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"])),
        *((LORA, [name], [whole]) for name, whole in (("q_proj", "lm_head"), ("embed_tokens", "lm_head"))),
        (LORA, ["lm_head"], ["embed_tokens"]),
    ],
)
def test_merging_gives_a_tied_head_a_weight_of_its_own(tmp_path, kind, targets, whole):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    base = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=40, tie_word_embeddings=True, **sizes)).double()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, kind(r=4, target_modules=targets, modules_to_save=whole, task_type="CAUSAL_LM")).eval()
    inputs = {"input_ids": torch.randint(0, 40, (2, 9))}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter))
        expected = model(**inputs).logits
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    report = merge_adapter(tmp_path / "adapter", tmp_path / "out", base=str(tmp_path / "base"))
    assert report.difference <= 1e-9 * report.scale
    assert "the output head has a weight of its own now" in str(report)
    merged = hf.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert not torch.equal(merged.lm_head.weight, merged.model.embed_tokens.weight)
    with torch.no_grad():
        assert_close_by_norm(merged(**inputs).logits, expected)


def test_merging_refuses_other_shared_weights(tmp_path, monkeypatch):
    adapter, _, _ = make_adapter(tmp_path, SINE)
    load = hf.LlamaForCausalLM.from_pretrained.__func__

    def tied(cls, *args, **options):
        found = load(cls, *args, **options)
        attention = found[0].model.layers[0].self_attn
        attention.o_proj.weight = attention.q_proj.weight
        return found

    monkeypatch.setattr(hf.LlamaForCausalLM, "from_pretrained", classmethod(tied))
    with pytest.raises(UserError, match=r"q_proj, whose weight .*o_proj shares; use the adapter unmerged"):
        merge_adapter(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.01), ("float32", float("nan")), ("bfloat16", 1.15)])
@pytest.mark.parametrize(
    ("place", "name", "message"),
    [
        (PEFT_TYPE_TO_TUNER_MAPPING["NLR_SINE_LORA"], "merge_and_unload", "away from the adapter's"),
        (merging, "load_model", "its own before it was written"),
    ],
    ids=["merged", "written"],
)
def test_merging_refuses_other_outputs(tmp_path, monkeypatch, place, name, message, dtype, factor):
    adapter, _, _ = make_adapter(tmp_path, SINE)
    right = getattr(place, name)

    def damaged(*args, **options):
        model = right(*args, **options)
        with torch.no_grad():
            model.lm_head.weight.mul_(factor)
        return model

    monkeypatch.setattr(place, name, damaged)
    with pytest.raises(UserError, match=rf"{message}.*more than rounding; use the adapter unmerged"):
        merge_adapter(adapter, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_merging_keeps_what_transformers_has_in_float32(tmp_path):
    config = hf.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    hf.T5ForConditionalGeneration(config).half().save_pretrained(tmp_path / "base")
    base = hf.T5ForConditionalGeneration.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = get_peft_model(base, LORA(r=2, target_modules=["q", "wo"], task_type="SEQ_2_SEQ_LM"))
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out", base=str(tmp_path / "base"))
    wanted = model.merge_and_unload().state_dict()
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in written.items():
        assert value.dtype == (torch.float32 if ".wo." in name else torch.float16), name
        torch.testing.assert_close(value, wanted[name].to(value.dtype), rtol=0, atol=1e-7, msg=name)


def test_merging_measures_pixels_in_a_narrower_type(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=16, **sizes)).save_pretrained(tmp_path / "base")
    base = hf.ViTForImageClassification.from_pretrained(tmp_path / "base")
    get_peft_model(base, LORA(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "out", dtype="bfloat16")
    assert 0 < report.difference < 0.1 * report.scale


def test_the_command_prints_what_it_wrote(tmp_path, capsys):
    adapter, _, _ = make_adapter(tmp_path, SINE)
    code, out, _ = run(capsys, "merge", adapter, tmp_path / "out")
    assert code == 0
    assert "NLR_SINE_LORA adapter merged" in out
    assert "max |difference|" in out
    assert "a plain model" in out
    code, out, err = run(capsys, "merge", adapter, tmp_path / "out")
    assert code == 2
    assert "is not an empty folder" in err
    (tmp_path / "out" / "old.txt").write_text("of a former model")
    assert run(capsys, "merge", adapter, tmp_path / "out", "--overwrite")[0] == 0
    assert not (tmp_path / "out" / "old.txt").exists()
    code, out, err = run(capsys, "merge", tmp_path / "out", tmp_path / "again")
    assert (code, err.count("\n")) == (2, 1)
    assert "holds a whole model and no adapter: there is nothing to merge" in err


def _broken(root, change=lambda tensors: None, **config):
    adapter = make_adapter(root, SINE)[0]
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    written = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**written, **config}))
    return adapter


def _cut(root):
    adapter = _broken(root)
    (adapter / "adapter_model.safetensors").write_bytes(b"1234")
    return adapter


def _other_base(root):
    FAMILIES["gpt2"].make().save_pretrained(root / "gpt2")
    return _broken(root, base_model_name_or_path=str(root / "gpt2"))


def _classifier(root, kind, *, whole=("classifier",), targets=("query_proj",)):
    """Return an adapter on a new classifier of five labels above a backbone in `base`, an input and the logits."""
    sizes = {"vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
    if kind == "deberta-v2":
        sizes |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "pooler_hidden_size": 32}
    else:
        sizes |= {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "eos_token_id": 2}
    hf.AutoModel.from_config(hf.AutoConfig.for_model(kind, **sizes)).save_pretrained(root / "base")
    base = hf.AutoModelForSequenceClassification.from_pretrained(root / "base", num_labels=5)
    config = SINE_LORA(r=2, task_type="SEQ_CLS", target_modules=list(targets), modules_to_save=list(whole))
    model, ids = get_peft_model(base, config).eval(), torch.randint(3, 64, (2, 6))
    ids[:, -1] = 2
    with torch.no_grad():
        logits = model(ids).logits
    model.save_pretrained(root / "adapter")
    return root / "adapter", ids, logits


@pytest.mark.parametrize(
    "kind",
    [
        ("deberta-v2", ("pooler", "classifier"), ("query_proj",)),
        ("bart", ("classification_head",), ("q_proj",)),
    ],
    ids=lambda kind: kind[0],
)
def test_merging_keeps_a_new_classifier(tmp_path, kind):
    name, whole, targets = kind
    adapter, ids, logits = _classifier(tmp_path, name, whole=whole, targets=targets)
    merge_adapter(adapter, tmp_path / "out")
    merged = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, logits)


@pytest.mark.parametrize("tuned_too", ["embeddings", "new tokens"])
def test_merging_takes_tokens_that_were_added(tmp_path, tuned_too):
    base = FAMILIES["llama"].make()
    rows = base.config.vocab_size
    base.save_pretrained(tmp_path / "base")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(rows + 3, mean_resizing=False)
    own = {"modules_to_save": ["embed_tokens", "lm_head"]}
    if tuned_too == "new tokens":
        own = {"trainable_token_indices": {"embed_tokens": [rows, rows + 1, rows + 2]}}
    config = SINE_LORA(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], **own)
    tuned, ids = get_peft_model(model, config).eval(), torch.tensor([[1, rows + 1, rows + 2, 4]])
    with torch.no_grad():
        logits = tuned(ids).logits
    tuned.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out")
    for found in (load_model(tmp_path / "out"), load_causal_adapter(tmp_path / "adapter")):
        with torch.no_grad():
            torch.testing.assert_close(found(ids).logits, logits)


def test_merging_keeps_the_tie_of_trained_tokens(tmp_path):
    base = llama(tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = SINE_LORA(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], trainable_token_indices=[1, 2])
    tuned, ids = get_peft_model(model, config).eval(), torch.tensor([[1, 3, 2, 4]])
    nn.init.normal_(tuned.base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta["default"])
    tuned.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out")
    found = load_model(tmp_path / "out")
    assert found.lm_head.weight is found.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, tuned(ids).logits)


def test_merging_takes_a_decoders_classifier_without_padding(tmp_path):
    config = llama().config
    config.pad_token_id = None
    base = hf.LlamaForSequenceClassification(config)
    (named := tmp_path / "other base").mkdir()
    base.save_pretrained(named)
    (named / "additional_chat_templates").mkdir()
    (named / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    tuned = get_peft_model(base, SINE_LORA(r=2, task_type="SEQ_CLS", target_modules=["q_proj"]))
    tuned.save_pretrained(tmp_path / "adapter")
    text = merge_adapter(tmp_path / "adapter", tmp_path / "out", base=str(named)).text
    assert "merged into other base" in text
    assert "additional_chat_templates/tools.jinja" in text
    assert hf.AutoConfig.from_pretrained(tmp_path / "out").num_labels == base.config.num_labels


REFUSED = {
    "drawn": (lambda root: _classifier(root, "deberta-v2")[0], "tune with 'pooler' in modules_to_save"),
    "noble": (lambda root: make_adapter(root, ROWS[0])[0], "NOBLE adapter, which cannot be merged"),
    "nan": (partial(_broken, change=lambda tensors: tensors[min(tensors)].fill_(float("nan"))), "not finite"),
    "half": (partial(_broken, change=lambda tensors: tensors.pop(min(tensors))), "another base model or config"),
    "no base": (partial(_broken, base_model_name_or_path=None), "names no base model"),
    "no type": (partial(_broken, peft_type="NLR_NOTHING"), "peft knows no peft_type 'NLR_NOTHING'"),
    "cut": (_cut, "not a whole safetensors file"),
    "other base": (_other_base, "does not fit"),
}


@pytest.mark.parametrize(("make", "word"), REFUSED.values(), ids=REFUSED)
def test_merging_refuses_in_one_line_and_writes_nothing(tmp_path, capsys, make, word):
    adapter = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run(capsys, "merge", adapter, tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1), err
    assert word in err
    assert sorted(tmp_path.rglob("*")) == before


def test_merging_refuses_bad_arguments(tmp_path):
    adapter = make_adapter(tmp_path, SINE)[0]
    (tmp_path / "file").write_text("")
    for out, options, words in (
        ("out", {"dtype": "float7"}, "unknown dtype"),
        ("file", {}, "is a file; name a folder"),
        ("adapter/out", {}, "inside the adapter"),
        ("file", {"overwrite": True}, "is a file; name a folder"),
        ("base", {"overwrite": True}, "holds what is merged"),
        *((place, {"overwrite": True}, "holds no model") for place in ("adapter", ".")),
    ):
        with pytest.raises(UserError, match=words):
            merge_adapter(adapter, tmp_path / out, **options)


@pytest.mark.parametrize("kind", ["speech", "two embeddings"])
def test_merging_measures_other_inputs(tmp_path, kind):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "speech":
        own = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
        own |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 10}
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
        base = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**own, **tokens, encoder_ffn_dim=48))
    else:
        text = {**sizes, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
        vision = {**sizes, "image_size": 16, "patch_size": 8}
        base = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    base.save_pretrained(tmp_path / "base")
    loaded = type(base).from_pretrained(tmp_path / "base")
    get_peft_model(loaded, LORA(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out")
    merged = type(base).from_pretrained(tmp_path / "out").state_dict()
    changed = {name for name, tensor in base.state_dict().items() if not torch.equal(tensor, merged[name])}
    assert changed == {name for name in merged if name.endswith("q_proj.weight")}


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_merging_into_a_computed_weight_is_refused():
    model = FAMILIES["llama"].make()
    augment(model, SineLowRankConfig(rank=2, omega=30), include=r".*down_proj", verbose=False)
    adapted = get_peft_model(model, SINE_LORA(r=2, target_modules=["q_proj", "down_proj"]))
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    for merge in (adapted.merge_adapter, adapted.merge_and_unload):
        with pytest.raises(UserError, match=r"down_proj has no weight of its own"):
            merge()
    assert all(torch.equal(before[name], tensor) for name, tensor in adapted.state_dict().items())
