# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gates`: what trained gates add to prefills, decode steps and evictions.

First counted for the shape of Qwen3-VL-8B: gates of the published width in arithmetic, and in bytes
that a decode step reads. Then timed in one engine on a CPU, a quarter of that shape in width, which
leaves the share of the gates the same. The gates are taken away from every other prompt and step.
One thread and CPU time, so that a busy machine matters less.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.measurement import Ratio
from benchmarks.models import QWEN3_VL_8B, Shape, model_folder, small_llava, tiny
from benchmarks.prompts import text_prompt
from measure.document import Table
from measure.engines import ENVIRONMENT, LocalEngine, set_environment
from training.networks import GateNetworks, Tying
from vllm_tgvkv.gates.folder import Gates, write

QUARTER = small_llava("gates", 1024, 4, 8, 2, 128, 3072, 4096, "float32")
FORMS: dict[str, tuple[Any, str]] = {
    "TrimKV": ("trimkv", ""),
    "DBTrimKV": ("dbtrimkv", ""),
    "KVzap, a hidden layer": ("kvzap", "mlp"),
    "KVzap, linear": ("kvzap", "linear"),
}
"""Methods and forms of the gates."""
BATCH, BUDGET = 8, 0.2


def written(folder: Path, method: Any, form: str, shape: Shape, width: int) -> Gates:
    """Write random gates for a model of a shape to a folder."""
    sizes = SimpleNamespace(
        hidden_size=shape.hidden, num_key_value_heads=shape.kv_heads, hidden_act="silu"
    )
    torch.manual_seed(0)
    tied: Tying = "layers" if method == "dbtrimkv" else "nothing"
    networks = GateNetworks(form or method, shape.layers, sizes, width, 10.0, tied)
    base = {"model_type": "llama", "hidden_act": "silu"}
    write(folder, networks.tensors("model.layers"), networks.config(base, 32))
    return Gates.read(str(folder), "the folder")


def counted(shape: Shape, width: int, folder: Path) -> Table:
    """Return the gates' shares of a model's arithmetic and memory, in percent.

    Prefill: multiplications of the layers' projections; attention, which is left out, makes the
    share less. Decode: bytes of the weights that a step reads; the cache, which is left out, makes
    the share less. Of a key: the 4 bytes of what a gate says of it.
    """
    head = 2 * shape.hidden * shape.vocabulary  # of bfloat16
    layers = (shape.weight_bytes_per_step - head) / 2
    per_key = 2 * shape.head_size * shape.dtype_bytes
    rows = []
    for name, (method, form) in FORMS.items():
        gates = written(folder / name, method, form, shape, width)
        multiplications = gates.num_bytes(shape.layers, shape.kv_heads, 4) / 4
        in_step = gates.num_bytes(shape.layers, shape.kv_heads, 2)
        shares = (
            multiplications / layers,
            in_step / shape.weight_bytes_per_step,
            4 / per_key,
        )
        rows.append([name, f"{in_step / 2**20:.1f}", *(f"{100 * x:.2f} %" for x in shares)])
    names = ["gates", "MiB", "multiplications of a token", "bytes of a decode step", "of a key"]
    return Table(names, rows)


class Taps:
    """The taps of an engine's layers, which can be taken away and put back."""

    def __init__(self, engine: LocalEngine) -> None:
        model = engine.worker.model_runner.get_model()
        context = engine.engine.vllm_config.compilation_config.static_forward_context
        layers = (getattr(x, "impl", None) for x in context.values())
        self._layers = [x for x in layers if getattr(x, "tap", None) is not None]
        self._taps = [layer.tap for layer in self._layers]
        self._hooks = [x._forward_pre_hooks for x in model.modules() if x._forward_pre_hooks]
        self._functions = [dict(hooks) for hooks in self._hooks]
        assert len(self._layers) == len(self._hooks) > 0

    def switch(self, on: bool) -> None:
        """Put them back, or take them away."""
        for layer, tap in zip(self._layers, self._taps, strict=True):
            layer.tap = tap if on else None
        for hooks, functions in zip(self._hooks, self._functions, strict=True):
            hooks.clear()
            hooks.update(functions if on else {})


class Timed:
    """An engine whose steps are timed with the gates and without them."""

    def __init__(self, shape: Shape, gates: Gates, folder: Path) -> None:
        self.engine = LocalEngine(
            model_folder(folder, shape),
            {"policy": "tgv", "budget": BUDGET, "gates": gates.folder},
            load_format="dummy",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=4096,
            max_num_batched_tokens=2048,
            block_size=128,
            skip_mm_profiling=True,
        )
        self.taps = Taps(self.engine)
        self._seed = 0

    def ask(self, tokens: int, answer: int) -> None:
        """Add a request that is not evicted."""
        from vllm import SamplingParams

        self._seed += 1
        sampling = SamplingParams(
            temperature=0, max_tokens=answer, ignore_eos=True, extra_args={"kv_eviction": "none"}
        )
        (rendered,) = self.engine.llm.renderer.render_cmpl([text_prompt(tokens, self._seed)])
        self.engine.engine.add_request(str(self._seed), rendered, sampling)

    def steps(self, most: int) -> float:
        """Return the CPU seconds of steps, at most until no request is left."""
        began = time.process_time()
        for _ in range(most):
            if not self.engine.engine.has_unfinished_requests():
                break
            self.engine.engine.step()
        return time.process_time() - began

    def compare(self, rounds: int, prompt: int = 0) -> Ratio:
        """Compare steps with gates and without, in random order; the first round warms up.

        Args:
            prompt: tokens of a new prompt in each, which is finished; 0: a step of what runs.
        """
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds + 1):
            for on in random.sample([True, False], 2):
                self.taps.switch(on)
                if prompt:
                    self.ask(prompt, 1)
                found[on].append(self.steps(1 << 20 if prompt else 1))
        self.taps.switch(True)
        return Ratio.of("without", found[True][1:], found[False][1:], "lower")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gates", description=__doc__)
    parser.add_argument("--only", choices=("counts", "times"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=1536, help="of a prompt")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, which measure nothing")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.only != "times":
            print(f"Counted for {QWEN3_VL_8B.name}, gates of width 512, bfloat16:\n")
            print(counted(QWEN3_VL_8B, 512, root).markdown())
        if options.only != "counts":
            shape = tiny(QUARTER) if options.smoke else QUARTER
            timed(root, shape, options.tokens, options.rounds)


def timed(root: Path, shape: Shape, tokens: int, rounds: int) -> None:
    """Print what gates of each form cost in an engine."""
    set_environment({**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"})
    torch.set_num_threads(1)
    rows = []
    for name in ("DBTrimKV", "KVzap, linear"):
        gates = written(root / f"quarter {name}", *FORMS[name], shape, 128)
        running = Timed(shape, gates, root)
        try:
            prefill = running.compare(rounds, tokens)
            for _ in range(BATCH):
                running.ask(tokens // 4, 8 * rounds + 20)
            running.steps(12)
            rows.append([name, str(prefill), str(running.compare(4 * rounds))])
        finally:
            running.engine.close()
    print(f"\nSpeed with gates against without, prompts of {tokens} tokens, {BATCH} at a time:\n")
    print(Table(["gates", "prefill", "decode"], rows, words=True).markdown())


if __name__ == "__main__":
    main()
