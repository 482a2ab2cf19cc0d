# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector while engines start and end.

vLLM collects eleven times between the start of an engine and its end, and freezes and unfreezes the
objects around that. With a million objects of imported modules in sight this takes most of the time
of a tiny engine. Here they are frozen once and stay so; what an engine made is collected as ever.
"""

from __future__ import annotations

import gc

_freeze, _unfreeze = gc.freeze, gc.unfreeze


def ignore_what_is_alive() -> None:
    """Let no further collection look at the objects that there are; call it between engines."""
    gc.collect()
    _freeze()


def look_at_everything() -> None:
    """Undo that, before the process ends."""
    _unfreeze()


gc.freeze = gc.unfreeze = lambda: None
