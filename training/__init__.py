# SPDX-License-Identifier: Apache-2.0
"""Training of gates for `trimkv`, `dbtrimkv` and `kvzap`: `python -m training.gates`."""
