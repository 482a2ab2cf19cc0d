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
from matplotlib.patches import Patch

from vllm_tgvkv.kernels.apportion import apportion

LAYERS, HEADS, FULL_BLOCKS, RETAINED = 4, 2, 8, 3
SHARES = torch.tensor([1.0, 1.4, 4.5, 7.0, 6.0, 3.0, 1.2, 0.7])
COLOURS = {
    "page of the prompt": "#9db4c8",
    "kept page, every slot filled": "#2f7d5b",
    "tail, ordinary layout": "#e0a83c",
    "not held any more": "#f4f4f2",
}


def main() -> None:
    """Write the picture to the folder of this file."""
    pairs, (prompt, kept, tail, free) = LAYERS * HEADS, COLOURS.values()
    counts = apportion(SHARES, RETAINED * pairs, floor=1, cap=FULL_BLOCKS).tolist()
    figure, (before, after) = plt.subplots(1, 2, figsize=(11, 3.9), sharey=True)
    for axes in (before, after):
        for pair, count in enumerate(counts):
            full = [prompt] * FULL_BLOCKS
            if axes is after:
                full = [kept] * count + [free] * (FULL_BLOCKS - count)
            left = [column + 0.06 for column in (*range(FULL_BLOCKS), FULL_BLOCKS + 0.4)]
            row = [pair + 0.5] * len(left)
            axes.barh(row, 0.88, 0.8, left, color=[*full, tail], edgecolor="#cccccc")
        axes.set(xlim=(-0.1, FULL_BLOCKS + 1.5), ylim=(pairs + 0.1, -0.1), xticks=[])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    before.set_title(f"before: {FULL_BLOCKS} blocks + tail")
    after.set_title(f"after: {RETAINED} blocks + tail, {FULL_BLOCKS - RETAINED} given back")
    names = [f"layer {pair // HEADS}, head {pair % HEADS}" for pair in range(pairs)]
    before.set_yticks([pair + 0.5 for pair in range(pairs)], names)
    handles = [Patch(fc=colour, ec="#cccccc", label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="lower center", ncol=4, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(Path(__file__).with_name("pages.png"), dpi=110)


if __name__ == "__main__":
    main()
