# SPDX-License-Identifier: Apache-2.0
"""A vision-language model that reads pages: SmolLM2's real weights behind a tower of our own."""
