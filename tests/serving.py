# SPDX-License-Identifier: Apache-2.0
"""What tests of a real `vllm serve` share."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

START_SECONDS = 240


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def wait_until_healthy(process: subprocess.Popen, address: str, log: Path) -> None:
    """Fail with the end of the log if the server ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not is_healthy(address):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)
