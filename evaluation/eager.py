# SPDX-License-Identifier: Apache-2.0
"""The page model in transformers, with attention that can be seen and changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evaluation.engine import MODELS
from reader.assemble import load_vocabulary, page_model_folder


class EagerModel:
    """The model, in float32; while it is `attending`, its layers call `attend`."""

    def __init__(self) -> None:
        """Load the model; it is written on the first call.

        Raises:
            WeightsMissingError: if the package with the language model is not installed.
        """
        folder = page_model_folder(MODELS)
        self.processor = AutoProcessor.from_pretrained(folder)
        self.tokenizer = self.processor.tokenizer
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.vocabulary = load_vocabulary(folder)
        layers = self.model.model.language_model.layers
        self.numbers = {layer.self_attn: number for number, layer in enumerate(layers)}

    def attend(
        self, layer: int, query: Tensor, logits: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Return the output of a layer of the language model, `[H, G, n, D]`.

        Args:
            query: `[H, G, n, D]`.
            logits: masked, `[H, G, n, P]`.
            value: `[H, 1, P, D]`.
        """
        raise NotImplementedError

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Let the model call this class in place of its own eager attention."""
        ALL_ATTENTION_FUNCTIONS["eager"] = self._attend
        try:
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS["eager"]

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        query, value = query[0].unflatten(0, (key.shape[1], -1)), value[0].unsqueeze(1)
        logits = query @ key[0].unsqueeze(1).transpose(2, 3) * scaling
        if attention_mask is not None:
            logits += attention_mask[0]
        if module in self.numbers:
            output = self.attend(self.numbers[module], query, logits, value, scaling)
        else:
            output = logits.softmax(-1) @ value
        return output.flatten(0, 1).transpose(0, 1).unsqueeze(0).contiguous(), None
