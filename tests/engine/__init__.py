# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines in this process."""
