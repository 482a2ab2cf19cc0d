# SPDX-License-Identifier: Apache-2.0
"""Independent references for tests and the evaluation. They share no code with the plugin.

    module        reference                                    compared with
    attention     attention by its definition                  the statistics kernels
    statistics    statistics of rows over paged keys, in loops the statistics kernels
    kernels       each kernel, in loops over exact numbers     PyTorch, Triton and CPU kernels
    decoding      the parts of the score of R-KV               the redundancy kernel
    token_sets    what the parts of a method see               input of the four below
    pooling       neighbours of each position                  the policies
    retention     tiers of positions                           the policies
    scores        a value of each token                        the policies
    allocations   shares of the pages                          the policies
    methods       every method, from whole attention matrices  policies and their decisions
    gates         gates by the authors' formulas               gates and their training
    summaries     summaries of evicted tokens, one by one      pages of summaries
    states        RetentiveKV's states as they are printed     their emulation in the evaluation
    emulation     Hugging Face models that generate as if      tokens and kept positions of engines
                  keys were evicted

Each module builds on those above it. The package is not installed.
"""
