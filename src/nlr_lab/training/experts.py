"""The plain model with experts in place of its MLPs."""

from typing import Any

import torch
from torch import nn

from nlr_lab.tasks.text.language_model import DenseInit, build_plain, draw_matrix
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.experts import projections
from nonlinear_lowrank.validation import check_choice, check_integer, check_number

from .methods import Settings, Setup, Sized, mlp_width

_ALIGNED = 8  # torch's grouped products need rows of whole 16 bytes, which are 8 numbers in bfloat16
_BLOCKS = ("glm", "llama", "mistral")  # model types whose blocks are Mixtral's except for the MLP


class Experts(Sized):
    """Every MLP becomes `experts` of them, of which a router gives each token `active`: transformers' Mixtral.

        moe:hidden=176                            8 experts of width 176, 2 a token
        moe:match=noble-r64                       the narrowest experts with at least that arm's FLOPs per token
        moe:match=noble-r64,by=parameters         the same by all parameters, those of idle experts too
        moe:match=noble-r64,experts=16,active=1,aux_loss=0.02

    Embeddings, attention, norms and head keep their draws. Experts are drawn with the init that the arm's other linears
    have, the router always with N(0, 0.02^2). While it trains, `aux_loss` times the load-balancing loss is added
    (transformers' `load_balancing_loss_func`, over all layers together: `active` where the load is even); evaluation
    losses are without it. The default is that of Switch Transformers (arXiv 2101.03961, section 2.2). Widths are
    multiples of 8. Known are GLM, Llama and Mistral; a GLM's queries and keys turn in neighboring pairs and Mixtral's
    in halves, which is the same model with rows in another order.
    """

    name = "moe"
    stage = -1
    by = "flops"
    of_width = "experts"

    def read(self, settings: Settings) -> dict[str, Any]:
        known = ("hidden", "match", "by", "experts", "active", "aux_loss")
        self.check_known(settings, known)
        if not settings.keys() & {"hidden", "match"} or ("by" in settings and "match" not in settings):
            raise UserError(
                f"{self.name} needs the width of an expert, or an arm to match: {self.name}:hidden=176 or "
                f"{self.name}:match=noble-r64 (with by=parameters)"
            )
        if "hidden" in settings:
            check_integer("hidden", settings["hidden"], minimum=1)
            if settings["hidden"] % _ALIGNED:
                raise UserError(f"hidden of {self.name} must be a multiple of {_ALIGNED}, got {settings['hidden']}")
        if not isinstance(settings.get("match", ""), str):
            raise UserError(f"match must be the name of another arm, got {settings['match']!r}")
        check_choice("by", settings.get("by", self.by), ("parameters", "flops"))
        count, active = settings.get("experts", 8), settings.get("active", 2)
        check_integer("experts", count, minimum=2)
        check_integer("active", active, minimum=1)
        if active > count:
            raise UserError(f"active must not exceed experts, got {active} of {count}")
        check_number("aux_loss", settings.get("aux_loss", 0.01), minimum=0)
        return dict(settings)

    def label(self, settings: Settings) -> list[str]:
        parts = [f"{self.name}-{settings.get('active', 2)}of{settings.get('experts', 8)}"]
        parts += ["as", settings["match"]] if "match" in settings else [f"h{settings['hidden']}"]
        parts += ["parameters"] if settings.get("by") == "parameters" else []
        return parts + ([f"aux{settings['aux_loss']}"] if "aux_loss" in settings else [])

    def width(self, model: nn.Module) -> int:
        """Return a width of experts from which a match is looked for: the active ones are as wide as the MLP."""
        return -(-mlp_width(model) // _ALIGNED) * _ALIGNED

    @torch.no_grad()
    def apply(self, model: nn.Module, settings: Settings, setup: Setup, init: DenseInit, verbose: bool) -> nn.Module:
        self.check(settings, setup)
        from transformers import MixtralConfig

        plain: Any = getattr(model, "config", None)
        rotary = getattr(plain, "rope_parameters", None) or {}
        model_type, head = getattr(plain, "model_type", ""), getattr(model, "lm_head", None)
        if model_type not in _BLOCKS or head is None or rotary.get("partial_rotary_factor", 1) != 1:
            raise UserError(
                f"{self.name} does not know the blocks of {type(model).__name__}; it knows language models of "
                "GLM (all of a head rotary), Llama and Mistral"
            )
        known = {name: getattr(plain, name) for name in MixtralConfig.__annotations__ if hasattr(plain, name)}
        known |= {"intermediate_size": settings["hidden"], "num_local_experts": settings.get("experts", 8)}
        known |= {"num_experts_per_tok": settings.get("active", 2), "output_router_logits": True}
        config = MixtralConfig(**known, router_aux_loss_coef=float(settings.get("aux_loss", 0.01)))
        seed = int(torch.randint(2**62, ()))  # not the run's own, from which transformers drew the plain model
        with torch.device(head.weight.device):
            new = build_plain("MixtralForCausalLM", config, seed)
        missing, surplus = new.to(head.weight.dtype).load_state_dict(model.state_dict(), strict=False)
        if lost := [name for name in (*missing, *surplus) if ".mlp." not in name]:
            raise UserError(f"{self.name} does not know {lost[0]} of this {type(model).__name__}; omit biases")
        for experts in new.modules():
            for each in projections(experts) if not head.weight.is_meta else ():
                for weight in experts.get_parameter(each.name):
                    draw_matrix(weight, init)
        if verbose:
            sizes = f"{config.num_local_experts} experts of width {config.intermediate_size}"
            print(f"{self.name}: {config.num_hidden_layers} MLPs of {sizes}, {config.num_experts_per_tok} a token")
        return new.train(model.training)  # type: ignore[no-any-return]
