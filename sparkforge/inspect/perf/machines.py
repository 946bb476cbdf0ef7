"""Figures of GPUs for the model of the decode kernels, as data. Assumptions are marked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A GPU."""

    name: str
    arch: str
    """Of its machine code, e.g. ``121a``."""
    multiprocessors: int
    """SMs; each has four schedulers that begin one instruction of a warp a cycle."""
    clock_ghz: float
    """Under load."""
    memory_gb_s: float
    """Bandwidth of reads."""
    latency_us: float | None
    """Of a read from memory, while others run; None: unknown."""
    warps: int
    blocks: int
    registers: int
    shared: int
    """``warps``, ``blocks``, ``registers``, ``shared``: limits of one SM; shared memory in bytes.
    """
    matrix: float
    """Cycles of a scheduler for one HMMA.16816 with float32 sums."""
    integer: float
    multiply: float
    float32: float
    """``integer``, ``multiply``, ``float32``: cycles for one instruction of a warp: logic, shifts
    and integer sums; IMAD; float32 and BF16 pairs."""
    loaded: int
    """Bytes a cycle from the second cache to an SM."""
    from_shared: int
    """Bytes a cycle from shared memory."""
    notes: tuple[str, ...]
    """Sources of these figures."""

    @property
    def issue(self) -> float:
        """Instructions of warps a second."""
        return self.multiprocessors * SCHEDULERS * self.clock_ghz * 1e9

    @property
    def needed(self) -> float | None:
        """Bytes that an SM needs in flight for the full bandwidth; None: unknown."""
        if self.latency_us is None:
            return None
        return self.memory_gb_s * 1e3 * self.latency_us / self.multiprocessors


SCHEDULERS = 4
"""Schedulers of an SM; each has a share of the matrix units (9.0 to 12.1)."""

SUSTAINED_GB_S = 240.0
"""Sustained bandwidth of a GB10, of its 273 GB/s, as measured by others.

Source: github MiaAI-Lab DeepSeek-v4.1-Flash-EXL3 #6, two Sparks, read on 2026-11-21.
"""
_FEW_BYTES, _FEW_GB_S = 3072, 150.0
"""The same source: an expert kernel with about 3 KB in flight in each SM reached 150 GB/s."""

GB10 = Machine(
    name="GB10",
    arch="121a",
    multiprocessors=48,
    clock_ghz=2.4,
    memory_gb_s=273.0,
    latency_us=_FEW_BYTES * 48 / _FEW_GB_S / 1e3,
    warps=48,
    blocks=24,
    registers=65_536,
    shared=102_400,
    matrix=32.0,
    integer=2.0,
    multiply=2.0,
    float32=1.0,
    loaded=64,
    from_shared=128,
    notes=(
        "48 SMs and 273 GB/s are NVIDIA's; warps, blocks, registers and shared memory of an SM are"
        " those of 12.x in the CUDA programming guide",
        "clock: assumed. NVIDIA's 1 PFLOP of sparse FP4 on 48 SMs, at the RTX 5090's rate a cycle,"
        " is 2.5 GHz",
        "matrix: assumed, the RTX 5090's rate: 209.5 TFLOPS of BF16 with float32 sums on 170 SMs at"
        " 2.41 GHz (NVIDIA's white paper) are 128 operations a scheduler and cycle",
        "integer and multiply: assumed as on 9.0; NVIDIA names 12.x twice as fast",
        "loads: 64 and 128 bytes a cycle assumed as on 9.0",
        "latency: of others' figures, 3 KB in flight an SM gave 150 GB/s, so 0.98 us at most",
    ),
)

H200 = Machine(
    name="H200",
    arch="90a",
    multiprocessors=132,
    clock_ghz=1.98,
    memory_gb_s=4460.0,
    latency_us=None,
    warps=64,
    blocks=32,
    registers=65_536,
    shared=233_472,
    matrix=8.0,
    integer=2.0,
    multiply=2.0,
    float32=1.0,
    loaded=64,
    from_shared=128,
    notes=(
        "132 SMs, 1.98 GHz: NVIDIA's; 4.46 TB/s of reads: measured here on 2026-11-21",
        "matrix: 989 TFLOPS (NVIDIA) are 4 cycles; assumed twice that, since mma.sync does not"
        " reach the rate of wgmma",
        "integer and multiply: 64 results an SM and cycle, float32: 128 (CUDA programming guide)",
    ),
)
