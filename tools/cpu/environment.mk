# SPDX-License-Identifier: Apache-2.0
# Settings for vLLM on a small CPU machine, read by the Makefile and by tests/conftest.py.
# A variable that is already set in the environment keeps its value.

# Idle OpenMP threads sleep: front end, engine and workers share few cores.
OMP_WAIT_POLICY ?= passive
# No pinning, and no core set aside for the front end; the engine may use all of them.
VLLM_CPU_OMP_THREADS_BIND ?= nobind
# GiB of KV cache; the default is a share of all memory.
VLLM_CPU_KVCACHE_SPACE ?= 1
# Models are made locally; nothing is looked up elsewhere and nothing is reported.
HF_HUB_OFFLINE ?= 1
VLLM_NO_USAGE_STATS ?= 1
# Tokenizers complain about the engine's child processes otherwise.
TOKENIZERS_PARALLELISM ?= false
