# SPDX-License-Identifier: Apache-2.0
"""Train the gates of a model: `python -m training.gates MODEL --method kvzap --output FOLDER`.

The folder has the authors' format and a card; `--kv-eviction-gates FOLDER` serves it. A training
that was stopped goes on when the same command is run again. See docs/gates.md.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from training import kvzap, trimkv
from training.data import Prompter, TrainingError, read_examples
from training.examples import write_ready_set
from training.frozen import FrozenModel
from training.networks import GateNetworks
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
        "--tied",
        choices=("layers", "heads", "nothing"),
        help="dbtrimkv: what shares the last projection; `heads` of all layers in the paper",
    )
    group.add_argument("--loss", choices=("code", "paper"), default="code", help="whose")
    options = parser.parse_args(arguments)
    if options.tied and options.method != "dbtrimkv":
        parser.error(f"--tied is for dbtrimkv; {options.method} ties nothing, leave it out")
    options.tied = options.tied or ("layers" if options.method == "dbtrimkv" else "nothing")
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
    names = ["method", "tokens", "seed", "width", "dtype"]
    of_trimkv = ["steps", "accumulate", "memory", "rate", "bias", "tied", "loss"]
    names += ["form"] if options.method == "kvzap" else of_trimkv
    return {
        "model": str(Path(options.model).resolve()),
        "data": hashlib.sha256(data.read_bytes()).hexdigest()[:16],
        **{name: getattr(options, name) for name in names},
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
    if not options.data and not data.exists():
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
    fit = kvzap.fit if is_kvzap else trimkv.fit
    found = fit(frozen, networks, prompter, examples, run, options)
    gates = save(options.output, frozen, networks, options)
    text = card(gates, settings, found, about)
    (options.output / "README.md").write_text(text, encoding="utf-8")
    for name, value in found.items():
        run.say(f"held out: {name} {value:.4f}")
    return found


def make_networks(frozen: FrozenModel, options: argparse.Namespace) -> GateNetworks:
    """Return untrained gates for the model, which follow from the seed."""
    torch.manual_seed(options.seed)
    kind = options.form if options.method == "kvzap" else options.method
    layers, config = len(frozen.layers), frozen.config
    networks = GateNetworks(kind, layers, config, options.width, options.bias, options.tied)
    return networks.to(frozen.device, torch.promote_types(frozen.model.dtype, torch.float32))


def save(
    folder: Path, frozen: FrozenModel, networks: GateNetworks, options: argparse.Namespace
) -> Gates:
    """Write the gates in the authors' format, and return them as the plugin reads them."""
    config = json.loads(frozen.model.config.to_json_string(use_diff=False))
    base = {**config, "base_model": options.model}
    write(folder, networks.tensors(frozen.prefix), networks.config(base, options.memory))
    gates = Gates.read(str(folder), "--output")
    gates.check_model(len(frozen.layers), networks.hidden_size, networks.kv_heads)
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
