# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runner V2 in this process, without a GPU.

The runner (`vllm/v1/worker/gpu/model_runner.py`, on the CPU platform its subclass in
`vllm/v1/worker/cpu/model_runner.py`) needs Triton: it keeps block tables, positions, slot mappings
and the sampler's state in kernels. Here Triton's interpreter runs these kernels, on the tensors of
the CPU platform. `prepare` makes that possible and has to be called before vLLM or Triton is
imported, so in a process of its own; importing this module changes nothing.

`prepare` pretends three things:

1. `TRITON_INTERPRET=1`: every kernel that is defined later is interpreted, vLLM's too. The
   interpreter follows addresses in memory, which kernels over several block tables need.
2. A Triton backend called "cpu". vLLM's CPU builds use Triton only if there is one. Its driver
   reports that it is active, and raises on any other call: nothing is compiled for it. As a side
   effect, vLLM does not replace Triton kernels by its C++ functions, so that runner V1 would be
   interpreted as well.
3. Asynchronous scheduling is on by default, as on a GPU, although the CPU platform would switch it
   off; `async_scheduling=False` still does.

vLLM's CPU worker itself pretends more (`vllm/v1/worker/cpu/shm.py`): streams, events and
`synchronize` do nothing, pinned memory and copies to the device are the tensor itself, buffers in
unified memory are plain memory, and kernels have no barrier.

Engines with eviction get the plugin's GPU runner V2 once `pretend_gpu_worker` is called. It also
pretends FlashAttention, see `flash_on_cpu.py` and `runner_v2_worker.py`.

Covered: the order of schedules, inputs and outputs, with steps scheduled before the previous step's
tokens are known; V2's block tables, slot mappings and metadata, computed by vLLM's own kernels.
Not covered: anything that happens while the device is busy (races between host and device, hidden
synchronisation), CUDA graphs, padding to graph sizes, and `torch.compile`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a child process would not be prepared
}


class NoCompiler:
    """The driver that Triton lists for its backend "cpu"."""

    def __init__(self) -> None:
        raise RuntimeError("Triton's backend 'cpu' is a pretence: kernels are only interpreted")

    @staticmethod
    def is_active() -> bool:
        return True


def prepare() -> None:
    """Make V2 the model runner of the engines of this process.

    Raises:
        RuntimeError: vLLM is imported already, or Triton without its interpreter, or vLLM is not
            a CPU build.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM is imported already, without what its runner V2 needs")
    importlib.import_module("tests.conftest")  # the settings of tools/cpu/environment.mk
    os.environ.update(ENVIRONMENT)
    _pretend_triton_backend()
    _keep_asynchronous_scheduling()


def _pretend_triton_backend() -> None:
    import triton.language as tl
    from triton.backends import Backend, backends
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(tl.sum, InterpretedFunction):
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1")
    backends["cpu"] = Backend(compiler=NoCompiler, driver=NoCompiler)


def _keep_asynchronous_scheduling() -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    if not current_platform.is_cpu():
        raise RuntimeError(f"vLLM's platform is {current_platform.device_type}: nothing to pretend")
    adapt = CpuPlatform.check_and_update_config.__func__

    @functools.wraps(adapt)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        adapt(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def take_any_mask() -> None:
    """Let Triton's interpreter load with masks that it computed as integers, as n-grams do."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load = InterpreterBuilder.create_masked_load

    def masked_load(self: Any, pointers: Any, mask: TensorHandle, *rest: Any) -> TensorHandle:
        return load(self, pointers, TensorHandle(mask.data.astype(bool), mask.dtype), *rest)

    InterpreterBuilder.create_masked_load = masked_load


def pretend_gpu_worker() -> None:
    """Make engines with eviction use the GPU's runner; otherwise they use vLLM's CPU runner."""
    import pytest

    from tests.engine import flash_on_cpu

    worker = "tests.engine.runner_v2_worker.EvictingV2Worker"
    flash_on_cpu.use_worker(pytest.MonkeyPatch(), worker)
