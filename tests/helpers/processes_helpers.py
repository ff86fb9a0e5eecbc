"""Start a script in several processes that form one group (gloo, on this machine)."""

import os
import socket
import subprocess
import sys


def run_processes(script, *arguments, count=2, timeout=300):
    """Run `script` (Python source) `count` times as torchrun would; fail with the output of the first that fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    common |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = []
    try:
        for rank in range(count):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], **options))
        for process in processes:
            output, _ = process.communicate(timeout=timeout)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def shard_on_cpus():
    """accelerate shards on accelerators only; gloo and the CPU do for a test."""
    from accelerate.state import DistributedType, PartialState

    original = PartialState.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init


def fsdp_environment(layer):
    """Return what `accelerate launch --use_fsdp --fsdp_version 2` sets; `layer` is the class that is wrapped."""
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": layer,
    }
