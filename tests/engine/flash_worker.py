# SPDX-License-Identifier: Apache-2.0
"""The CPU worker with the attention backend of the GPU, for processes of their own.

Importing this module pretends FlashAttention, see `flash_on_cpu.py`, for the rest of the process.
"""

from __future__ import annotations

import pytest

from tests.engine import flash_on_cpu

flash_on_cpu.pretend_kernels(pytest.MonkeyPatch())


class FlashWorker(flash_on_cpu.FlashOnCPUWorker):
    """A worker that vLLM starts in a process of its own."""
