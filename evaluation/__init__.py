# SPDX-License-Identifier: Apache-2.0
"""Which method at which budget: every method through a real engine, see docs/evaluation."""

from measure.engines import ENVIRONMENT, set_environment

# Any module below may import torch and vLLM, which read these then.
set_environment({**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"})
