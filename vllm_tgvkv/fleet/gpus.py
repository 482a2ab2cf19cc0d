# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: figures of their makers' data sheets, and prices that are assumed."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tgvkv.shared.errors import EvictionConfigError, choose, quoted


@dataclass(frozen=True)
class Gpu:
    """One GPU, as its data sheet has it."""

    name: str
    gigabytes: float
    """Memory, in 10^9 bytes."""
    terabytes_per_second: float
    """Bandwidth of this memory, in 10^12 bytes per second."""
    teraflops: float
    """bfloat16 on tensor cores with dense matrices, in 10^12 operations per second."""
    dollars: float | None = None
    """Assumed price of an hour; None: it has to be given."""
    source: str = "given"


# Sheets that state the speed of sparse matrices are halved.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("l4", 24, 0.300, 121, 0.8, "NVIDIA L4 data sheet"),
        Gpu("a10", 24, 0.600, 125, 1.0, "NVIDIA A10 data sheet"),
        Gpu("l40s", 48, 0.864, 362, 1.5, "NVIDIA L40S data sheet"),
        Gpu("a100-40g", 40, 1.555, 312, 1.5, "NVIDIA A100 data sheet, SXM"),
        Gpu("a100-80g", 80, 2.039, 312, 1.8, "NVIDIA A100 data sheet, SXM"),
        Gpu("h100", 80, 3.35, 989, 3.0, "NVIDIA H100 data sheet, SXM"),
        Gpu("h200", 141, 4.8, 989, 3.8, "NVIDIA H200 data sheet, SXM"),
        Gpu("b200", 180, 8.0, 2250, 6.0, "NVIDIA DGX B200 data sheet, an eighth"),
    )
}


def parse_gpu(text: str) -> Gpu:
    """Read a name of `GPUS`, or `NAME:GB,TB/s,TFLOP/s` for any other GPU.

    Raises:
        EvictionConfigError: for anything else.
    """
    name, colon, figures = text.partition(":")
    if not colon and text.lower() in GPUS:
        return GPUS[text.lower()]
    try:
        memory, bandwidth, flops = (float(figure) for figure in figures.split(","))
        if colon and min(memory, bandwidth, flops) > 0 and max(memory, bandwidth, flops) < 1e9:
            return Gpu(name, memory, bandwidth, flops)
    except ValueError:
        pass
    raise EvictionConfigError(
        f"--gpu is {quoted(text)}: {choose(name, GPUS)}, or describe another as "
        "NAME:GB,TB/s,TFLOP/s, such as mine:96,1.8,500"
    )
