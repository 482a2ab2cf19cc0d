# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a served model reads pages, with the full cache and with parts of it."""
