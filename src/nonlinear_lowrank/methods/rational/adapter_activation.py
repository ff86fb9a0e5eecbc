"""NoRA's layer: an activation as a rational function whose coefficients get a shift (nora.txt, section 3).

Init and learning-rate table, for G groups and degrees (m, n). With tuning="low_rank" the shift touches a1 ... am
and b1 ... bn, as many coefficients as the degree says: G ((m + 1) r + (n + 1) r) numbers a layer.

| tensor                 | shape     | tuning                 | init             | lr x | decay |
|------------------------|-----------|------------------------|------------------|------|-------|
| nlr_nora_numerator_a   | (G, m, r) | low_rank               | N(0, 0.02^2)     | 1    | yes   |
| nlr_nora_numerator_b   | (G, r)    | low_rank               | 0                | 1    | yes   |
| nlr_nora_denominator_a | (G, n, r) | low_rank               | N(0, 0.02^2)     | 1    | yes   |
| nlr_nora_denominator_b | (G, r)    | low_rank               | 0                | 1    | yes   |
| nlr_nora_numerator     | (G, m+1)  | zero_init              | 0, a shift       | 1    | yes   |
|                        | (G, m+1)  | rational, gelu_init    | the coefficients | 1    | no    |
|                        | (G, 1)    | constants              | 0, a shift of a0 | 1    | yes   |
| nlr_nora_denominator   | likewise  |                        |                  |      |       |

All are float32, also in a model that is cast to a 16-bit type.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from nonlinear_lowrank.adapters.base import AdapterLayer
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Role

from .adapter_config import NoraConfig
from .fit import check_range, fit_rational
from .layer import RationalActivation, RationalConfig
from .sites import Site

_SIDES = ("numerator", "denominator")
_RANDOM = 0.3  # of init_weights=False, see `reset_adapter`


class NoraActivation(AdapterLayer):
    """An activation with shifted rational functions in its place: any shape -> the same.

    Args:
        base_layer: the activation, or a `RationalActivation`, whose own coefficients are then theta.
        site: where it stands in the model.
    """

    adapter_layer_names = (
        *("nlr_nora_numerator_a", "nlr_nora_numerator_b", "nlr_nora_numerator"),
        *("nlr_nora_denominator_a", "nlr_nora_denominator_b", "nlr_nora_denominator"),
    )

    def __init__(self, base_layer: nn.Module, site: Site) -> None:
        super().__init__(base_layer)
        self.formula, self.width, self.channel_dim = site.formula, site.width, site.channel_dim
        # Not submodules: a neighbour that tells the device, and the plain activation while another is merged in.
        self._neighbour = (site.neighbour,)
        self._original: tuple[nn.Module, ...] = ()
        self._theta: dict[str, tuple[Tensor, Tensor]] = {}
        self._settings: dict[str, RationalConfig] = {}

    def original(self) -> nn.Module:
        """As in `AdapterLayer`, also while adapters are merged into it."""
        return self._original[0] if self._original else self.base_layer

    # An adapter's tensors.

    def update_layer(self, name: str, config: Any) -> None:
        """As in `AdapterLayer`; also keeps the rational function that the adapter shifts, and its fit."""
        plain = self.original()
        if isinstance(plain, RationalActivation):
            self._settings[name] = plain.rational_config
        else:
            self._settings[name] = config.rational(self.formula, self.channel_dim)
            fit = config.fit(self.formula)
            device, _ = self._get_base_layer_device_and_dtype(None)
            # Not buffers: they are the config's, and must survive construction on the meta device.
            self._theta[name] = tuple(  # type: ignore[assignment]
                torch.tensor([values], dtype=torch.float32, device="cpu" if device.type == "meta" else device)
                for values in (fit.numerator, fit.denominator)
            )
        super().update_layer(name, config)

    def rational(self, name: str) -> RationalConfig:
        """The rational function that an adapter shifts, as a config."""
        return self._settings[name]

    def add_parameters(self, name: str, config: NoraConfig) -> None:
        """Undrawn tensors of this file's table."""
        groups = config.groups
        for side, theta in zip(_SIDES, self.theta(name), strict=True):
            if not _is_tuned(config, side):
                continue
            if config.tuning == "low_rank":
                shifted = theta.shape[1] - self._first(name, side)
                self._dict(side, "_a")[name] = self.parameter(groups, shifted, config.r)
                self._dict(side, "_b")[name] = self.parameter(groups, config.r)
            else:
                terms = 1 if config.tuning == "constants" else theta.shape[1]
                self._dict(side)[name] = self.parameter(groups, terms)

    def reset_adapter(self, name: str) -> None:
        """Draws the table; with init_weights=False a shift of coefficient k of about 0.3 / L^k, L the end of the fit's
        range: no term then moves the function by more than that inside it."""
        config: NoraConfig = self.configs[name]
        for side in _SIDES:
            if not _is_tuned(config, side):
                continue
            if config.tuning == "low_rank":
                a = nn.init.normal_(self._dict(side, "_a")[name], std=config.init_std)
                std = 0.0 if config.init_weights else _RANDOM / (config.init_std * config.r**0.5)
                nn.init.normal_(self._dict(side, "_b")[name], std=std)
                if not config.init_weights:
                    a.mul_(self._falling(name, a.shape[1], 1)[:, None].to(a.device))
                continue
            tensor = self._dict(side)[name]
            nn.init.normal_(tensor, std=0.0 if config.init_weights else _RANDOM)
            if not config.init_weights:
                tensor.mul_(self._falling(name, tensor.shape[1], 0).to(tensor.device))
            if config.tuning in ("rational", "gelu_init") and not tensor.is_meta:
                start = self._start(name, _SIDES.index(side)).to(tensor.device)
                tensor.add_(start.repeat_interleave(config.groups // start.shape[0], 0))

    def _falling(self, name: str, count: int, first: int) -> Tensor:
        """L^-k for k = first, first + 1, ...: (count)."""
        limit = max(map(abs, check_range(self.configs[name].fit_range)))
        return limit ** -torch.arange(first, first + count, dtype=torch.float32)

    def _start(self, name: str, side: int) -> Tensor:
        """What the coefficients start from where they are trained themselves."""
        if self.configs[name].tuning == "rational":
            return self.theta(name)[side]
        settings = self.rational(name)
        fit = fit_rational("gelu", form=settings.form, degrees=settings.degrees, fit_range=settings.fit_range)
        return torch.tensor([(fit.numerator, fit.denominator)[side]], dtype=torch.float32)

    def _dict(self, side: str, factor: str = "") -> nn.ParameterDict:
        return getattr(self, f"nlr_nora_{side}{factor}")

    def _first(self, name: str, side: str) -> int:
        """The first coefficient that a low-rank shift touches: constants it leaves alone."""
        return 1 if side == "numerator" or self.rational(name).form == "abs_of_sum" else 0

    def theta(self, name: str) -> tuple[Tensor, Tensor]:
        """Coefficients that an adapter shifts: (1 or the base's groups, .) each, float32."""
        plain = self.original()
        if isinstance(plain, RationalActivation):
            return plain.rational_numerator.detach(), plain.rational_denominator.detach()
        return self._theta[name]

    def roles(self, name: str) -> Mapping[str, Role]:
        """This file's table."""
        config: NoraConfig = self.configs[name]
        roles = {}
        for side in _SIDES:
            if config.tuning == "low_rank":
                roles[f"nlr_nora_{side}_a"] = Role("nora.a")
                roles[f"nlr_nora_{side}_b"] = Role("nora.b")
            else:
                decays = config.tuning in ("zero_init", "constants")
                roles[f"nlr_nora_{side}"] = Role("nora.shift" if decays else "nora.coefficients", decay=decays)
        return roles

    # The function.

    def coefficients(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Numerator and denominator with the shifts of these adapters, (G, .), float32 or wider.

        Raises:
            UserError: the adapters shift different rational functions.
        """
        settings = [self.rational(name) for name in names]
        for name, other in zip(names[1:], settings[1:], strict=True):
            if replace(other, groups=1) != replace(settings[0], groups=1):
                raise UserError(
                    f"the adapters {names[0]!r} and {name!r} shift different rational functions (form, degrees, "
                    "fit_range, tails or anchor) and cannot be active together; activate one at a time"
                )
        groups = math.lcm(*(self.configs[name].groups for name in names))
        found = []
        for index, side in enumerate(_SIDES):
            theta = self.theta(names[0])[index]
            total = theta.repeat_interleave(groups // theta.shape[0], 0)
            for name in names:
                shift = self._shift(name, side, index)
                if shift is not None:
                    total = total.to(shift.device) + shift.repeat_interleave(groups // shift.shape[0], 0)
            found.append(total)
        return found[0], found[1]

    def _shift(self, name: str, side: str, index: int) -> Tensor | None:
        """(groups, .): what an adapter adds to theta; None: nothing."""
        config: NoraConfig = self.configs[name]
        if not _is_tuned(config, side):
            return None
        theta = self.theta(name)[index]
        if config.tuning == "low_rank":
            a, b = self._dict(side, "_a")[name], self._dict(side, "_b")[name]
            # Written out: a matrix product would be rounded to 16 bits under autocast.
            shift = (a.to(_wide(a)) * b.to(_wide(b))[:, None, :]).sum(-1)
            return nn.functional.pad(shift, (self._first(name, side), 0))
        values = self._dict(side)[name].to(_wide(self._dict(side)[name]))
        if config.tuning == "constants":
            return nn.functional.pad(values, (0, theta.shape[1] - 1))
        if config.tuning == "zero_init":
            return values
        return values - theta.to(values.device).repeat_interleave(config.groups // theta.shape[0], 0)

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        """As in `AdapterLayer`; keeps x and the coefficients for backward."""
        settings = self.rational(names[0])
        if self.width is not None and x.shape[settings.dim] != self.width and self.width in x.shape[1:]:
            raise UserError(
                f"the activation behind {type(self._neighbour[0]).__name__} has {self.width} channels and is given "
                f"{tuple(x.shape)}, with them in an unexpected place; leave it out with exclude_modules"
            )
        numerator, denominator = (each.to(x.device) for each in self.coefficients(names))
        base = self._anchor(names[0])
        if base is not None:
            base = base[0].to(x.device), base[1].to(x.device)
        return settings.evaluate(x, numerator, denominator, base)

    def _anchor(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Coefficients that anchor="exact" subtracts again."""
        plain = self.original()
        if isinstance(plain, RationalActivation):
            return plain.base_coefficients()
        return self.theta(name) if self.rational(name).anchor == "exact" else None

    # Merging.

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Puts a rational activation with the shifts of adapters in its coefficients in the activation's place.

        Args:
            safe_merge: check first that the coefficients are finite.
            adapter_names: which; None takes the active ones. They join those that are merged already.

        Raises:
            UserError: not finite, or adapters that shift different functions. Nothing is changed then.
        """
        names = self.present(check_adapters_to_merge(self, adapter_names))
        if not names:
            return
        merged = self._merged(names, check=safe_merge)
        if not self._original:
            self._original = (self.base_layer,)
        self.base_layer = merged
        self.merged_adapters = [*self.merged_adapters, *names]

    @torch.no_grad()
    def check_merge(self, adapter_names: list[str] | None) -> None:
        """As in `AdapterLayer`."""
        wanted = self.active_adapters if adapter_names is None else adapter_names
        names = [name for name in self.present(wanted) if name not in self.merged_adapters]
        if names:
            self._merged(names, check=True)

    def _merged(self, names: Sequence[str], check: bool) -> RationalActivation:
        together = sorted({*self.merged_adapters, *names})
        values = self.coefficients(together)
        if check and not all(each.isfinite().all() for each in values):
            raise UserError(
                f"merging {', '.join(map(repr, names))} would give coefficients that are not finite (NaN or "
                "infinite): the adapter is broken; nothing was merged"
            )
        settings = replace(self.rational(together[0]), groups=len(values[0]))
        layer = RationalActivation(settings, device=values[0].device).train(self.training)
        for side, tensor, base in zip(_SIDES, values, self._anchor(together[0]) or (None, None), strict=True):
            getattr(layer, f"rational_{side}").data = tensor.detach().clone()
            if base is not None:
                setattr(layer, f"rational_base_{side}", base.to(tensor.device, copy=True))
        return layer.requires_grad_(False)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Puts the activation back as it was; does nothing where nothing is merged."""
        if self._original:
            self.base_layer = self._original[0]
        self._original, self.merged_adapters = (), []

    @torch.no_grad()
    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """The activation, with the adapters in it or as it was; peft calls it.

        Args:
            merge: whether the adapters go in.
            safe_merge: as in `merge`.
            adapter_names: as in `merge`.
        """
        if merge:
            self.merge(safe_merge, adapter_names)
        else:
            self.unmerge()
        return self.base_layer

    # Devices: an activation has no weight to tell its own.

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[torch.device, torch.dtype]:
        weight = getattr(self._neighbour[0], "weight", None)
        device = weight.device if isinstance(weight, Tensor) else torch.get_default_device()
        return device, torch.float32

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        own = [(getattr(self, tensors), name) for tensors in self.adapter_layer_names for name in self.configs]
        before = [(tensors, name, tensors[name].detach()) for tensors, name in own if name in tensors]
        super()._apply(fn, recurse)
        for tensors, name, old in before:
            # A coefficient that is rounded to 16 bits moves R by more than the error of a fit.
            if tensors[name].dtype in (torch.bfloat16, torch.float16) and old.dtype == torch.float32:
                tensors[name].data = old.to(tensors[name].device)
        for name, tensors in self._theta.items():
            moved = fn(tensors[0]).device
            if moved.type != "meta":
                self._theta[name] = tensors[0].to(moved), tensors[1].to(moved)
        for kept in self._original:
            kept._apply(fn, recurse)
        return self


def _is_tuned(config: NoraConfig, side: str) -> bool:
    other = config.denominator_only if side == "numerator" else config.numerator_only
    return not other


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
