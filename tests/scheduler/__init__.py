# SPDX-License-Identifier: Apache-2.0
"""The real scheduler and block manager over a worker without a model."""
