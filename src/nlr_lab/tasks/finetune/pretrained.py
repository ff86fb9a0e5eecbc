"""The pretrained model that a task tunes: found by name or folder, loaded, and given a new head.

Init of a new head, drawn from the run's seed, the same in every arm: linears outside the pretrained part
N(0, initializer_range^2), their biases 0; norms 1 and 0. A head that comes with the checkpoint is redrawn as well:
two checkpoints then start alike.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nlr_lab.tasks.task import AdapterSetup, Task, name_classes
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, one_line, require

from .gguf import find_gguf, packaged_smollm2, unpack

if TYPE_CHECKING:
    from torch import nn

_UNTRAINED = "nlr_untrained"  # on a loaded model: modules of its pretrained part that the checkpoint lacks

PACKAGED = ("smollm2", "minilm", "digits-vit")
"""Checkpoints that are neither folders nor on the hub."""

# Kind of model -> the end of transformers' name of it, and peft's.
_KINDS: dict[str, tuple[str, str | None]] = {
    "text": ("SequenceClassification", "SEQ_CLS"),
    "image": ("ImageClassification", None),
    "causal": ("CausalLM", "CAUSAL_LM"),
}
_DTYPES = ("float32", "bfloat16", "nf4")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _known(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **dict(zip(_SIZES, sizes, strict=True)), **more}


# The architectures of the published recipes, so that arms can be checked and counted before a download.
_LLAMA: Any = {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
_SMOLLM2: Any = {**_LLAMA, "num_key_value_heads": 3, "rope_theta": 1e5, "tie_word_embeddings": True}
_DEBERTA: Any = {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
_POSITIONS: Any = {"share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
_SHAPE: Any = {"vocab_size": 128100, "type_vocab_size": 0, "pooler_hidden_size": 768}
_ROBERTA: Any = {"vocab_size": 50265, "type_vocab_size": 1, "max_position_embeddings": 514, "pad_token_id": 1}
_KNOWN = {
    "FacebookAI/roberta-large": _known("roberta", (1024, 4096, 24, 16), **_ROBERTA),
    "microsoft/deberta-v3-base": _known("deberta-v2", (768, 3072, 12, 12), **_SHAPE, **_DEBERTA, **_POSITIONS),
    "meta-llama/Meta-Llama-3-8B": _known("llama", (4096, 14336, 32, 32), vocab_size=128256, **_LLAMA),
    "facebook/deit-tiny-patch16-224": _known("vit", (192, 768, 12, 3)),
    "smollm2": _known("llama", (576, 1536, 30, 9), vocab_size=49152, **_SMOLLM2),
}


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A pretrained model, and the modules that adapters go on."""

    checkpoint: str
    """"smollm2" (SmolLM2-135M-Instruct) or "minilm" (a sentence encoder), both packaged; "digits-vit" (a tiny ViT that
    is trained here on first use); a folder as save_pretrained or `nlr train` writes it; a GGUF file, or a folder with
    one; or a hub name."""
    targets: tuple[str, ...] = ()
    """Ends of the names of the modules that adapters go on unless an arm names its own; empty: peft's choice."""
    pooling: Literal["auto", "own", "mean"] = "auto"
    """Head of a text classifier: the architecture's own, or the mean over tokens and one linear. "auto" takes
    the mean for sentence encoders, whose own pooler was never trained."""
    dtype: Literal["float32", "bfloat16", "nf4"] = "float32"
    """Type of the pretrained weights; adapters are float32 in any case. "nf4": linears but heads are read into 4 bits
    by bitsandbytes as QLoRA has it (Dettmers et al., arXiv:2305.14314; double quantization, products in bfloat16), the
    rest is float32; only adapters train. nlr generate, merge and evaluate of text put them on the wide weights."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        if not self.checkpoint:
            raise UserError("checkpoint is empty; give a folder, a hub name, smollm2 or minilm")
        check_choice("pooling", self.pooling, ("auto", "own", "mean"))
        check_choice("dtype", self.dtype, _DTYPES)

    def where(self) -> str:
        """Return the folder or hub name that transformers loads; raise UserError where there is no model."""
        name, path = self.checkpoint, Path(self.checkpoint).expanduser()
        if name == "digits-vit":
            from nlr_lab.tasks.images.pretraining import digits_vit_folder

            return str(digits_vit_folder())
        if name == "minilm":
            from nonlinear_lowrank.hub.pooled import find_encoder

            return find_encoder(name)
        if name == "smollm2":
            return str(unpack(packaged_smollm2()))
        for folder in (path, path / "model"):
            if (folder / "config.json").is_file():
                return str(folder.resolve())
        if (file := find_gguf(path)) is not None:
            return str(unpack(file))
        if path.exists() or name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1:
            what = f"no model in {name}: neither config.json, model/config.json nor a .gguf file is there"
            hint = "train one there first, merge an adapter into its base"
            raise UserError(f"{what}; {hint}, or give another folder or a hub name (--checkpoint)")
        return name

    def portable_name(self) -> str:
        """Return the name by which an adapter records its base, no path of this machine: a package's or the hub's as it
        is; of a folder its path from the working directory, or its last part where it is elsewhere, after "./"."""
        place = Path(self.where())
        if self.checkpoint in PACKAGED or not place.is_dir():
            return self.checkpoint
        inside = place.is_relative_to(Path.cwd())  # as peft would have it; "./" tells it from a name of the hub
        return f"./{place.relative_to(Path.cwd()).as_posix() if inside else Path(self.checkpoint).name}"

    def config(self) -> Any:
        """Return the architecture's config, without the weights."""
        from transformers import AutoConfig

        if self.checkpoint in _KNOWN:
            return AutoConfig.for_model(**_KNOWN[self.checkpoint])
        if self.checkpoint == "digits-vit":
            from nlr_lab.tasks.images.pretraining import digits_vit_config

            return digits_vit_config()
        return self._loaded(lambda where: AutoConfig.from_pretrained(where, trust_remote_code=False))

    def tokenizer(self) -> Any:
        """Return the checkpoint's tokenizer, with a token to pad with."""
        from transformers import AutoTokenizer

        found: Any = self._loaded(lambda where: AutoTokenizer.from_pretrained(where, trust_remote_code=False))
        if found.pad_token is None:
            found.pad_token = found.eos_token or found.unk_token
        return found

    def in_files(self, kind: str, labels: int) -> dict[str, Any]:
        """Return transformers' options that read the weights in their type; raise UserError without bitsandbytes."""
        import torch

        if self.dtype != "nf4":
            return {"dtype": getattr(torch, self.dtype)}
        require("quantized", "bitsandbytes")
        from transformers import BitsAndBytesConfig

        heads = None  # by default the output head of a language model
        if kind != "causal":
            heads = [*head_modules(self.on_meta(kind, labels)), r".*\bpooler"]
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=heads,
        )
        return {"dtype": torch.float32, "quantization_config": config}

    def load(self, kind: str, labels: int, seed: int) -> Any:
        """Return the model in evaluation mode: "text" or "image", a classifier with a new head of so many labels (1: a
        regression), which is drawn from the seed by this file's table; or "causal", a language model as it is."""
        import torch
        from torch import nn

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            model, info = self._loaded(lambda where: self._read(where, kind, labels))
            inside = f"{model.base_model_prefix}."
            lacking = sorted({key.rpartition(".")[0] for key in info["missing_keys"] if key.startswith(inside)})
            if strangers := [name for name in lacking if "pooler" not in name]:
                what = f"{self.checkpoint} lacks weights of {strangers[0]}"
                raise UserError(f"{what}: it is not a checkpoint of this architecture")
            poolers = dict.fromkeys(re.sub(r"(pooler[^.]*)\..*", r"\1", name) for name in lacking)
            setattr(model, _UNTRAINED, tuple(poolers))
            if self.dtype == "nf4":
                from nonlinear_lowrank.adapters.quantized import keep_unpacked

                for module in model.modules():
                    keep_unpacked(module)
            std = getattr(model.config, "initializer_range", None) or 0.02
            for module in (each for name in head_modules(model) for each in model.get_submodule(name).modules()):
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0.0, std)
                    if module.bias is not None:
                        module.bias.zero_()
                elif hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        return model

    def _read(self, where: str, kind: str, labels: int) -> tuple[Any, dict[str, Any]]:
        """Return a model, and what of it was not in the files."""
        from transformers import AutoConfig

        from nonlinear_lowrank.hub.classes import AugmentedModel, check_loading_info
        from nonlinear_lowrank.hub.pooled import MeanPooledForSequenceClassification

        options: Any = {**self.in_files(kind, labels), "use_safetensors": True}
        if kind == "text" and self._pools():
            if self.dtype == "nf4":
                raise UserError("a mean-pooled encoder is not read in 4 bits; give --pooling own or --dtype float32")
            options |= {"checkpoint": self.portable_name(), "num_labels": labels}
            return MeanPooledForSequenceClassification.from_encoder(where, **options), {"missing_keys": ()}
        if kind != "causal":
            config: Any = AutoConfig.from_pretrained(where, trust_remote_code=False)
            config.problem_type = None  # of an earlier task; the loss follows the labels
            config.num_labels = labels
            options |= {"config": config, "ignore_mismatched_sizes": True}
        model, info = _auto(kind).from_pretrained(where, output_loading_info=True, **options)
        if isinstance(model, AugmentedModel):
            check_loading_info(model, info)
        return model, info

    def on_meta(self, kind: str, labels: int) -> Any:
        """Return the same shapes on the meta device."""
        import torch

        from nonlinear_lowrank.hub.pooled import MeanPooledConfig, MeanPooledForSequenceClassification

        config = self.config()
        with torch.device("meta"):
            if kind == "text" and self._pools():
                return MeanPooledForSequenceClassification(MeanPooledConfig(config.to_dict(), num_labels=labels))
            if kind != "causal":
                config.num_labels = labels
            try:
                return _auto(kind).from_config(config)
            except ValueError as error:  # transformers' list of all types is pages long
                fault = f"{self.checkpoint} is a {config.model_type}, of which transformers has no {_KINDS[kind][0]}"
                raise UserError(f"{fault}; give another checkpoint (--checkpoint)") from error

    def _pools(self) -> bool:
        """Return whether a text classifier's head is on the mean over tokens."""
        sentences = self.checkpoint == "minilm" or (Path(self.checkpoint).expanduser() / "modules.json").is_file()
        return sentences if self.pooling == "auto" else self.pooling == "mean"

    def _loaded(self, load: Callable[[str], Any]) -> Any:
        from nonlinear_lowrank.hub.classes import quiet_loading

        where = self.where()
        try:
            with quiet_loading():
                return load(where)
        except UserError:
            raise
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            absent = "" if Path(where).is_dir() else ", which is not a folder here"
            raise UserError(f"cannot load the checkpoint {self.checkpoint!r}{absent}: {one_line(error)}") from error


class FinetuneTask(Task):
    """A pretrained model that is tuned on data."""

    model: Pretrained
    pretrained: ClassVar[bool] = True
    kind: ClassVar[str]
    """A key of `_KINDS`."""

    @property
    def meta_labels(self) -> int:
        """Labels of a classifier where the data are not known yet."""
        return 0

    def build_model(self, prepared: Any, dense_init: Any = None, *, seed: int = 0) -> Any:
        """Return the pretrained model, its new head, if it has one, drawn from the seed; raise UserError where it does
        not fit, or an arm asks for an init of its own."""
        if dense_init is not None:
            raise UserError("init= is for models that are trained from scratch; this recipe tunes a pretrained one")
        model = self.model.load(self.kind, len(prepared.classes) or 1, seed)
        if prepared.classes:
            name_classes(model, prepared.classes)
        if self.kind == "text":  # decoders classify by the last token that is not padding
            model.config.get_text_config().pad_token_id = prepared.tokenizer.pad_token_id
        return model

    def build_on_meta(self) -> Any:
        return self.model.on_meta(self.kind, self.meta_labels)

    def adapter_setup(self, model: "nn.Module") -> AdapterSetup:
        """Return what adapters need to know."""
        own, (_, task_type) = self.model, _KINDS[self.kind]
        frozen = own.dtype == "nf4"
        return AdapterSetup(head=head_modules(model), targets=own.targets, task_type=task_type, frozen=frozen)


def _auto(kind: str) -> Any:
    import transformers

    return getattr(transformers, f"AutoModelFor{_KINDS[kind][0]}")


def head_modules(model: "nn.Module") -> tuple[str, ...]:
    """Return the modules that no checkpoint has: those outside the pretrained part, and an untrained pooler."""
    if not hasattr(model, "num_labels") or hasattr(model, "lm_head"):
        return ()
    inner = getattr(model, "base_model_prefix", "")
    outside = [name for name, child in model.named_children() if name != inner and list(child.parameters())]
    return (*outside, *getattr(model, _UNTRAINED, ()))
