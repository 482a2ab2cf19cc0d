# SPDX-License-Identifier: Apache-2.0
"""The sentences and words that texts are made of.

The noise is that of RULER's needle tasks. The prose is Python's own documentation of its language,
which every installation has.
"""

from __future__ import annotations

import re
from functools import cache
from pydoc_data.topics import topics

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""RULER's, repeated as often as needed."""

ADJECTIVES = (
    *("amber", "ancient", "bitter", "bold", "bright", "broken", "calm", "careful", "clever"),
    *("cold", "crooked", "curious", "distant", "dusty", "early", "empty", "faint", "famous"),
    *("fierce", "friendly", "frozen", "gentle", "golden", "grand", "hollow", "honest", "hungry"),
    *("jolly", "lazy", "lonely", "lucky", "mellow", "mighty", "narrow", "noble", "patient"),
    *("plain", "proud", "quiet", "rapid", "rough", "royal", "rusty", "scarlet", "silent"),
    *("silver", "simple", "sleepy", "steep", "stormy", "sturdy", "tender", "tiny", "wooden"),
)
NOUNS = (
    *("acorn", "anchor", "apple", "arrow", "badger", "baker", "barrel", "basket", "beacon"),
    *("bishop", "bridge", "candle", "captain", "carpet", "castle", "cellar", "cherry", "clock"),
    *("copper", "cottage", "doctor", "dragon", "farmer", "feather", "fiddle", "forest", "garden"),
    *("hammer", "harbor", "helmet", "island", "kettle", "ladder", "lantern", "market", "meadow"),
    *("miller", "mirror", "monkey", "needle", "orchard", "painter", "palace", "parrot", "pepper"),
    *("pigeon", "pillow", "planet", "pocket", "rabbit", "river", "sailor", "saddle", "shadow"),
    *("spider", "temple", "tiger", "tower", "trumpet", "turtle", "valley", "violin", "wagon"),
)
VERBS = (
    *("admired", "borrowed", "carried", "counted", "followed", "found", "guarded", "hid", "lifted"),
    *("lost", "mended", "moved", "noticed", "opened", "painted", "polished", "pushed", "raised"),
    *("reached", "remembered", "sold", "touched", "traded", "watched", "weighed", "wrapped"),
)
NAMES = (
    *("Alice", "Bernard", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Irene", "Jacob"),
    *("Laura", "Martin", "Nora", "Oscar", "Paula", "Robert", "Sarah", "Thomas", "Vera", "Walter"),
)
PLACES = ("above", "behind", "below", "beside", "beyond", "near", "opposite", "outside", "under")
SYLLABLES = ("zor", "blax", "quib", "mer", "tol", "van", "dri", "fex", "nor", "pil", "gru", "lam")
"""Of invented names."""
JOINTS = ("after", "although", "and", "because", "before", "but", "until", "when", "while")


@cache
def python_prose() -> tuple[str, ...]:
    """Return the sentences of `pydoc_data.topics`, without code, tables and headings."""
    paragraphs = [text for name in sorted(topics) for text in re.split(r"\n\s*\n", topics[name])]
    sentences = (
        sentence
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.?!]) (?=[A-Z])", re.sub(r"\s+", " ", paragraph).strip())
    )
    return tuple(s for s in sentences if re.fullmatch(r"[A-Z][^=|{}<>]{20,300}[.?!]", s))
