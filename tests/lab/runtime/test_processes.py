"""The largest of several processes' values, which all of them learn."""

import torch.distributed as dist

from nlr_lab.runtime.processes import largest
from processes_helpers import run_processes

SCRIPT = """
import sys
import torch.distributed as dist
from nlr_lab.runtime.processes import largest

dist.init_process_group("gloo")
if sys.argv[1] == "other":  # as where the default group exchanges tensors of GPUs alone
    dist.get_backend = lambda *_: "nccl"
made, new_group = [], dist.new_group
dist.new_group = lambda **options: made.append(options) or new_group(**options)
for step in range(3):
    rank = dist.get_rank()
    assert largest(rank == 0, 15 * rank + step) == [1, 15 + step]
assert made == ([{"backend": "gloo", "timeout": None}] if sys.argv[1] == "other" else [])
dist.destroy_process_group()
"""


def test_the_largest_values_of_all_processes_are_known_to_all():
    assert not dist.is_initialized()
    assert largest(False, 15) == [0, 15]
    for group in ("default", "other"):
        run_processes(SCRIPT, group)
