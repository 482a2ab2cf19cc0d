# SPDX-License-Identifier: Apache-2.0
"""Attention statistics of some rows over paged keys: two passes over the keys, none over V.

The *softmax* pass finds the maximum and the denominator of every row. The *columns* pass recomputes
the probabilities and adds them up over the heads of a group and over the rows. It can write the
head averages of A, from which weighted sums are computed without reading the keys again.
Each pass is one launch for all heads of all layers.

The order of float additions does not depend on timing: programs write their parts of a sum
separately, and these are added afterwards. So the same call always gives the same bits. Layers that
are observed one by one may give others, since programs then have smaller parts.

Cost of a layer, with P keys, H KV heads of D values, O rows of G query heads, b bytes per value:

- memory: 2*P*H*D*b bytes of keys (one read per KV head and pass; tiles of further rows find them in
  L2), and 4*S*O*P bytes of averages, written and read again, if they are requested;
- arithmetic: 4*P*O*H*G*D on the tensor cores and 2*P*O*H*G exponentials. With 64 rows, G = 4 and
  D = 128 that is 256 operations per byte of keys.
"""

from __future__ import annotations

from functools import cached_property

import torch
import triton
from torch import Tensor

from vllm_tgvkv.kernels.gpu.columns import COLUMNS_MULTIPLE, columns_pass, weigh
from vllm_tgvkv.kernels.gpu.paged_rows import PagedRows, Tiles
from vllm_tgvkv.kernels.gpu.softmax import Softmax, softmax_pass
from vllm_tgvkv.kernels.statistics import FirstPass, ObservedAttention

_FLOAT_BYTES = 4


class TritonAttention(ObservedAttention):
    """Statistics in Triton; the module describes the passes.

    Queries and keys are multiplied in their own dtypes (16-bit products are exact); all sums are
    float32. The log-sum-exp is subtracted before the exponential, so that logits of any size keep
    float32's precision. Counts are exact except for entries that float32 cannot distinguish from
    the threshold.

    Scratch memory: head averages are kept if they fit `workspace_bytes`; otherwise, each weighted
    sum reads the keys again. Partial results of the programs take a few MiB at most, maxima and
    log-sum-exps of the rows 16*L*H*G*O bytes, entropies up to S*O*P/8 bytes.
    """

    @cached_property
    def _paged(self) -> PagedRows:
        return PagedRows.of(self._rows)

    @cached_property
    def _tiles(self) -> Tiles:
        return Tiles.for_rows(self._paged)

    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor:
        first = self.num_rows - 1 if last_row_only else 0
        rows = self._paged.from_row(first)
        columns = columns_pass(
            rows,
            softmax_pass(rows, self._tiles, self._scratch, keys),
            self.num_groups,
            self._tiles,
            self._scratch,
            weights=weights.float()[:, None, first:],
            subset=keys,
        )
        return columns.sums.squeeze(1)

    @cached_property
    def _first_pass(self) -> FirstPass:
        queried = self._statistics
        averages = None
        stride = triton.cdiv(self.num_keys, COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE
        shape = (self.num_groups, self.num_rows, stride)
        size = self.num_groups * self.num_rows * stride * _FLOAT_BYTES
        if "row_averages" in queried and size <= self._workspace_bytes:
            averages = self._scratch.take("averages", shape, self._paged.queries.device)
        columns = columns_pass(
            self._paged,
            self._softmax,
            self.num_groups,
            self._tiles,
            self._scratch,
            averages=averages,
            has_maxima="column_maxima" in queried,
            counts_below="share_below" in queried,
            has_entropies="row_entropies" in queried,
        )
        share, entropies = columns.counts, columns.entropies
        if "share_below" in queried:
            share = self._share_of_visible(share)
        if "row_entropies" in queried:
            entropies = entropies.sum(dim=0)
        return FirstPass(columns.sums.squeeze(1), averages, share, entropies, columns.maxima)

    def _weigh(self, weights: Tensor, averages: Tensor) -> Tensor:
        return weigh(self._paged, averages, weights.float())

    def _weighted_pass(self, weights: Tensor) -> Tensor:
        sums = [
            columns_pass(
                self._paged,
                self._softmax,
                self.num_groups,
                self._tiles,
                self._scratch,
                weights=two,
            ).sums
            for two in weights.float().split(2, dim=1)
        ]
        return sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)

    @cached_property
    def _softmax(self) -> Softmax:
        """The softmax of all rows over all keys."""
        return softmax_pass(self._paged, self._tiles, self._scratch)

    def _share_of_visible(self, counts: Tensor) -> Tensor:
        """Return shares `[S]` from partial counts `[S, *]` over a group's query heads."""
        visible = self._paged.num_visible.clamp(min=0).expand(self.num_pairs, -1)
        of_groups = visible.reshape(self.num_groups, -1).sum(dim=1)
        return counts.sum(dim=1).double() / (of_groups * self.group_size)
