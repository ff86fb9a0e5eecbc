"""`nlr verify CHECKPOINT`: hashes, headers, numbers and JSON of everything in a folder."""

from dataclasses import dataclass

from tyro.conf import Positional

from nonlinear_lowrank.errors import UserError

from .options import parse


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Check a checkpoint: every hash of its manifest, headers of safetensors, NaN and infinite values, JSON files.
    Reads everything and changes nothing."""

    checkpoint: Positional[str]
    """A checkpoint, a run or comparison folder, a model or adapter, or one .safetensors or .json file."""


def run(arguments: list[str]) -> None:
    """Print a line for each fault and one of totals; faults end it with exit code 2."""
    options = parse(VerifyOptions, arguments, command="verify")

    from nonlinear_lowrank.hub.verify import verify

    found = verify(options.checkpoint)
    print(found)
    if found.faults:
        raise UserError(f"{options.checkpoint} is not whole: {len(found.faults):,} at fault; restore it from a copy")
