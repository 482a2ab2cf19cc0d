# SPDX-License-Identifier: Apache-2.0
"""A frozen model in transformers, whose attention and hidden states can be watched and changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from training.data import Prompt, TrainingError

ATTENTION = "tgvkv_training"
"""Name of our attention among those of transformers."""


def visible(documents: Tensor) -> Tensor:
    """Return which keys each token attends to, bool `[S, S]`: its document's, up to itself.

    Args:
        documents: number of each token's document, int64 `[S]`.
    """
    return (documents[:, None] == documents).tril()


def ages(documents: Tensor) -> Tensor:
    """Return t - j where token t sees token j, otherwise 0: int64 `[S, S]`."""
    tokens = torch.arange(len(documents), device=documents.device)
    return (tokens[:, None] - tokens) * visible(documents)


@dataclass(frozen=True)
class Attended:
    """Inputs of one layer's attention."""

    layer: int
    hidden: Tensor
    """Hidden states after the input norm, `[S, d]`."""
    query: Tensor
    """Rotated, `[Q, S, D]`."""
    key: Tensor
    """Rotated, `[H, S, D]`."""
    value: Tensor
    scaling: float

    def output(self, documents: Tensor, log_betas: Tensor | None = None) -> Tensor:
        """Return the attention's output `[Q, S, D]`, inside documents.

        Args:
            documents: number of each token's document, int64 `[S]`.
            log_betas: `[H, S]`; (t - j) log beta[j] is added to the logit of query t and key j.
                The attention is then computed in its dtype.
        """
        mask, query, key, value = visible(documents), self.query, self.key, self.value
        if log_betas is not None:
            decay = (log_betas[:, None] * ages(documents)).masked_fill(~mask, -torch.inf)
            mask = decay.repeat_interleave(len(self.query) // len(self.key), 0)
            query, key, value = (part.to(mask.dtype) for part in (query, key, value))
        query, key, value = (part[None] for part in (query, key, value))
        found = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.scaling, enable_gqa=True
        )
        return found[0].to(self.value.dtype)


See = Callable[[Attended], Tensor]
"""Returns a layer's output `[Q, S, D]`."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    tgvkv_see: Callable[..., Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend in transformers' shapes: `[1, heads, S, D]` in, `[1, S, Q, D]` out."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = tgvkv_see(query=query[0], key=key[0], value=value[0], scaling=scaling)
    return found.transpose(0, 1)[None].contiguous(), None


AttentionInterface.register(ATTENTION, _attend)


class FrozenModel:
    """A model whose weights stay as they are.

    Raises:
        TrainingError: for models whose attention differs from plain causal attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        decoder = model.get_decoder()
        self.layers: Any = getattr(decoder, "layers", ())
        if not self.layers or not all(hasattr(layer, "self_attn") for layer in self.layers):
            raise TrainingError(f"{type(model).__name__} has layers without `self_attn`")
        self.prefix = next(name for name, found in model.named_modules() if found is self.layers)
        self.device = next(decoder.parameters()).device
        self._see: See | None = None
        self._decoder_config = decoder.config
        for index, layer in enumerate(self.layers):
            layer.self_attn.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)

    @classmethod
    def load(cls, folder: str, device: str, dtype: torch.dtype) -> FrozenModel:
        """Load a model from a folder."""
        has_images = getattr(AutoConfig.from_pretrained(folder), "vision_config", None) is not None
        auto = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
        model: Any = auto.from_pretrained(folder, dtype=dtype)
        return cls(model.to(device))

    def _enter(self, index: int, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Hand the hidden states of a layer's attention to `see`, with what `_attend` gets."""
        if self._see is None:
            return None
        hidden, see = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], self._see

        def with_attended(**parts: Any) -> Tensor:
            return see(Attended(index, hidden[0], **parts))

        return args, {**kwargs, "tgvkv_see": with_attended}

    def logits(self, prompt: Prompt, rows: Tensor, see: See | None = None) -> Tensor:
        """Return the logits of some tokens of a prompt, `[n, V]`.

        Args:
            rows: int64 `[n]`.
            see: computes the attention of each layer; by default the model's own is used, which
                knows one document only.
        """
        own, self._see = self._decoder_config._attn_implementation, see
        self._decoder_config._attn_implementation = ATTENTION if see else own
        try:
            found = self.model(
                input_ids=prompt.ids.to(self.device)[None],
                position_ids=prompt.positions.to(self.device)[None],
                logits_to_keep=rows.to(self.device),
                use_cache=False,
            )
        finally:
            self._see, self._decoder_config._attn_implementation = None, own
        logits: Tensor = found.logits[0]
        return logits

    @torch.no_grad()
    def check(self, prompt: Prompt) -> None:
        """Check that our attention is the model's, on a prompt of one document.

        Raises:
            TrainingError: if the logits differ, as with sliding windows, soft caps or sinks.
        """
        name, documents = type(self.model).__name__, prompt.documents.to(self.device)
        rows = torch.arange(len(prompt.ids))
        try:
            wanted = self.logits(prompt, rows).float()
            found = self.logits(prompt, rows, lambda seen: seen.output(documents)).float()
        except TypeError as error:
            raise TrainingError(
                f"{name} does not take an attention of others ({error}); its gates cannot be "
                "trained here"
            ) from error
        types = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        difference = float((found - wanted).norm() / wanted.norm())
        limit = 0.05 if self.model.dtype in (torch.bfloat16, torch.float16) else 1e-3
        if difference > limit or types != {"full_attention"}:
            raise TrainingError(
                f"{name} does not attend plainly in all layers (layer types "
                f"{', '.join(sorted(types))}; its logits differ by {difference:.1e} from those of "
                "plain causal attention); its gates cannot be trained here"
            )
