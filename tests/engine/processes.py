# SPDX-License-Identifier: Apache-2.0
"""Processes for engines and ranks, forked from one that has imported vLLM.

On CPU, vLLM starts every worker as a new Python process, which takes up to half a minute to import
torch and vLLM. Forking the test's own process would copy the locks of its threads, its engine's
process group and its patches. The process that is forked here has only imported modules.
"""

from __future__ import annotations

import os
from multiprocessing import context
from typing import Any


class _Process(context.ForkServerProcess):
    """A process with the environment of the one that starts it, as a spawned one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process  # type: ignore[assignment]


FORKED = _Context()
FORKED.set_forkserver_preload(["tests.engine.running", "vllm.v1.worker.cpu_model_runner"])
