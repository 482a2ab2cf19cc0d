# SPDX-License-Identifier: Apache-2.0
"""Costs and gains of the plugin on a GPU against stock vLLM, see docs/benchmarks.md."""
