# SPDX-License-Identifier: Apache-2.0
"""What operators touch of a running server: metrics and HTTP routes."""
