# SPDX-License-Identifier: Apache-2.0
"""Names of transformers that this package uses, imported despite a broken torchvision.

vLLM for CPU depends on torchvision and torchaudio. The package index has only their CUDA builds,
which do not load with a CPU build of torch. transformers imports them if they are installed, so it
must see them as absent before anything of it is imported. Working ones are left alone.
"""

import importlib
import importlib.util
from typing import Any
from unittest.mock import patch

from transformers.utils import import_utils


def _hide(package: str) -> None:
    """Make transformers cache that ``package`` is absent."""
    find_spec = importlib.util.find_spec

    def find_other(name: str, *arguments: Any) -> Any:
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
