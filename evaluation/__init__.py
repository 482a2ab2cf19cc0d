# SPDX-License-Identifier: Apache-2.0
"""Which method at which budget: methods asked through a real engine, see docs/evaluation."""
