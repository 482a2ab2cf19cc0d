# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs and brings on a GPU, against stock vLLM: see docs/benchmarks.md."""
