# SPDX-License-Identifier: Apache-2.0
"""KV-cache eviction for vision-language models in stock vLLM, per layer and per head."""
