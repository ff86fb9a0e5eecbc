"""When a forward must be a single op to what watches it."""

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def as_one_op() -> bool:
    """Whether torch.compile or selective activation checkpointing is watching.

    The compiler would undo what is kept for backward. Selective checkpointing keeps the outputs of products, and
    refuses those that were changed in place afterwards, as a lean forward does.
    """
    if torch.compiler.is_compiling():
        return True
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack())
