# SPDX-License-Identifier: Apache-2.0
"""Entry point of the `vllm.general_plugins` group: vLLM calls `register` in every process."""

from __future__ import annotations

from importlib.metadata import version

SUPPORTED_VLLM = (0, 32)


class UnsupportedVllmError(RuntimeError):
    """The installed vLLM is not the minor version this package was checked against."""


def check_vllm_version(installed: str) -> None:
    """Raise `UnsupportedVllmError` unless `installed` is of the supported minor version."""
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if numbers != SUPPORTED_VLLM:
        wanted = ".".join(map(str, SUPPORTED_VLLM))
        raise UnsupportedVllmError(
            f"vllm-tgvkv {version('vllm-tgvkv')} works with vLLM {wanted}.x, but {installed} is "
            f"installed: install vllm=={wanted}.* or the vllm-tgvkv release made for {installed}, "
            "or uninstall vllm-tgvkv"
        )


def register() -> None:
    """Teach vLLM the `--kv-eviction` flags; nothing else happens until one is given."""
    import vllm

    check_vllm_version(vllm.__version__)

    from vllm_tgvkv import patches

    patches.install_flags()
