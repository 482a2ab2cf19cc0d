# SPDX-License-Identifier: Apache-2.0
"""Which method at which budget: every method through the real engine, see docs/evaluation."""

import os

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Front end and engine in one process, on all cores; a variable that is set keeps its value."""

# torch and vLLM read these when they are imported, which any module below may do.
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
