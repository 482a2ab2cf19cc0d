# SPDX-License-Identifier: Apache-2.0
"""Cross-compile every kernel, without a GPU, and report registers and spills.

`python -m vllm_tgvkv.kernels.gpu.compile` compiles the `variants()` of each module of this
package for compute capabilities 8.0, 9.0, 10.0 and 12.0. It fails if a kernel does not build or
spills registers to local memory.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import multiprocessing
import os
import pkgutil
import re
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

PACKAGE = "vllm_tgvkv.kernels.gpu"
CAPABILITIES = (80, 90, 100, 120)

#: Bytes of shared memory that a program may use; a launch with more fails.
_SHARED_LIMIT = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}

_LOG_OF_PTXAS = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Variant:
    """A specialisation of a kernel, as a launch makes it.

    Attributes:
        name: unique among the kernel's variants, e.g. `"bf16 D128 N16"`.
        kernel: the `@triton.jit` function.
        signature: type of every run-time argument: `"*bf16"`, `"i32"`, `"fp32"`.
        constants: values of the `tl.constexpr` arguments, and of others that Triton turns into
            constants at a launch: integers equal to 1 (a unit stride) and `None`.
        aligned: arguments that are a multiple of 16, pointers in bytes and integers in value;
            Triton specialises on it.
        options: of the launch, like `num_warps`.
        spill_limit: accepted bytes of spill stores; explain any value other than 0.
        capabilities: of the GPUs that launch it, where that is not every one.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: Collection[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    spill_limit: int = 0
    capabilities: Collection[int] = CAPABILITIES

    @classmethod
    def of_launch(
        cls, name: str, kernel: Any, args: Sequence[Any], named: dict[str, Any], spill_limit: int
    ) -> Variant:
        """Return the specialisation that Triton chooses for these arguments."""
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        signature, constants, aligned = {}, {}, []
        for argument in kernel.params:
            value = values.pop(argument.name)
            is_one = type(value) is int and value == 1 and not argument.do_not_specialize
            if argument.is_constexpr or value is None or is_one:
                constants[argument.name] = value
                continue
            if isinstance(value, torch.Tensor):
                kind, number = f"*{TYPES[value.dtype]}", value.data_ptr()
            else:
                kind, number = ("i32", value) if isinstance(value, int) else ("fp32", 1)
            signature[argument.name] = "i64" if kind == "i32" and number >= 1 << 31 else kind
            looks = not (argument.do_not_specialize or argument.do_not_specialize_on_alignment)
            if looks and number % 16 == 0:
                aligned.append(argument.name)
        return cls(name, kernel, signature, constants, aligned, values, spill_limit)

    @property
    def kernel_name(self) -> str:
        """Return the kernel's name."""
        return str(self.kernel.__name__)

    def source(self) -> Any:
        """Return the `ASTSource` that Triton compiles at a launch.

        Raises:
            ValueError: an argument has neither a type nor a value, or does not exist.
        """
        from triton.compiler import ASTSource

        arguments = list(self.kernel.arg_names)
        types = {**self.signature, **dict.fromkeys(self.constants, "constexpr")}
        if wrong := set(types).union(self.aligned).symmetric_difference(arguments):
            raise ValueError(f"missing or unknown arguments: {', '.join(sorted(wrong))}")
        position = {name: (i,) for i, name in enumerate(arguments)}
        return ASTSource(
            self.kernel,
            {name: types[name] for name in arguments},
            constexprs={position[name]: value for name, value in self.constants.items()},
            attrs={position[name]: [["tt.divisibility", 16]] for name in self.aligned},
        )


def launches(
    module: str, name: str, call: Callable[[], object], spill_limit: int = 0
) -> list[Variant]:
    """Return the variants that a call launches of a module's kernels, which do not run.

    The tensors of the call may be of the device `meta`.
    """
    found: list[Variant] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **named: found.append(
                Variant.of_launch(name, self.kernel, args, named, spill_limit)
            )

    names = vars(sys.modules[module])
    kernels = {key: value for key, value in names.items() if key.endswith("_kernel")}
    names.update({key: Recorder(kernel) for key, kernel in kernels.items()})
    try:
        call()
    finally:
        names.update(kernels)
    return found


_HEADER = (
    f"{'module':<12}  {'kernel':<22}  {'variant':<37}  {'cc':>3} {'regs':>5} {'shared':>7} "
    f"{'stack':>6} {'spills':>9} {'s':>6}"
)


def build(module: str, variant: Variant, cc: int) -> tuple[str, bool]:
    """Compile `variant` for compute capability `cc`; return a row of the table and if it passes.

    Spills are taken from ptxas's report, since the stack frame also includes arrays that are
    indexed at run time.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    begin = time.perf_counter()
    log = io.StringIO()
    error, shared = "", 0
    # Use no cached build, since it has no log, and leave none behind.
    with (
        tempfile.TemporaryDirectory() as cache,
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        triton.knobs.cache.dir = cache
        triton.knobs.nvidia.dump_ptxas_log = True
        try:
            built = triton.compile(
                variant.source(),
                target=GPUTarget("cuda", cc, 32),
                options=dict(variant.options),
            )
            shared = built.metadata.shared
            if shared > _SHARED_LIMIT.get(cc, shared):
                error = f"{shared} bytes of shared memory, the GPU has {_SHARED_LIMIT[cc]}"
        except Exception as failure:  # shown in the table; the other kernels are still built
            error = f"{type(failure).__name__}: {failure}".strip()
    found = _LOG_OF_PTXAS.search(log.getvalue())
    if not found and not error:
        error = "no report of registers in the log of ptxas"
    # Two spaces between columns, for names of any length.
    name = module.rpartition(".")[2]
    head = f"{name:<12}  {variant.kernel_name:<22}  {variant.name or '-':<37}  {cc:>3}"
    if error or not found:
        return f"{head}  FAILED: {error.splitlines()[-1]}", False
    # Of a thread: registers, and bytes of local memory.
    registers, stack, stores, loads = (
        int(found[key]) for key in ("registers", "stack", "stores", "loads")
    )
    accepted = max(stores, loads) <= variant.spill_limit
    verdict = "" if accepted else f"  SPILLS, limit {variant.spill_limit}"
    seconds, spills = time.perf_counter() - begin, f"{stores}/{loads}"
    row = f"{head} {registers:>5} {shared:>7} {stack:>6} {spills:>9} {seconds:>6.1f}{verdict}"
    return row, accepted


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line per build, and return 1 if one failed or spills too much."""
    parser = argparse.ArgumentParser(prog=f"python -m {PACKAGE}.compile", description=__doc__)
    parser.add_argument("--cc", type=int, nargs="+", default=CAPABILITIES, help="capabilities")
    parser.add_argument("--only", help="only modules, kernels or variants whose name contains this")
    parser.add_argument("--module", nargs="+", help="modules to compile instead of the package's")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    files = pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__, f"{PACKAGE}.")
    names = options.module or [file.name for file in files]
    modules = [
        module for name in names if hasattr(module := importlib.import_module(name), "variants")
    ]
    tasks = [
        (module.__name__, place, cc)
        for module in modules
        for place, variant in enumerate(module.variants())
        for cc in options.cc
        if cc in variant.capabilities or cc not in CAPABILITIES
        if not options.only
        or options.only in f"{module.__name__}\n{variant.kernel_name}\n{variant.name}"
    ]
    print(_HEADER, flush=True)
    accepted = []
    # Fresh interpreters: forking a process in which torch or LLVM has threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(options.jobs, len(tasks))), mp_context=context) as pool:
        for row, passes in pool.map(_build_task, *zip(*tasks, strict=True)) if tasks else ():
            print(row, flush=True)
            accepted.append(passes)
    print(f"{len(accepted)} builds, {accepted.count(False)} not accepted")
    return 0 if accepted and all(accepted) else 1


def _build_task(module: str, place: int, cc: int) -> tuple[str, bool]:
    """Compile the variant with index `place` of a module, in a worker process."""
    return build(module, list(importlib.import_module(module).variants())[place], cc)


if __name__ == "__main__":
    sys.exit(main())
