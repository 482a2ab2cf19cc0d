# SPDX-License-Identifier: Apache-2.0
"""The method against its definition, in every case that vllm-tgvkv checks its own methods in."""

from vllm_tgvkv.testing import check_method


def test_it_keeps_what_the_last_token_attends_to() -> None:
    assert check_method("last_row", reference=lambda attention, rows, prompt: attention[-1])
