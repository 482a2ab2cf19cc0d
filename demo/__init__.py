# SPDX-License-Identifier: Apache-2.0
"""The demonstration model: a small LLaVA that reads rendered pages, and its training."""
