# SPDX-License-Identifier: Apache-2.0
"""What this package uses of transformers, imported where torchvision or torchaudio is broken.

vLLM for CPU depends on both, and the package index has only their CUDA builds, which do not load
next to a CPU build of torch. transformers imports them wherever they are installed, so it has to
be told that they are absent before anything of it is imported. Working ones are left alone.
"""

import importlib
import importlib.util
from unittest.mock import patch

from transformers.utils import import_utils


def _hide(package: str) -> None:
    """Let transformers find out, and cache, that ``package`` is absent."""
    find_spec = importlib.util.find_spec

    def find_other(name: str, *arguments: object) -> object:
        return None if name == package else find_spec(name, *arguments)

    is_available = getattr(import_utils, f"is_{package}_available")
    is_available.cache_clear()
    with patch("importlib.util.find_spec", find_other):
        is_available()


for _package in ("torchvision", "torchaudio"):
    try:
        importlib.import_module(_package)
    except (ImportError, OSError, RuntimeError):
        _hide(_package)

from transformers import (  # noqa: E402
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil  # noqa: E402
from transformers.models.llava.processing_llava import LlavaProcessor  # noqa: E402

__all__ = [
    "CLIPImageProcessorPil",
    "CLIPVisionConfig",
    "LlamaConfig",
    "LlavaConfig",
    "LlavaForConditionalGeneration",
    "LlavaProcessor",
    "PreTrainedTokenizerFast",
]
