# SPDX-License-Identifier: Apache-2.0
"""Independent references that tests and the evaluation compare with. Nothing here is shipped."""
