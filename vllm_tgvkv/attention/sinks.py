# SPDX-License-Identifier: Apache-2.0
"""Learned attention sinks of the layers, as statistics read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class HasSinks(Protocol):
    """The attention of a layer, in part."""

    num_kv_heads: int
    num_heads: int
    sinks: torch.Tensor | None


def sinks_of(impls: Sequence[HasSinks]) -> Callable[[slice], torch.Tensor] | None:
    """Return a function from some layers to their sinks; None if no layer has any.

    The function returns float32 [layers, H, G], with -inf for layers without sinks. It reads the
    layers' own tensors at every call: weights may be loaded again, and vLLM's CPU attention puts
    another tensor in the place of one in half precision.
    """
    if all(impl.sinks is None for impl in impls):
        return None

    def read(layers: slice) -> torch.Tensor:
        found = [impl.sinks for impl in impls[layers]]
        some = next(impl.sinks for impl in impls if impl.sinks is not None)
        none = torch.full_like(some, -torch.inf) if None in found else some
        by_layer = [none if sinks is None else sinks for sinks in found]
        return torch.stack(by_layer).detach().float().unflatten(1, (impls[0].num_kv_heads, -1))

    return read
