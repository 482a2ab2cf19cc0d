# SPDX-License-Identifier: Apache-2.0
"""For vLLM's `--worker-extension-cls`: a worker that can be told to die."""

from __future__ import annotations

import os
import signal
from typing import Any

from vllm_tgvkv.decision import Decider


class Mortal:
    def die_in_the_next_eviction(self) -> None:
        """Its blocks are swapped by then and its layers observed; nothing is copied yet."""

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        Decider.decide = die  # type: ignore[method-assign, assignment]
