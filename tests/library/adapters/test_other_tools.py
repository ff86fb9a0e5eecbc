"""Adapters in the tools that people use LoRA with, LoRA as the control: trl's trainers, accelerate's offloading,
transformers' pipelines, diffusers' and sentence-transformers' own ways of adding, saving and loading."""

import math

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from datasets import Dataset
from diffusers import UNet2DConditionModel
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, pipeline
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import finetune_helpers
import nonlinear_lowrank as nlr

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

_LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
_NORA = {"r": 2, "groups": 4, "anchor": "exact", "task_type": "CAUSAL_LM"}
CONFIGS = {
    "LoRA": lambda: peft.LoraConfig(init_lora_weights=False, **_LORA),
    "sine-LoRA": lambda: nlr.SineLoraConfig(init_lora_weights=False, **_LORA),
    "sine-DoRA": lambda: nlr.SineLoraConfig(init_lora_weights=False, use_dora=True, **_LORA),
    "NOBLE": lambda: nlr.NobleAdapterConfig(init_weights=False, **_LORA),
    "NoRA": lambda: nlr.NoraConfig(init_weights=False, **_NORA),
    "NoRA++": lambda: nlr.NoraConfig(init_weights=False, lora_r=4, lora_target_modules=["q_proj"], **_NORA),
}
every_method = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with its tokenizer."""
    return finetune_helpers.language_model(tmp_path_factory.mktemp("base"))


class Rates(TrainerCallback):
    """Initial learning rates of the last step by tensor, and those of the learning-rate table."""

    def on_pre_optimizer_step(self, *_, model, optimizer, **__):
        groups = getattr(optimizer, "optimizer", optimizer).param_groups
        self.seen = {id(each): group["initial_lr"] for group in groups for each in group["params"]}
        table = nlr.param_groups(model, lr=0.02, verbose=False)
        self.expected = {id(each): group["lr"] for group in table for _, each in group["params"]}


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS)
def tuned(request, folder, tmp_path_factory):
    """An adapter after trl's SFT."""
    out = str(tmp_path_factory.mktemp("tuned"))
    options = {"max_steps": 3, "learning_rate": 0.02, "per_device_train_batch_size": 4, "max_length": 24}
    data = Dataset.from_dict({"text": ["the cat sat on a mat", "the birds saw red"] * 6})
    rates = Rates()
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        SFTConfig(out, report_to=[], save_strategy="no", use_cpu=True, **options),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=request.param(),
        callbacks=[nlr.LearningRateCallback(), rates],
    )
    trainer.train()
    assert rates.seen == pytest.approx(rates.expected)
    trainer.save_model(out)
    return out


def first_log(trainer_class, config_class, folder, tuned, tmp_path, data, **options):
    """The first logged values of a preference trainer that goes on with the adapter."""
    base = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(4, 16)[None]
    with torch.no_grad():
        plain = base(ids).logits
        model = PeftModel.from_pretrained(base, tuned, is_trainable=True)
        assert (model(ids).logits - plain).abs().max() > 1e-3  # else the base would do for a reference
    settings = {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3, **options}
    arguments = config_class(str(tmp_path), report_to=[], save_strategy="no", use_cpu=True, **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    extra = {"reward_funcs": lambda completions, **_: [float(len(each)) for each in completions]}
    extra = extra if "num_generations" in options else {}
    extra["callbacks"] = [nlr.LearningRateCallback()]
    trainer = trainer_class(model, args=arguments, train_dataset=data, processing_class=tokenizer, **extra)
    trainer.train()
    return trainer.state.log_history[0]


PAIRS = {"prompt": ["the cat"] * 8, "chosen": [" sat on a mat"] * 8, "rejected": [" saw red birds"] * 8}


def test_dpo_after_sft_starts_from_the_tuned_model(folder, tuned, tmp_path):
    """Policy and reference are the same at first: the loss is log 2."""
    log = first_log(DPOTrainer, DPOConfig, folder, tuned, tmp_path, Dataset.from_dict(PAIRS))
    assert log["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_kto_after_sft_starts_from_the_tuned_model(folder, tuned, tmp_path):
    """Policy and reference are the same at first: the loss is 1 - sigmoid(0)."""
    rows = {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": [True, False] * 4}
    log = first_log(KTOTrainer, KTOConfig, folder, tuned, tmp_path, Dataset.from_dict(rows))
    assert log["loss"] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(("trainer", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_policy_gradients_after_sft_start_from_the_tuned_model(trainer, config, folder, tuned, tmp_path):
    data = Dataset.from_dict({"prompt": PAIRS["prompt"]})
    options = {"beta": 0.1, "num_generations": 2, "max_completion_length": 6}
    log = first_log(trainer, config, folder, tuned, tmp_path, data, **options)
    assert log["kl"] == pytest.approx(0.0, abs=1e-5)


@every_method
@pytest.mark.parametrize("where", ["cpu", "disk", "map"])
def test_offloading_leaves_the_outputs(config, where, folder, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config()).eval()
    ids = torch.arange(4, 16)[None]
    with torch.no_grad():
        expected = model(ids).logits
        if where == "cpu":
            cpu_offload(model, execution_device="cpu")
        elif where == "disk":
            disk_offload(model, str(tmp_path), execution_device="cpu")
        else:
            layers = {f"base_model.model.model.layers.{index}": ("cpu", "disk")[index] for index in range(2)}
            rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
            device_map = layers | {f"base_model.model.{name}": device for name, device in rest.items()}
            dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
        torch.testing.assert_close(model(ids).logits, expected)  # one product at most in place of two


def test_pipeline_generates_what_the_adapter_does(folder, tuned):
    """Through transformers' own loading; trained, so that nothing drawn anew would pass."""
    with torch.no_grad():
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tuned).eval()
        ids = torch.arange(4, 16)[None]
        generator = pipeline("text-generation", model=tuned, device="cpu")
        torch.testing.assert_close(generator.model(ids).logits, model(ids).logits)
        prompt = AutoTokenizer.from_pretrained(tuned)("the cat", return_tensors="pt")
        expected = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0].tolist()
    options = {"max_new_tokens": 6, "do_sample": False, "return_tensors": True}
    assert generator("the cat", **options)[0]["generated_token_ids"] == expected


CHAT = """{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"""


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("head", [None, ["lm_head"]], ids=["tokens", "tokens-head"])
def test_sft_trains_the_tokens_that_a_chat_template_adds(config, head, folder, tmp_path):
    source = AutoTokenizer.from_pretrained(folder)
    source.add_tokens(["<|user|>", "<|assistant|>", "<|end|>"], special_tokens=True)
    source.eos_token, source.chat_template = "<|end|>", CHAT
    source.save_pretrained(tmp_path / "source")
    said = [{"role": "user", "content": "who sat"}, {"role": "assistant", "content": "the cat"}]
    adapter = config()
    adapter.modules_to_save = head
    options = {"max_steps": 3, "learning_rate": 0.02, "per_device_train_batch_size": 4, "max_length": 24}
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        SFTConfig(
            str(tmp_path),
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            chat_template_path=str(tmp_path / "source"),
            **options,
        ),
        train_dataset=Dataset.from_dict({"messages": [said] * 12}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapter,
        callbacks=[nlr.LearningRateCallback()],
    )
    rows = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(folder)
    first = base.config.vocab_size
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    ids = tokenizer.apply_chat_template(said, return_tensors="pt", return_dict=True)["input_ids"]
    changed = (model.get_input_embeddings()(torch.arange(len(tokenizer))) - rows).abs().amax(1) > 0
    assert not changed[:first].any()
    assert changed[tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>"])].all()
    assert (ids >= first).sum() == 4
    if head:  # else the base's new rows of the head are whatever each resizing has drawn
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, trainer.model.eval()(ids).logits)


def unet():
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    blocks |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "block_out_channels": (8, 16)}
    sizes = {"sample_size": 8, "layers_per_block": 1, "cross_attention_dim": 8, "attention_head_dim": 4}
    return UNet2DConditionModel(**blocks, **sizes, norm_num_groups=4).eval()


def image_config(name, **more):
    targets = {"r": 2, "target_modules": ["to_q", "to_v", "conv1"], **more}
    kinds = {"LoRA": peft.LoraConfig, "sine-LoRA": nlr.SineLoraConfig}
    return kinds[name.replace("DoRA", "LoRA")](use_dora=name == "sine-DoRA", init_lora_weights=False, **targets)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")  # of every second adapter
@pytest.mark.parametrize("name", ["LoRA", "sine-LoRA", "sine-DoRA"])
@torch.no_grad()
def test_diffusers_saves_loads_and_weighs_adapters(name, tmp_path):
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.randn(1, 5, 8)
    model = unet()
    plain = model(*inputs).sample
    model.add_adapter(image_config(name), adapter_name="one")
    for tensor_name, tensor in model.named_parameters():
        if "magnitude" in tensor_name:  # as training would
            tensor.mul_(1.5)
    one = model(*inputs).sample
    assert (one - plain).abs().max() > 1e-2
    model.save_lora_adapter(tmp_path, adapter_name="one")

    model.add_adapter(image_config(name, lora_alpha=4), adapter_name="two")
    model.set_adapters(["two"], [1.0])
    two = model(*inputs).sample
    model.set_adapters(["one", "two"], [1.0, 0.5])
    both = model(*inputs).sample
    assert min((both - each).abs().max() for each in (one, two)) > 1e-3
    model.set_adapters(["one", "two"], [1.0, 0.0])
    if name != "sine-DoRA":  # whose magnitudes act at any weight
        torch.testing.assert_close(model(*inputs).sample, one)
    model.set_adapters(["one"], [1.0])
    torch.testing.assert_close(model(*inputs).sample, one)
    model.disable_lora()
    assert torch.equal(model(*inputs).sample, plain)
    model.enable_lora()
    model.delete_adapters("two")
    model.fuse_lora()
    torch.testing.assert_close(model(*inputs).sample, one)

    again = unet()
    again.load_lora_adapter(tmp_path, prefix=None, adapter_name="mine", use_safetensors=True)
    assert type(again.peft_config["mine"]) is type(image_config(name))
    assert torch.equal(again(*inputs).sample, one)


@every_method
def test_sentence_transformers_keeps_an_adapter(config, tmp_path):
    sentences = pytest.importorskip("sentence_transformers")
    path = finetune_helpers.encoder(tmp_path / "bert", dropout=0.0)
    adapter = config()
    adapter.task_type = "FEATURE_EXTRACTION"
    if isinstance(getattr(adapter, "target_modules", None), set):
        adapter.target_modules = {"query", "value"}
    if getattr(adapter, "lora_target_modules", None):
        adapter.lora_target_modules = {"query"}
    model = sentences.SentenceTransformer(path, device="cpu")  # the mean over tokens
    plain = model.encode(["the cat sat"])
    model.add_adapter(adapter)
    for name, tensor in model.named_parameters():
        if "magnitude" in name:  # as training would
            tensor.data.mul_(1.5)
    adapted = model.encode(["the cat sat"])
    assert abs(adapted - plain).max() > 1e-4
    model.save_pretrained(str(tmp_path / "out"))
    again = sentences.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert again.encode(["the cat sat"]) == pytest.approx(adapted, abs=1e-6)


def test_sentence_transformers_trains_resumes_and_saves_branches(tmp_path):
    sentences = pytest.importorskip("sentence_transformers")
    losses = sentences.sentence_transformer.losses
    path = finetune_helpers.encoder(tmp_path / "bert", dropout=0.0)
    rows = Dataset.from_list([{"one": f"the {word} sat", "two": f"a {word}"} for word in ("cat", "dog", "man", "sun")])

    class MixedTrainer(nlr.TrainerMixin, sentences.SentenceTransformerTrainer):
        pass

    def made(loss, **options):
        torch.manual_seed(0)
        model = sentences.SentenceTransformer(path, device="cpu")
        nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
        settings = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "use_cpu": True, "report_to": []}
        settings |= {"per_device_train_batch_size": 4, "disable_tqdm": True, "seed": 1}
        args = sentences.SentenceTransformerTrainingArguments(output_dir=str(tmp_path / "run"), **settings)
        return MixedTrainer(model, args, train_dataset=rows, loss=loss(model, **options))

    trainer = made(losses.SoftmaxLoss, sentence_embedding_dimension=32, num_labels=2)
    groups = {id(each): group["lr"] for group in trainer.create_optimizer().param_groups for each in group["params"]}
    expected = nlr.param_groups(trainer.loss, 1e-2, verbose=False)
    assert groups == {id(each): pytest.approx(group["lr"]) for group in expected for _, each in group["params"]}
    assert id(trainer.loss.classifier.weight) in groups

    whole, resumed = made(losses.MultipleNegativesRankingLoss), made(losses.MultipleNegativesRankingLoss)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    trained = whole.model.encode(["the cat sat", "a dog"])
    assert resumed.model.encode(["the cat sat", "a dog"]) == pytest.approx(trained, abs=1e-6)
    whole.model.save_pretrained(str(tmp_path / "out"))
    again = sentences.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert again.encode(["the cat sat", "a dog"]) == pytest.approx(trained, abs=1e-6)
    with nlr.branches_disabled(again):
        assert again.encode(["the cat sat", "a dog"]) != pytest.approx(trained, abs=1e-4)
