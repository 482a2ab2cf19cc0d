# SPDX-License-Identifier: Apache-2.0
"""Everything around the plugin: docs, configurations, images, demo, evaluation, load tests."""
