# SPDX-License-Identifier: Apache-2.0
"""Single parts of the plugin, without an engine."""
