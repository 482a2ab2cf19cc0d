# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` over HTTP, its flags, routes and pages."""
