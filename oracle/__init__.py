# SPDX-License-Identifier: Apache-2.0
"""Independent references for tests and the evaluation. They share no code with the plugin.

========================  =====================================  ===================================
module                    reference                              compared with
========================  =====================================  ===================================
:mod:`oracle.attention`   attention by its definition            the statistics kernels; input of
                                                                 the methods
:mod:`oracle.statistics`  attention statistics of rows over      the statistics kernels
                          paged keys, in loops
:mod:`oracle.kernels`     each kernel, in loops over exact       the PyTorch kernels, and the Triton
                          numbers                                kernels on a GPU or interpreted
:mod:`oracle.methods`     every method, from whole attention     the policies and their decisions
                          matrices
:mod:`oracle.summaries`   summaries of evicted tokens, one token   pages of summaries, and how
                          after the other                        attention reads them
:mod:`oracle.emulation`   Hugging Face models that generate as   tokens and kept positions of real
                          if keys were evicted                   engines
:mod:`oracle.decoding`    the parts of the score of R-KV         the redundancy kernel
========================  =====================================  ===================================

Each module builds on those above it. The evaluation uses the methods to emulate pages of one token.
The package is not installed.
"""
