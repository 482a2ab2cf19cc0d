# SPDX-License-Identifier: Apache-2.0
"""The command `python -m vllm_tgvkv.gates`: check a folder of gates, or rewrite it."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from vllm_tgvkv.gates.folder import AUTHORS, FILES, Gates, read_tensors
from vllm_tgvkv.shared.errors import EvictionConfigError


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_tgvkv.gates",
        description="Check a folder of gates, and rewrite its weights as safetensors.",
    )
    parser.add_argument("folder", help="folder of a checkpoint of TrimKV, DBTrimKV or KVzap")
    parser.add_argument("--output", type=Path, help="folder to write")
    options = parser.parse_args(arguments)
    try:
        gates = Gates.read(options.folder, "the folder")
        print(
            f"{gates.folder}: gates of {AUTHORS[gates.kind]} ({gates.form}) for "
            f"{len(gates.layers)} layers of {gates.kv_heads} KV heads, hidden states of "
            f"{gates.hidden_size} values"
        )
        if options.output is None:
            return
        options.output.mkdir(parents=True, exist_ok=True)
        tensors = read_tensors(Path(gates.folder, gates.file))
        plain = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(plain, options.output / FILES[gates.kind][0])
        if options.output.resolve() != Path(gates.folder).resolve():
            shutil.copy(Path(gates.folder, "config.json"), options.output)
        print(f"{options.output / FILES[gates.kind][0]}: written")
    except (EvictionConfigError, OSError) as error:
        sys.exit(f"gates: {error}")


if __name__ == "__main__":
    main()
