# SPDX-License-Identifier: Apache-2.0
"""A worker that dies on request, for vLLM's `--worker-extension-cls`."""

from __future__ import annotations

import os
import signal
from typing import Any

from vllm_tgvkv.worker.decision import ScoredPrompt


class Mortal:
    def die_in_the_next_eviction(self) -> None:
        """Kill this process once blocks are swapped and layers observed, before the copy."""

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        ScoredPrompt.decide = die  # type: ignore[method-assign, assignment]
