# SPDX-License-Identifier: Apache-2.0
"""Interfaces for operators of a running server: metrics and HTTP routes."""
