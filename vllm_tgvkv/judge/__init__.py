# SPDX-License-Identifier: Apache-2.0
"""What eviction costs a user's own questions, asked on their running server."""
