# SPDX-License-Identifier: Apache-2.0
"""A method that trusts only the last token of the prompt.

It keeps what the model attends to while it generates the first token of the answer, text before
vision, the same number of tokens in all layers.
"""

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import LayerView, Score
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe


@SCORES.register("last_row")
class LastRowScore(Score):
    """``s[j] = A[P - 1, j]``, the attention of the last token."""

    rows = "window"
    statistics = frozenset({"row_averages"})

    def __call__(self, view: LayerView) -> Tensor:
        num_rows = len(view.attention.row_positions)
        last = torch.zeros(1, num_rows, device=view.prompt.is_vision.device)
        last[:, -1] = 1
        return view.attention.weighted_column_sums(last)


POLICIES.add("last_row", Recipe(score="last_row", allocation="uniform", retain="text_first"))
