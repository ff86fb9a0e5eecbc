"""NoRA and NoRA++ as a PEFT method: activations are tuned, not weights (nora.txt, section 3).

    P' / Q' with coefficients theta + A B, by groups of channels; theta is fitted to the activation that is replaced

Settings and layers are in `adapter_layers`. NoRA++ (lora_r > 0) adds LoRA on linears. Merging
makes an activation a `RationalActivation` with the shift in its coefficients, and the model one that `save_pretrained`
and the Auto classes know (`hub`).
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import _ExcludedModule, _maybe_include_all_linear_layers, check_target_module_exists
from peft.utils.quantization_utils import get_quantization_kwargs
from torch import nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.adapters.tuner import AdapterModel, NoTargetError, asked_for, register_adapter
from nonlinear_lowrank.adapters.weights import AdapterLayer
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.experts import forget_rows, tell_rows
from nonlinear_lowrank.methods.matrix import Matrix, matrix_of, replace_modules
from nonlinear_lowrank.surgery.augment import after_augment
from nonlinear_lowrank.surgery.report import AugmentReport
from nonlinear_lowrank.surgery.targets import output_head_names

from .adapter_layers import ALL_ACTIVATIONS, ALL_LINEAR, NoraActivation, NoraConfig, NoraLoraLinear, NoraSineLinear
from .layer import RationalActivation, RationalConfig
from .sites import Survey, survey

_NOT_PLAIN = (
    "use_dora", "use_rslora", "lora_bias", "target_parameters", "rank_pattern", "alpha_pattern", "layer_replication",
)  # fmt: skip
_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")  # the others change the base's weights
__all__ = ["NoraActivation", "NoraConfig", "NoraModel", "lora_to_nora"]


@register_adapter(NoraConfig)
class NoraModel(AdapterModel):
    """peft's tuner for NoRA and NoRA++."""

    prefix = "lora_"  # of all tensors, since NoRA++ has LoRA's: loading relies on it
    layer_classes: ClassVar[Mapping[str, type[nn.Module]]] = {"linear": NoraLoraLinear, "conv1d": NoraLoraLinear}

    def report(self, adapter_name: str = "default") -> AugmentReport:
        """Return what an adapter replaced, what is skipped and why; raise UserError where there is no such adapter.

        Parameters exclude modules_to_save and biases; FLOPs count rational functions of known width.
        """
        if adapter_name not in self.peft_config:
            raise UserError(f"there is no adapter {adapter_name!r}; choose from {', '.join(self.peft_config)}")
        layers = {name: each for name, each in self.model.named_modules() if isinstance(each, AdapterLayer)}
        details = {
            name: self._described(each, adapter_name) if isinstance(each, NoraActivation) else "LoRA"
            for name, each in layers.items()
            if each.present([adapter_name])
        }
        seen, sizes = survey(self.model), {name: each.numel() for name, each in self.model.named_parameters()}
        skipped = {name: site.skipped or "not asked for" for name, site in seen.sites.items()} | seen.skipped()
        mine = (f".{self.prefix}", f".{adapter_name}.weight")
        linears = "LoRA" in details.values()
        return AugmentReport(
            method="NoRA++" if linears else "NoRA",
            config=self.peft_config[adapter_name],
            kind="module" if linears else "activation",
            settings=[f"adapter {adapter_name!r}"],
            swapped=list(details),
            details=details,
            skipped={name: why for name, why in skipped.items() if name not in details},
            parameters_before=sum(
                size for name, size in sizes.items() if mine[0] not in name and ".modules_to_save." not in name
            ),
            parameters_added=sum(size for name, size in sizes.items() if mine[0] in name and name.endswith(mine[1])),
            flops_added=sum(
                layer.flops(adapter_name) for name in details if isinstance(layer := layers[name], NoraActivation)
            ),
        )

    def _described(self, layer: NoraActivation, adapter_name: str) -> str:
        settings, config = layer.rational(adapter_name), layer.configs[adapter_name]
        if isinstance(layer.original(), RationalActivation):
            what = f"its own coefficients ({settings.activation}, {settings.form})"
        else:
            what = f"{config.fit(layer.formula)}, {settings.tails} tails, anchor {settings.anchor}"
        return f"{what}, {config.groups} groups of {layer.width or '?'} channels"

    # Targets.

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """See `AdapterModel`; also print the report of a new adapter."""
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        loaded = self._targets_are_given or kwargs.get("low_cpu_mem_usage")
        if not (self.peft_config[adapter_name].inference_mode or loaded) and os.environ.get("RANK", "0") == "0":
            print(self.report(adapter_name))

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        """Fill in peft's choice of LoRA's modules for the model's type, where it has one."""
        if peft_config.lora_r and peft_config.lora_target_modules is None:
            known = self.target_module_mapping.get(model_config.get("model_type"), ALL_LINEAR)
            peft_config.lora_target_modules = known if isinstance(known, str) else set(known)
        return peft_config

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        self._survey = survey(model)
        self._linears = _lora_proxy(peft_config, model)
        super()._prepare_model(peft_config, model)

    def _check_target_module_exists(self, peft_config: Any, key: str) -> Any:  # type: ignore[override]
        everything, end = peft_config.target_modules == ALL_ACTIVATIONS, {key.rpartition(".")[2]}
        asked = _aimed(peft_config, end) if everything else peft_config
        matched = check_target_module_exists(asked, key)
        site = self._survey.sites.get(key)
        if site and not (site.skipped and everything):
            return matched
        if self._linears is not None:
            # By its end too: peft counts layers neither for expressions nor for whole names.
            in_layers = check_target_module_exists(_aimed(self._linears, end), key)
            return in_layers and check_target_module_exists(self._linears, key)
        return isinstance(matched, _ExcludedModule) and matched

    def targets(self, config: Any, model: nn.Module) -> dict[str, nn.Module]:
        """See `AdapterModel`; activations and, in NoRA++, linears."""
        seen, found = self._survey, super().targets(config, model)
        activations = found.keys() & seen.sites.keys()
        if not activations:
            raise NoTargetError(self.nothing_found(config, model))
        if config.lora_r and len(found) == len(activations):
            raise NoTargetError(f"{asked_for(config, 'lora_target_modules')} match no module")
        for wanted in config.target_modules if isinstance(config.target_modules, set) else ():
            matching = [name for name, _ in model.named_modules() if name == wanted or name.endswith(f".{wanted}")]
            if not matching:
                raise NoTargetError(f"target_modules has {wanted!r}, which matches no module; {_names(seen)}")
            other = next((name for name in matching if name not in seen.sites), None)
            if other is not None:
                why = seen.unfit.get(other) or f"is a {type(model.get_submodule(other)).__name__}, not an activation"
                raise UserError(f"{other}: {why}; {_names(seen)}")
        return found

    def nothing_found(self, config: NoraConfig, model: nn.Module) -> str:
        seen = self._survey
        if not seen.sites:
            reasons = [f"{name or 'the model'} ({why})" for name, why in (seen.unfit | seen.functional).items()]
            found = f"; found were {', '.join(reasons[:5])}" if reasons else ""
            return f"{type(model).__name__} has no activation module that a rational function can replace{found}"
        linears = {
            name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(matrix_of(each), Matrix)
        }
        asks_for_linears = isinstance(config.target_modules, set) and config.target_modules & linears
        hint = "; linears are for lora_target_modules, with lora_r (NoRA++)" if asks_for_linears else ""
        return f"{asked_for(config)} match no activation of {type(model).__name__}; {_names(seen)}{hint}"

    def check_target(self, name: str, base: nn.Module, config: NoraConfig) -> None:
        """See `AdapterModel`; also that an activation is used, and that the groups divide its width."""
        site = self._survey.sites.get(name)
        wrapped = self.model.get_submodule(name)
        if site is None:
            super().check_target(name, base, config)
            if isinstance(wrapped, AdapterLayer) and isinstance(wrapped, NoraSineLinear) != config.lora_sine:
                raise UserError(f"{name} has LoRA of an adapter with lora_sine={not config.lora_sine}; use the same")
            return
        if site.bypassed:
            raise UserError(f"{site.bypassed}, or name the activation in exclude_modules")
        if site.width is not None and site.width % config.groups:
            raise UserError(
                f"groups={config.groups} do not divide the {site.width} channels of {name}; choose groups that do "
                "(groups_pattern sets them by module), or name it in exclude_modules"
            )
        if isinstance(site.module, RationalActivation):
            own = site.module.rational_config.groups
            if config.groups % own:
                raise UserError(
                    f"{name} is rational with {own} groups already, and groups={config.groups} is no multiple of them"
                )
            if config.tuning == "constants" and site.module.rational_config.form == "sum_of_abs":
                raise UserError(f"{name} is rational in the form sum_of_abs, which has no b0; use another tuning")

    def is_own(self, layer: nn.Module) -> bool:
        return isinstance(layer, NoraActivation | NoraLoraLinear | NoraSineLinear)

    def new_layer(self, base: nn.Module) -> NoraActivation:
        return NoraActivation(base, next(site for site in self._survey.sites.values() if site.module is base))

    def _create_and_replace(  # type: ignore[override]
        self, peft_config: Any, adapter_name: str, target: Any, target_name: str, parent: Any, **kwargs: Any
    ) -> None:
        base = target.get_base_layer() if isinstance(target, AdapterLayer) else target
        if isinstance(matrix_of(base), str):
            super()._create_and_replace(peft_config, adapter_name, target, target_name, parent, **kwargs)
            return
        config = peft_config.lora_config(isinstance(base, Conv1D))
        if isinstance(target, NoraLoraLinear | NoraSineLinear):
            target.update_layer(adapter_name, config.r, config.lora_alpha, config=config)
            return
        layer_class = NoraSineLinear if peft_config.lora_sine else NoraLoraLinear
        options = {"r": config.r, "lora_alpha": config.lora_alpha, "config": config}
        layer = layer_class(target, adapter_name, quantization=get_quantization_kwargs(self.model), **options)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        replace_modules(self.model, {child: new_module})  # one may serve in several places; peft sees the first
        if isinstance(new_module, NoraActivation) and new_module.num_experts:
            tell_rows(self.model, parent)

    # Merging.

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        layers = {name: each for name, each in self.model.named_modules() if isinstance(each, NoraActivation)}
        before = {name: id(layer.original()) for name, layer in layers.items()}
        model = super()._unload_and_optionally_merge(merge, *args, **kwargs)
        entries: dict[RationalConfig, list[str]] = {}
        for name, original in before.items():
            module = model.get_submodule(name)
            if isinstance(module, RationalActivation) and id(module) != original:
                entries.setdefault(module.rational_config, []).append(name)
        # The model can be saved with them and loaded again, as an augmented one.
        for config, names in entries.items():
            for hook in after_augment:
                hook(model, {"method": config.method, "config": asdict(config), "modules": names})
        forget_rows(model)
        return model


def lora_to_nora(model: PeftModel, adapter_name: str = "default", **settings: Any) -> PeftModel:
    """Return NoRA++ that continues from the factors of a trained LoRA adapter, which is removed.

    With `anchor="exact"`, the default here, the outputs stay what they were.

    Args:
        model: a PeftModel with LoRA on linears.
        adapter_name: which adapter.
        settings: fields of `NoraConfig`, but those of LoRA.

    Raises:
        UserError: there is no such adapter, or another beside it, it is not plain LoRA of one rank on linears, or the
            settings do not fit the model; the model then has its LoRA as before.
    """
    config: Any = model.peft_config.get(adapter_name)
    if config is None:
        raise UserError(f"there is no adapter {adapter_name!r}; choose from {', '.join(model.peft_config)}")
    if len(model.peft_config) > 1:
        others = ", ".join(model.peft_config.keys() - {adapter_name})
        raise UserError(f"{others} would be lost; call delete_adapter to keep {adapter_name!r} alone")
    layers = {name: each for name, each in model.get_base_model().named_modules() if isinstance(each, LoraLayer)}
    unfit = [name for name in _NOT_PLAIN if getattr(config, name, None)]
    unfit += [name for name, layer in layers.items() if type(layer) is not lora.Linear][:1]
    unfit += ["init_lora_weights"] * (getattr(config, "init_lora_weights", True) not in _INITS)
    unfit += ["a merged adapter"] * any(layer.merged for layer in layers.values())
    if type(config) is not LoraConfig or unfit:
        raise UserError(
            f"NoRA++ takes plain LoRA of one rank on linears; {', '.join(unfit) or config.peft_type} is not"
        )
    made = NoraConfig(
        lora_r=config.r,
        lora_target_modules=list(layers),
        **{name: getattr(config, name) for name in ("lora_alpha", "lora_dropout", "task_type", "modules_to_save")},
        **{"anchor": "exact", "bias": config.bias, "trainable_token_indices": config.trainable_token_indices}
        | settings,
    )
    trained = get_peft_model_state_dict(model, adapter_name=adapter_name)
    base: Any = model.unload()
    try:
        tuned = get_peft_model(base, made)
    except UserError:
        model.base_model.inject_adapter(base, adapter_name)  # type: ignore[operator]
        set_peft_model_state_dict(model, trained, adapter_name=adapter_name)
        raise
    set_peft_model_state_dict(tuned, get_peft_model_state_dict(tuned) | trained)
    return tuned


def _aimed(config: NoraConfig, targets: Any) -> Any:
    """Return a config with other targets, for peft's matching."""
    config = copy.copy(config)
    config.target_modules = targets
    return config


def _lora_proxy(config: NoraConfig, model: nn.Module) -> Any:
    if not config.lora_r:
        return None
    proxy: Any = _maybe_include_all_linear_layers(_aimed(config, config.lora_target_modules), model)
    if config.lora_target_modules == ALL_LINEAR:
        proxy.target_modules = set(proxy.target_modules) - output_head_names(model).keys()
    return proxy


def _names(seen: Survey) -> str:
    names = {name.rpartition(".")[2] for name in seen.sites}
    return f"the model's activations are called {', '.join(sorted(names))}" if names else "the model has no activations"
