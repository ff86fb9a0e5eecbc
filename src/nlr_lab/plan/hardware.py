"""Facts of a GPU for plans, from NVIDIA's data sheets (dense rates, without sparsity)."""

from dataclasses import dataclass

from nonlinear_lowrank.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU, and what connects it to others."""

    name: str
    memory: float
    """GiB."""
    bf16: float
    """Matrix products in bfloat16 with float32 sums, FLOP/s."""
    float32: float
    """The same in float32 (no TF32, which PyTorch does not use unless told to), FLOP/s."""
    bandwidth: float
    """Bytes/s of the memory."""
    link: float
    """To the other GPUs of a node, bytes/s in each direction."""
    network: float
    """To other nodes, bytes/s in each direction, for each GPU."""
    node: int = 8
    """GPUs of a node."""

    def rate(self, bf16: bool) -> float:
        """Return the FLOP/s of matrix products."""
        return self.bf16 if bf16 else self.float32


HARDWARE = {
    each.name: each
    for each in (
        Hardware(name="a100", memory=80, bf16=312e12, float32=19.5e12, bandwidth=2.04e12, link=300e9, network=25e9),
        Hardware(name="h100", memory=80, bf16=989e12, float32=67e12, bandwidth=3.35e12, link=450e9, network=50e9),
        Hardware(name="h200", memory=141, bf16=989e12, float32=67e12, bandwidth=4.8e12, link=450e9, network=50e9),
        Hardware(name="b200", memory=180, bf16=2250e12, float32=75e12, bandwidth=7.7e12, link=900e9, network=50e9),
        Hardware(name="rtx4090", memory=24, bf16=165e12, float32=82.6e12, bandwidth=1.01e12, link=32e9, network=3.1e9),
    )
}


def find_hardware(name: str) -> Hardware:
    """Return a GPU of the table by its name, however it is written.

    Raises:
        UserError: it is not in the table.
    """
    plain = name.lower().replace(" ", "").replace("-", "")
    if plain not in HARDWARE:
        raise UserError(f"unknown hardware {name!r}; there are {', '.join(HARDWARE)}")
    return HARDWARE[plain]
