# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.environment RESULTS`: what a first run on a GPU starts from.

Every fact is found and printed, also where vLLM cannot be imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shutil
import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points, version
from pathlib import Path

from benchmarks.gpu.journal import Journal

PACKAGES = ("torch", "triton", "vllm", "transformers", "pytest", "hypothesis")
PLUGIN_GROUP = "vllm.general_plugins"


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def package(name: str) -> str:
    importlib.import_module(name)
    return version(name)


def plugin() -> str:
    """Return where the plugin is, which vLLM must find by its entry point."""
    if not any(point.name == "tgvkv" for point in entry_points(group=PLUGIN_GROUP)):
        raise RuntimeError(
            f"vLLM finds no plugin `tgvkv` in {PLUGIN_GROUP}: install this package, or unpack its "
            "wheel (make wheel) into a folder of PYTHONPATH"
        )
    found = importlib.util.find_spec("vllm_tgvkv")
    return str(Path(found.origin or "").parent) if found else "not found"


def device() -> str:
    import torch

    properties = torch.cuda.get_device_properties(0)
    if properties.major < 8:
        raise RuntimeError(f"{properties.name} is older than compute capability 8.0")
    free, total = torch.cuda.mem_get_info()
    torch.ones(8, device="cuda").sum().item()  # a first kernel
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    )


def flash_attention() -> str:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    found = get_flash_attn_version()
    if found is None:
        raise RuntimeError("vLLM finds no version of FlashAttention for this device")
    return f"version {found}"


FACTS = {
    "driver": driver,
    **{name: partial(package, name) for name in PACKAGES},
    "plugin": plugin,
    "device": device,
    "FlashAttention": flash_attention,
    "compute-sanitizer": lambda: shutil.which("compute-sanitizer") or "not installed",
}
"""Functions that find a fact or raise what is wrong."""


def main() -> int:
    """Report every fact; 1 if one is wrong, which `--smoke` ignores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--smoke", action="store_true", help="there may be no GPU")
    options = parser.parse_args()
    journal = Journal(options.results, part="environment")
    wrong = 0
    for name, find in FACTS.items():
        try:
            value = find()
        except Exception as error:  # the other facts are wanted as well
            wrong += 1
            value = f"{type(error).__name__}: {error}"
            print(f"ERROR {name}: {value}", flush=True)
        journal.write(figure=name, value=value)
        print(f"{name}: {value}", flush=True)
    return 1 if wrong and not options.smoke else 0


if __name__ == "__main__":
    sys.exit(main())
