# SPDX-License-Identifier: Apache-2.0
"""Train the gates of a model: `python -m training.gates MODEL --method kvzap --output FOLDER`.

The folder has the authors' format and a card; `--kv-eviction-gates FOLDER` serves it. A training
that was stopped goes on when the same command is run again. See docs/gates.md.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from training import kvzap, trimkv
from training.examples import write_ready_set
from training.frozen import FrozenModel
from training.lines import Example, read_examples
from training.networks import GateNetworks, gate_shape, make
from training.prompts import Prompter, TrainingError
from training.run import Run, Stopped
from vllm_tgvkv.gates.folder import Gates, write

METHODS = ("kvzap", "trimkv", "dbtrimkv")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.gates", description=__doc__)
    parser.add_argument("model", help="folder of the model, as transformers loads it")
    parser.add_argument("--method", required=True, choices=METHODS)
    parser.add_argument("--output", type=Path, help="folder to write; build/gates/MODEL-METHOD")
    parser.add_argument("--data", type=Path, help="JSON lines; by default a ready set of texts")
    parser.add_argument("--tokens", type=int, default=512, help="of a text, or of a sequence")
    parser.add_argument("--minutes", type=float, help="stop then; run again to go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=512, help="of hidden layers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="of the model; float32 on CPU, otherwise bfloat16")
    parser.add_argument("--form", choices=("mlp", "linear"), default="mlp", help="of kvzap")
    group = parser.add_argument_group("trimkv, dbtrimkv")
    group.add_argument("--steps", type=int, default=500)
    group.add_argument("--accumulate", type=int, default=4, help="sequences of a step")
    group.add_argument("--memory", type=int, default=32, help="budget, in tokens for each head")
    group.add_argument("--rate", type=float, default=trimkv.RATE, help="learning rate")
    group.add_argument("--bias", type=float, default=10.0, help="first bias; 18 in the paper")
    group.add_argument(
        "--untied", action="store_true", help="dbtrimkv: a last projection for each layer"
    )
    options = parser.parse_args(arguments)
    if options.untied and options.method != "dbtrimkv":
        parser.error(f"--untied is for dbtrimkv; {options.method} ties nothing, leave it out")
    if not Path(options.model, "config.json").is_file():
        parser.error(f"{options.model} has no config.json; give the folder of a model")
    for name in ("tokens", "width", "steps", "accumulate", "memory"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it is at least 1")
    if options.output is None:
        name = Path(options.model).resolve().name
        options.output = Path("build", "gates", f"{name}-{options.method}")
    if options.dtype is None:
        options.dtype = "float32" if options.device == "cpu" else "bfloat16"
    return options


def described(options: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Return what makes one training differ from another."""
    of_trimkv = ("steps", "accumulate", "memory", "rate", "bias", "untied")
    of_method = ("form",) if options.method == "kvzap" else of_trimkv
    return {
        "model": str(Path(options.model).resolve()),
        "data": hashlib.sha256(data.read_bytes()).hexdigest()[:16],
        **{name: getattr(options, name) for name in ("method", "tokens", "seed", "width", "dtype")},
        **{name: getattr(options, name) for name in of_method},
    }


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train as the options say and write the folder; return the held-out numbers.

    Raises:
        Stopped: when the time is over.
        TrainingError: for a model that gates cannot be trained for.
        ValueError: for wrong data, or a folder of another training.
    """
    prompter = Prompter(options.model, options.tokens)
    data = options.data or options.output / "examples.jsonl"
    if options.data is None and not data.exists():
        write_ready_set(data, prompter)
    examples = training, held_out = read_examples(data)
    settings = described(options, data)
    run = Run(options.output, options.minutes, settings)
    frozen = FrozenModel.load(options.model, options.device, getattr(torch, options.dtype))
    networks = make_networks(frozen, options)
    # Untrained gates first: what the plugin refuses shows before the hours of training.
    with tempfile.TemporaryDirectory() as scratch:
        save(Path(scratch), frozen, networks, options)
    is_kvzap = options.method == "kvzap"
    frozen.check(prompter.repeated(training[0]) if is_kvzap else prompter.dialogue(training[0]))
    size = sum(parameter.numel() for parameter in networks.parameters())
    about = f"{len(training)} examples, {len(held_out)} held out, {size:,} parameters"
    run.say(about)
    fit = fit_kvzap if is_kvzap else fit_trimkv
    found = fit(frozen, networks, prompter, examples, run, options)
    gates = save(options.output, frozen, networks, options)
    text = card(gates, settings, found, about)
    (options.output / "README.md").write_text(text, encoding="utf-8")
    for name, value in found.items():
        run.say(f"held out: {name} {value:.4f}")
    return found


def make_networks(frozen: FrozenModel, options: argparse.Namespace) -> GateNetworks:
    """Return untrained gates for the model."""
    shape = gate_shape(
        options.method,
        options.form,
        len(frozen.layers),
        frozen.config,
        options.width,
        options.bias,
        options.untied,
    )
    dtype = torch.promote_types(frozen.model.dtype, torch.float32)
    return make(shape, options.seed, dtype, frozen.device)


Split = tuple[Sequence[Example], Sequence[Example]]
"""Examples for training, and held-out ones."""


def fit_kvzap(
    frozen: FrozenModel,
    networks: GateNetworks,
    prompter: Prompter,
    examples: Split,
    run: Run,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Collect scores, fit the gates to them, and return how well held-out ones are predicted."""
    training, held_out = (
        kvzap.collect(frozen, prompter, part, run, options.seed, name)
        for part, name in zip(examples, ("training", "held_out"), strict=True)
    )
    if options.form == "linear":
        kvzap.fit_linear(networks, training)
    else:
        kvzap.fit_mlp(networks, training, run, options.seed)
    return kvzap.judge(networks, held_out, training)


def fit_trimkv(
    frozen: FrozenModel,
    networks: GateNetworks,
    prompter: Prompter,
    examples: Split,
    run: Run,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Train the gates, and return the mean losses of the held-out examples."""
    training, held_out = examples
    trimkv.fit(
        frozen,
        networks,
        prompter,
        training,
        run,
        steps=options.steps,
        accumulate=options.accumulate,
        memory=options.memory,
        rate=options.rate,
        seed=options.seed,
    )
    return trimkv.judge(frozen, networks, prompter, held_out, options.memory)


def save(
    folder: Path, frozen: FrozenModel, networks: GateNetworks, options: argparse.Namespace
) -> Gates:
    """Write the gates in the authors' format, and return them as the plugin reads them."""
    base = {**frozen.base, "base_model": options.model}
    write(folder, networks.tensors(frozen.prefix), networks.config(base, options.memory))
    gates = Gates.read(str(folder), "--output")
    config = frozen.config
    gates.check_model(len(frozen.layers), config.hidden_size, config.num_key_value_heads)
    return gates


def card(gates: Gates, settings: Mapping[str, Any], found: Mapping[str, float], about: str) -> str:
    """Return the text of the card, README.md."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    rows = [f"| {name} | {value:.4f} |" for name, value in found.items()]
    rows += [f"| {name} | `{value}` |" for name, value in settings.items()]
    return f"""\
# Gates for `{settings["method"]}`

Trained by `python -m training.gates` of vllm-tgvkv for the model `{Path(settings["model"]).name}`:
{len(gates.layers)} layers, {gates.kv_heads} KV heads, hidden states of {gates.hidden_size} values;
form `{gates.form}`. {about}; {", ".join(versions)}.

    vllm serve MODEL --kv-eviction {settings["method"]} --kv-eviction-gates FOLDER

Losses of held-out examples, which are not the accuracy of answers after an eviction, and settings:

| | |
|---|---|
{chr(10).join(rows)}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        train(options)
    except Stopped as stopped:
        print(f"stopped: {stopped}; run the same command to go on")
        return
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from the last state")
    except (TrainingError, ValueError, OSError) as error:
        sys.exit(f"gates: {error}")
    print(f"{options.output}: written")


if __name__ == "__main__":
    main()
