# SPDX-License-Identifier: Apache-2.0
"""Shared apparatus of tests, demo, evaluation, load tests and benchmarks; imports none of them."""
