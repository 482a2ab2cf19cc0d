# SPDX-License-Identifier: Apache-2.0
"""Load tests of a served endpoint, stock against evicting, driven by `vllm bench serve`."""
