"""Register our types with transformers, peft and diffusers, without importing them, or torch, before anybody else does.

This happens when each is imported, or at once where it already is:

- `AutoConfig` gets a stub for every backbone's augmented twin. Its class is built when something is asked of it:
  transformers knows more than 400 backbones.
- Methods' modules of adapters are imported with peft, to which they register themselves (`adapters.tuner`). A saved
  adapter names its type in adapter_config.json: a process without this package fails there with `KeyError: 'NLR_...'`.
  Tuners find the modules of an augmented model that they take by default (`peft_targets`).
- diffusers' `load_lora_adapter` builds a LoraConfig from a file's settings, whatever the method; for ours it gets
  the method's own config.
- Our own `augment` gets a hook that makes its result saveable. `save_pretrained` refuses a model around that, and
  deletes the manifest of a folder that it overwrites.
"""

import importlib
from pathlib import Path
from typing import Any

import wrapt

TYPE_PREFIX = "nonlinear_lowrank_"
"""An augmented config's model_type is this and the base's model_type."""
CLASS_PREFIX = "NonlinearLowrank"
"""Prefix of augmented class names."""
FIELD = "nonlinear_lowrank"
"""The config field that lists what was put in: [{"method", "config", "modules"}, ...]."""
OWN_TYPES = {"nlr_mean_pooled": "MeanPooledConfig", "nlr_image_tokens": "ImageTokensConfig", "nlr_kat": "KatConfig"}
"""The model types of backbones of our own, and their config classes in `hub`."""


class _Stub(type):
    """Class of stubs, which hand every call and attribute on to the config class of their `model_type`."""

    model_type: str

    def resolve(cls) -> Any:
        hub = importlib.import_module("nonlinear_lowrank.hub")
        if cls.model_type in OWN_TYPES:
            return getattr(hub, OWN_TYPES[cls.model_type])
        return hub.register(config_class(cls.model_type.removeprefix(TYPE_PREFIX)))  # which takes the stub's place

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.resolve()(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.resolve(), name)


def config_class(model_type: str) -> Any:
    """Return transformers' config class of a model type, imported or built where only a stub was there."""
    found = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING[model_type]
    return found.resolve() if isinstance(found, _Stub) else found


def _on_transformers(configuration_auto: Any) -> None:
    """Register a stub for each backbone that transformers knows, and for each that is registered later."""
    known, auto = configuration_auto.CONFIG_MAPPING, configuration_auto.AutoConfig

    def add_stub(model_type: str) -> None:
        if model_type not in known:
            auto.register(model_type, _Stub(model_type, (), {"model_type": model_type}))

    def register(register: Any, _instance: Any, args: Any, kwargs: Any) -> None:
        register(*args, **kwargs)
        model_type = kwargs["model_type"] if "model_type" in kwargs else args[0]
        if not model_type.startswith(TYPE_PREFIX):
            add_stub(TYPE_PREFIX + model_type)

    for model_type in [*known, *OWN_TYPES]:
        add_stub(TYPE_PREFIX + model_type)
    for model_type in OWN_TYPES:
        add_stub(model_type)
    wrapt.wrap_function_wrapper(auto, "register", register)


def _on_peft(_peft: Any) -> None:
    base = importlib.import_module("nonlinear_lowrank.methods.base")
    for method in base.all_methods().values():
        if method.adapter:
            importlib.import_module(method.adapter)

    def inject(inject: Any, tuner: Any, args: Any, kwargs: Any) -> Any:
        model = kwargs["model"] if "model" in kwargs else args[0]
        name = kwargs["adapter_name"] if "adapter_name" in kwargs else args[1]
        if any(map(base.method_of_layer, model.modules())):
            targets = importlib.import_module("nonlinear_lowrank.hub.peft_targets")
            targets.fill_in_targets(tuner, model, tuner.peft_config[name])
        return inject(*args, **kwargs)

    tuners = importlib.import_module("peft.tuners.tuners_utils")
    wrapt.wrap_function_wrapper(tuners.BaseTuner, "inject_adapter", inject)


def _on_diffusers(loaders: Any) -> None:
    def create(create: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        settings = kwargs.get("metadata", args[2] if len(args) > 2 else None) or {}
        if not str(settings.get("peft_type", "")).startswith("NLR_"):
            return create(*args, **kwargs)
        return importlib.import_module("peft").PeftConfig.from_peft_type(**settings)

    if hasattr(loaders, "_create_lora_config"):  # private: another version's import must not fail for it
        wrapt.wrap_function_wrapper(loaders, "_create_lora_config", create)


def _on_speech(speech: Any) -> None:
    def init(init: Any, _instance: Any, args: Any, kwargs: Any) -> None:
        config = getattr(kwargs["model"] if "model" in kwargs else args[0], "config", None)
        model_type = str(getattr(config, "model_type", ""))
        if not model_type.startswith(TYPE_PREFIX):
            return init(*args, **kwargs)
        # The pipeline looks for Whisper by name; another model gets the first 30 seconds, and no timestamps.
        config.model_type = model_type.removeprefix(TYPE_PREFIX)  # type: ignore[union-attr]
        try:
            return init(*args, **kwargs)
        finally:
            del config.model_type  # type: ignore[union-attr]

    wrapt.wrap_function_wrapper(speech.AutomaticSpeechRecognitionPipeline, "__init__", init)


def _on_augment(augment: Any) -> None:
    def make_saveable(model: Any, entry: dict[str, Any]) -> None:
        if any(hasattr(each, "save_pretrained") for each in model.modules()):
            importlib.import_module("nonlinear_lowrank.hub.classes").make_saveable(model, entry)

    augment.after_augment.append(make_saveable)


def _on_models(modeling_utils: Any) -> None:
    def save(save: Any, model: Any, args: Any, kwargs: Any) -> Any:
        importlib.import_module("nonlinear_lowrank.hub.classes").check_saveable(model)
        save(*args, **kwargs)
        # A folder that convert, merge or a run wrote has other files now than its manifest lists.
        folder = Path(kwargs["save_directory"] if "save_directory" in kwargs else args[0])
        storage = importlib.import_module("nonlinear_lowrank.hub.storage")
        if any(name.endswith(".safetensors") for name in storage.manifest_files(folder) or ()):
            (folder / storage.MANIFEST).unlink(missing_ok=True)

    wrapt.wrap_function_wrapper(modeling_utils.PreTrainedModel, "save_pretrained", save)


wrapt.register_post_import_hook(_on_peft, "peft")
wrapt.register_post_import_hook(_on_transformers, "transformers.models.auto.configuration_auto")
wrapt.register_post_import_hook(_on_diffusers, "diffusers.loaders.peft")
wrapt.register_post_import_hook(_on_speech, "transformers.pipelines.automatic_speech_recognition")
wrapt.register_post_import_hook(_on_models, "transformers.modeling_utils")
wrapt.register_post_import_hook(_on_augment, "nonlinear_lowrank.surgery.augment")
