"""`nlr finetune RECIPE`: a pretrained model tuned by one arm of a recipe, to an adapter folder of peft's.

`nlr finetune --from RUN` does a run again.
"""

from dataclasses import dataclass
from pathlib import Path

from nlr_lab.runtime.processes import rank
from nonlinear_lowrank.errors import UserError

from .run_options import RunOptions, Task, Train, parse_run, run_recipe


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RunOptions[Task, Train]):
    """Options of `nlr finetune`; the recipe's own settings are the nested ones."""

    arm: str
    """Way of tuning: full, head, lora:r=4, dora:r=4, peanut:r=4, sine-lora:r=4,omega=200, sine-dora:r=4,omega=200,
    nora:r=2,groups=8, nora++:r=2,lora_r=8, noble-adapter:r=16; low-rank ones may add plus=16 (LoRA+), and all of
    them lr=3e-4 and target_modules=q_proj/v_proj."""


def run(arguments: list[str]) -> None:
    """Tune; print the score, where the adapter is and how it is loaded."""
    recipe, options, former = parse_run(FinetuneOptions, arguments, "finetune")

    from nlr_lab.training.tuning import TUNINGS
    from nonlinear_lowrank.hub.usage import loading_code

    arm = recipe.arm
    if arm.grid:
        raise UserError(
            f"grid= is for nlr compare, which tries several learning rates; give the arm one: {arm.method}:lr=1e-4"
        )
    if arm.method == "baseline":
        ways = ", ".join(each.name for each in TUNINGS)
        raise UserError(f"baseline changes nothing; say how the model is tuned: {ways}")
    result = run_recipe(recipe, options)
    if rank() != 0:
        return
    total, trained = result.parameters, result.trainable or result.parameters
    print(
        f"{arm.name}: {trained:,} of {total:,} parameters trained ({100 * trained / total:.2f} %), {result.steps} steps"
    )
    scores = "   ".join(f"{key} {value:.4f}" for key, value in result.scores.items())
    print(f"last step: {scores}")
    if result.metric != "loss" and result.best_step != result.steps:
        print(f"best held-out {result.metric} at step {result.best_step}: {result.metric} {result.best_score:.4f}")
    if former is not None:
        print(former.verdict(result, Path(options.out)))
    model = Path(options.out) / "model"
    print(f"{model}\nto load it:\n{loading_code(model)}")
