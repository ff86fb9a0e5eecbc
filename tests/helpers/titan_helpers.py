"""Tiny models and jobs of torchtitan, and its trainer on the CPU, for tests and for processes that tests start."""

import contextlib
import gc
import os
import sys
import types
import warnings
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch.jit and others, at import
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.fsdp as fsdp
    import torchtitan.distributed.utils as distributed_utils
    import torchtitan.tools.utils as device_utils
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.llama3 import Llama3Model, parallelize_llama
    from torchtitan.models.llama3.model import Llama3TransformerBlock
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
    from torchtitan.models.qwen3.model import Qwen3TransformerBlock
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

WIDTH, HIDDEN, HEADS, KEYS, LAYERS, VOCABULARY, LENGTH = 32, 48, 4, 2, 2, 64, 32

_NORMAL = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
_ONES = {"weight": nn.init.ones_}


def _norm(width):
    return RMSNorm.Config(normalized_shape=width, param_init=_ONES)


def _layer(block, rope, width, hidden, **more):
    attention = make_gqa_config(
        dim=width, n_heads=HEADS, n_kv_heads=KEYS, head_dim=width // HEADS, wqkv_param_init=_NORMAL,
        wo_param_init=_NORMAL, inner_attention=ScaledDotProductAttention.Config(), rope=rope, fuse_qkv=True, **more,
    )  # fmt: skip
    feed_forward = make_ffn_config(dim=width, hidden_dim=hidden, w1_param_init=_NORMAL, w2w3_param_init=_NORMAL)
    return block.Config(
        attention=attention, feed_forward=feed_forward, attention_norm=_norm(width), ffn_norm=_norm(width)
    )


def llama(*, tied=False, width=WIDTH, hidden=HIDDEN):
    """A Llama 3 as torchtitan's registry builds them: queries, keys and values fused, scaled rotary embedding."""
    rope = ComplexRoPE.Config(dim=width // HEADS, max_seq_len=64, theta=10000, scaling="llama")
    layers = [_layer(Llama3TransformerBlock, rope, width, hidden) for _ in range(LAYERS)]
    model = Llama3Model.Config(layers=layers, **_ends(width, tied))
    return _spec("llama3", model, parallelize_llama, Llama3StateDictAdapter)


def qwen():
    """Another family: norms of queries and keys, and rows as in the Hugging Face model."""
    rope, norm = CosSinRoPE.Config(dim=WIDTH // HEADS, max_seq_len=64, theta=10000), _norm(WIDTH // HEADS)
    layers = [_layer(Qwen3TransformerBlock, rope, WIDTH, HIDDEN, qk_norm=norm) for _ in range(LAYERS)]
    return _spec(
        "qwen3", Qwen3Model.Config(layers=layers, **_ends(WIDTH, False)), parallelize_qwen3, Qwen3StateDictAdapter
    )


def _spec(name, model, parallelize, adapter):
    functions = {"parallelize_fn": parallelize, "pipelining_fn": pipeline_llm, "post_optimizer_build_fn": None}
    return ModelSpec(name=name, flavor="tiny", model=model, state_dict_adapter=adapter, **functions)


def _ends(width, tied):
    first = {"weight": skip_param_init} if tied else {"weight": partial(nn.init.normal_, std=1.0)}
    return {
        "dim": width,
        "vocab_size": VOCABULARY,
        "enable_weight_tying": tied,
        "tok_embeddings": Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=width, param_init=first),
        "norm": _norm(width),
        "lm_head": Linear.Config(in_features=width, out_features=VOCABULARY, param_init=_NORMAL),
    }


def built(spec, dtype=torch.float32):
    """Build a model as the trainer does: on the meta device, then memory that nobody has written, then the init."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = spec.model.build()
        model.verify_module_protocol()
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights()
    finally:
        torch.set_default_dtype(before)
    return model


class Counting(BaseDataLoader):
    """Sequences that count up by three from a random start: easily learned."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **others):
        self.ranks, self.rank, self.length, self.batch = dp_world_size, dp_rank, seq_len, local_batch_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            start = torch.randint(VOCABULARY, (self.batch * self.ranks, 1), generator=generator)
            tokens = ((start + 3 * torch.arange(self.length + 1)) % VOCABULARY)[self.rank :: self.ranks]
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class NoTokenizer(BaseTokenizer):
    """The batches are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **others):
        pass

    def encode(self, *args, **kwargs):
        raise NotImplementedError

    decode = get_vocab_size = encode


def job(spec, folder, *, steps=12, batch=8, lr=3e-3, precision="float32", backend="spmd_types", **checkpoint):
    """A trainer config; `checkpoint` is for its CheckpointManager."""
    sizes = {"local_batch_size": batch, "seq_len": LENGTH, "steps": steps}
    return Trainer.Config(
        model_spec=spec,
        dump_folder=str(folder),
        hf_assets_path=str(folder),
        optimizer=default_adamw(lr=lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(**sizes, disable_cuda_graphs=True, mixed_precision_param=precision),
        parallelism=ParallelismConfig(spmd_backend=backend),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        metrics=MetricsProcessor.Config(log_freq=1),
        dataloader=Counting.Config(),
        tokenizer=NoTokenizer.Config(),
        checkpoint=CheckpointManager.Config(**{"enable": bool(checkpoint), "interval": steps, **checkpoint}),
    )


def _sum_gradients(model):
    """torchtitan's, by a plain sum: gloo knows no scaled one."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@contextlib.contextmanager
def on_the_cpu():
    """torchtitan's trainer knows accelerators only; this tells it of the CPU, and puts all back that it changes."""
    stats = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    monitor = types.SimpleNamespace(device_name="cpu", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    device = {"device_type": "cpu", "device_module": torch.cpu}
    modules = [each for name, each in list(sys.modules.items()) if name.startswith("torchtitan")]
    changed = [
        (device_utils, "get_peak_flops", lambda name: 1e12),
        (metrics, "build_device_memory_monitor", lambda: monitor),
        (fsdp, "disable_fsdp_gradient_division", _sum_gradients),
        (distributed_utils, "set_pg_timeouts", lambda *args, **kwargs: None),
        *((each, name, value) for each in modules for name, value in device.items() if name in vars(each)),
    ]
    before = [(where, name, getattr(where, name)) for where, name, _ in changed]
    backend = distributed_utils.get_spmd_backend()
    environment = dict(os.environ)
    try:
        for where, name, value in changed:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        distributed_utils.set_spmd_backend(backend)
        gc.enable()


def trained(config):
    """The trainer after its last step, and the loss of each step."""
    losses = []
    trainer = config.build()
    log = trainer.metrics_processor.log

    def record(step, loss, *args, **kwargs):
        losses.append(loss)
        return log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = record
    trainer.train()
    trainer.close()
    return trainer, losses


def whole_state(trainer):
    """The model's tensors, gathered."""
    state = trainer.model_parts[0].state_dict()
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}
