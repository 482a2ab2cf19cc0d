# SPDX-License-Identifier: Apache-2.0
"""Entry point of the `vllm.general_plugins` group: vLLM calls `register` in every process."""

from __future__ import annotations

from importlib.metadata import version

SUPPORTED_VLLM = ((0, 32), (0, 33))


class UnsupportedVllmError(RuntimeError):
    """The installed vLLM is of no minor version that this package supports."""


def check_vllm_version(installed: str) -> None:
    """Raise `UnsupportedVllmError` unless `installed` is of a supported minor version."""
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if numbers not in SUPPORTED_VLLM:
        minors = [".".join(map(str, minor)) for minor in SUPPORTED_VLLM]
        raise UnsupportedVllmError(
            f"vllm-tgvkv {version('vllm-tgvkv')} works with vLLM "
            f"{' and '.join(f'{minor}.x' for minor in minors)}, but {installed} is installed: "
            f"install {' or '.join(f'vllm=={minor}.*' for minor in minors)} or the vllm-tgvkv "
            f"release made for {installed}, or uninstall vllm-tgvkv"
        )


def register() -> None:
    """Add the `--kv-eviction` flags to vLLM. Nothing else changes until one of them is given."""
    import vllm

    check_vllm_version(vllm.__version__)

    from vllm_tgvkv.engine import patches

    patches.install_flags()
