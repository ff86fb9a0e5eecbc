"""Training with torchtitan: branches in its configs, multipliers in its optimizer, export to Hugging Face and back.

    # my_job.py; torchrun ... -m torchtitan.train --module my_job --config llama3_noble
    def llama3_noble():
        return augment(llama3_debugmodel(), nlr.NobleConfig(rank=64))

It uses torchtitan's own extension points, and replaces nothing at run time:

| torchtitan's           | ours                   | does                                                          |
|------------------------|------------------------|---------------------------------------------------------------|
| `ModelConfigConverter` | `AugmentConverter`     | swaps configs of linears before a model is built and sharded  |
| `Module.init_states`   | `TitanNobleLinear` ... | the layers' own init, after a build on the meta device        |
| `ParamGroupConfig`     | `optimizer_config`     | a group for each multiplier of `nlr.param_groups`, by pattern |
| `BaseStateDictAdapter` | `state_dict_adapter`   | branch tensors beside the weights, rows permuted as theirs    |

torchtitan's fused query, key and value projection is three linears here (`QKVLinear`, in the same checkpoint format),
as it is in the Hugging Face model and in the paper: each has a branch, and a learning rate, of its own.
"""

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import require

VERSION = "0.3.0"
"""The only version of torchtitan that this supports and was tested with; its interfaces change."""

if (_found := require("torchtitan", "torchtitan").__version__) != VERSION:
    raise UserError(f"torchtitan {_found} is not the tested one: pip install torchtitan=={VERSION}")
require("torchtitan", "torchtitan.models.llama3.model")  # fails where torch brings no triton

from .hugging_face import export, hf_config, read_checkpoint, read_hf, state_dict_adapter  # noqa: E402
from .job import AugmentConverter, augment, optimizer_config  # noqa: E402

__all__ = [
    "AugmentConverter",
    "augment",
    "export",
    "hf_config",
    "optimizer_config",
    "read_checkpoint",
    "read_hf",
    "state_dict_adapter",
]
