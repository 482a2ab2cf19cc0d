# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs and what it brings, measured against stock vLLM: see docs/benchmarks.md."""
