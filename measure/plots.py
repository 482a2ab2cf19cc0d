# SPDX-License-Identifier: Apache-2.0
"""The style of all plots, and files that are the same for the same data."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

GREY, VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY = COLOURS = (
    *("#555555", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
)
"""Okabe and Ito's colours, with a grey for the reference."""

MARKERS = "osD^vPX"
DPI = 110

matplotlib.rcParams.update(
    {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e5e5e5",
        "font.size": 9,
        "axes.titlesize": 10,
        "savefig.dpi": DPI,
    }
)


def colour(number: int) -> str:
    """Return the colour of a series."""
    return COLOURS[number % len(COLOURS)]


def marker(number: int) -> str:
    """Return the marker of a series."""
    return MARKERS[number % len(MARKERS)]


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file, or an SVG element that can be put into HTML, and close the figure."""
    if path.suffix == ".svg":
        path.write_text(_svg(figure, path.stem), encoding="utf-8")
    else:
        figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def _svg(figure: Figure, name: str) -> str:
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # ids follow from the name
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
