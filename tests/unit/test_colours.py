# SPDX-License-Identifier: Apache-2.0
"""The inspector's map colours: contrast by WCAG, and distances for readers who see fewer colours.

A colour-blind reader's view is simulated as by Machado, Oliveira and Fernandes (2009), severity 1,
and distances are those of OKLab, times 100: 2 is about the least difference that can be seen.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "server" / "inspector" / "colours.js"
LEAST_DISTANCE = 15
LEAST_CONTRAST = 3.0
"""WCAG 2.2, 1.4.11: parts of graphics against what surrounds them."""


def matrix(text: str) -> np.ndarray:
    return np.array([row.split() for row in text.split(";")], dtype=float)


VIEWS = {
    "all colours": np.eye(3),
    "protanopia": matrix(
        "0.152286 1.052583 -0.204868; 0.114503 0.786281 0.099216; -0.003882 -0.048116 1.051998"
    ),
    "deuteranopia": matrix(
        "0.367322 0.860646 -0.227968; 0.280085 0.672501 0.047413; -0.011820 0.042940 0.968881"
    ),
    "tritanopia": matrix(
        "1.255528 -0.076749 -0.178779; -0.078411 0.930809 0.147602; 0.004733 0.691367 0.303900"
    ),
}
TO_LMS = matrix(
    "0.4122214708 0.5363325363 0.0514459929; 0.2119034982 0.6806995451 0.1073969566; "
    "0.0883024619 0.2817188376 0.6299787005"
)
TO_LAB = matrix(
    "0.2104542553 0.7936177850 -0.0040720468; 1.9779984951 -2.4285922050 0.4505937099; "
    "0.0259040371 0.7827717662 -0.8086757660"
)


def linear(colour: str) -> np.ndarray:
    """Return linear red, green and blue of `#rrggbb`, 0 to 1."""
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def oklab(rgb: np.ndarray) -> np.ndarray:
    return TO_LAB @ np.cbrt(TO_LMS @ rgb.clip(0, 1))


def palettes() -> dict[str, dict[str, str]]:
    """Read the colours of reasons and of differences from the page's script."""
    text = SCRIPT.read_text()
    reasons = dict(re.findall(r'(\w+): \{ colour: "(#\w{6})"', text))
    (block,) = re.findall(r"DIFFERENCE = \{(.*?)\}", text)
    return {"reasons": reasons, "difference": dict(re.findall(r'(\w+): "(#\w{6})"', block))}


def constant(name: str) -> str:
    (found,) = re.findall(rf'export const {name} = "(#\w{{6}})"', SCRIPT.read_text())
    return str(found)


def test_known_values() -> None:
    """Of the tools themselves: WCAG's extremes, and OKLab's white."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert oklab(linear("#ffffff")) == pytest.approx([1, 0, 0], abs=1e-3)
    # Red and green of the same lightness: far apart, but not in deuteranopia.
    red, green = linear("#c00000"), linear("#627200")
    near = VIEWS["deuteranopia"]
    assert np.linalg.norm(oklab(red) - oklab(green)) > 0.15
    assert np.linalg.norm(oklab(near @ red) - oklab(near @ green)) < 0.1


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("palette", ["reasons", "difference"])
def test_colours_stay_apart(palette: str, view: str) -> None:
    colours = palettes()[palette]
    assert len(colours) == {"reasons": 8, "difference": 3}[palette]
    # A method prefers one kind of tokens, so these share a colour.
    assert len({colours[name] for name in ("recent", "vision", "preferred") if name in colours}) < 2
    different = {*colours.values(), constant("EVICTED")}
    seen = {colour: oklab(VIEWS[view] @ linear(colour)) for colour in different}
    for one, other in itertools.combinations(seen, 2):
        distance = 100 * np.linalg.norm(seen[one] - seen[other])
        assert distance >= LEAST_DISTANCE, (one, other, distance)


@pytest.mark.parametrize("palette", ["reasons", "difference"])
def test_colours_stand_out(palette: str) -> None:
    for name, colour in palettes()[palette].items():
        assert contrast(colour, constant("GROUND")) >= LEAST_CONTRAST, name
    assert contrast(constant("EXPECTED"), constant("GROUND")) >= LEAST_CONTRAST
