# SPDX-License-Identifier: Apache-2.0
"""Models with random gates."""

from __future__ import annotations

from pathlib import Path

from oracle.emulation import Oracle
from tests.inputs import write_gates


def gated_oracle(model: Path, gates: Path, form: str) -> Oracle:
    """Write random gates for a model to a folder; return an oracle that has them."""
    text = Oracle(model).model.config.get_text_config()
    sizes = (text.num_hidden_layers, text.hidden_size, text.num_key_value_heads)
    return Oracle(model, gates=write_gates(gates, form, *sizes))
