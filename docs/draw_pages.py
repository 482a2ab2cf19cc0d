# SPDX-License-Identifier: Apache-2.0
"""Draw docs/pages.png: the pages of one request before and after its eviction.

An example with 4 layers x 2 KV heads, 8 full prompt blocks and a tail, of which 3 blocks are
retained: 3 * 4 * 2 = 24 pages, dealt in proportion to made-up shares by the real `apportion`.

Usage: python docs/draw_pages.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from vllm_tgvkv.kernels.apportion import apportion

LAYERS, HEADS, FULL_BLOCKS, RETAINED = 4, 2, 8, 3
SHARES = torch.tensor([1.0, 1.4, 4.5, 7.0, 6.0, 3.0, 1.2, 0.7])
PROMPT, KEPT, TAIL, FREE = "#9db4c8", "#2f7d5b", "#e0a83c", "#f4f4f2"


def main() -> None:
    """Write the picture to the folder of this file."""
    pairs = LAYERS * HEADS
    counts = apportion(SHARES, RETAINED * pairs, floor=1, cap=FULL_BLOCKS).tolist()
    figure, (before, after) = plt.subplots(1, 2, figsize=(11, 3.9), sharey=True)
    for pair in range(pairs):
        for column in range(FULL_BLOCKS):
            draw_page(before, pair, column, PROMPT)
            draw_page(after, pair, column, KEPT if column < counts[pair] else FREE)
        for axes in (before, after):
            draw_page(axes, pair, FULL_BLOCKS + 0.4, TAIL)
    before.set_title(f"before: {FULL_BLOCKS} blocks + tail")
    after.set_title(f"after: {RETAINED} blocks + tail, {FULL_BLOCKS - RETAINED} given back")
    before.set_yticks(
        [pair + 0.5 for pair in range(pairs)],
        [f"layer {pair // HEADS}, head {pair % HEADS}" for pair in range(pairs)],
    )
    for axes in (before, after):
        axes.set_xlim(-0.1, FULL_BLOCKS + 1.5)
        axes.set_ylim(pairs + 0.1, -0.1)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.legend(
        handles=[
            Patch(color=PROMPT, label="page of the prompt"),
            Patch(color=KEPT, label="kept page, every slot filled"),
            Patch(color=TAIL, label="tail, ordinary layout"),
            Patch(facecolor=FREE, edgecolor="#cccccc", label="not held any more"),
        ],
        loc="lower center",
        ncol=4,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(Path(__file__).with_name("pages.png"), dpi=110)


def draw_page(axes: Axes, row: float, column: float, colour: str) -> None:
    axes.add_patch(
        Rectangle((column + 0.06, row + 0.1), 0.88, 0.8, facecolor=colour, edgecolor="#cccccc")
    )


if __name__ == "__main__":
    main()
