# SPDX-License-Identifier: Apache-2.0
"""Folders of gates: small trained networks that tell from a token's hidden state what it is worth.

A gate belongs to one layer. It reads what the projection of queries, keys and values reads, the
hidden state after the input norm, and gives one number for each KV head. Two formats are known,
both from the methods' authors:

    TrimKV, DBTrimKV   config.json          retention_gate: rg or rg10, hidden_act
                       trimkv_weights.pth   ...layers.{i}.self_attn.retention_gate.*
    KVzap              config.json          model_type: kvzap
                       model.safetensors    layers.{i}.*

`python -m vllm_tgvkv.gates FOLDER --output OTHER` rewrites a .pth file, which is a pickle, as
safetensors. Both are read; of a pickle, nothing but tensors is.
"""

from __future__ import annotations

import itertools
import json
import pickle
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_tgvkv.kernels.gates import ACTIVATIONS, LayerGate
from vllm_tgvkv.shared.errors import EvictionConfigError, choose, quoted

GateKind = Literal["trimkv", "kvzap"]
"""Meaning of the numbers: log beta, the logarithm of the share that a token keeps with each further
token, or a score."""

AUTHORS = {"trimkv": "TrimKV or DBTrimKV", "kvzap": "KVzap"}
"""Names of the kinds, for messages."""

_LAYERS = {
    "rg": (("linear1.weight", "linear1.bias"), ("linear2.weight", "bias")),
    "rg10": (
        ("linear1.weight", "linear1.bias"),
        ("linear2.weight", "linear2.bias"),
        ("linear3.weight", "bias"),
    ),
    "mlp": (("0.weight", "0.bias"), ("2.weight", "2.bias")),
    "linear": (("weight", "bias"),),
}
"""Weights and biases of each form of a gate, in the order in which they are applied."""

_KEYS = {
    "trimkv": re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.retention_gate\.(.+)$"),
    "kvzap": re.compile(r"^layers\.(\d+)\.(.+)$"),
}
"""A tensor's layer and its name in the gate."""

FILES = {
    "trimkv": ("trimkv_weights.safetensors", "trimkv_weights.pth"),
    "kvzap": ("model.safetensors",),
}


@dataclass(frozen=True)
class Gates:
    """A folder of gates that was checked, and how the methods use them."""

    folder: str
    file: str
    """Name of the file of weights."""
    kind: GateKind
    form: str
    """A key of `_LAYERS`."""
    activation: str
    layers: tuple[int, ...]
    """Indices of the layers that have a gate, ascending."""
    hidden_size: int
    width: int
    """Values between two projections; 0 if there is one only."""
    kv_heads: int
    lookahead: int = 2
    """n, next tokens over which the retention of a token is averaged."""
    age_offset: int = 0
    """The newest token is taken to be this many tokens older than it is."""

    @classmethod
    def read(cls, folder: str, source: str, **options: int) -> Gates:
        """Check a folder without reading its weights; `source` names its setting in messages.

        Args:
            options: fields that are not from the folder.

        Raises:
            EvictionConfigError: if a file is missing or has another form.
        """
        where = f"{source} is {quoted(folder)}"
        try:
            config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise EvictionConfigError(
                f"{where}: its config.json cannot be read ({_reason(error)}); give the folder of a "
                "checkpoint of TrimKV, DBTrimKV or KVzap"
            ) from error
        try:
            kind, activation, forms = _form(config)
            file = next((name for name in FILES[kind] if Path(folder, name).is_file()), None)
            if file is None:
                names = " or ".join(FILES[kind])
                raise ValueError(f"it has no {names}; download the checkpoint again")
            tensors = read_tensors(Path(folder, file))
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            layers, form, (first, *others) = _structure(shapes, kind, forms)
        except ValueError as error:
            raise EvictionConfigError(f"{where}: {error}") from error
        return cls(
            folder=folder,
            file=file,
            kind=kind,
            form=form,
            activation=activation,
            layers=layers,
            hidden_size=first[1],
            width=first[0] if others else 0,
            kv_heads=(others or [first])[-1][0],
            **options,
        )

    def check_model(self, layers: int, hidden_size: int, kv_heads: int) -> None:
        """Check that the gates fit a model of this shape.

        Raises:
            EvictionConfigError: if they are not.
        """
        where = f"kv_eviction.gates is {quoted(self.folder)}"
        if missing := sorted(set(range(layers)) - set(self.layers)):
            raise EvictionConfigError(
                f"{where}, which has no gate for layer {missing[0]} of this model (it has "
                f"{len(self.layers)} gates, the model {layers} layers): give the gates that were "
                "trained for this model"
            )
        found = (len(self.layers), self.hidden_size, self.kv_heads)
        if found != (layers, hidden_size, kv_heads):
            raise EvictionConfigError(
                f"{where}, made for {found[0]} layers with hidden states of {found[1]} values and "
                f"{found[2]} KV heads, and this model has {layers} layers, {hidden_size} values "
                f"and {kv_heads} KV heads: give the gates that were trained for this model"
            )

    def load(
        self, layers: Collection[int], heads: slice, dtype: torch.dtype, device: torch.device | str
    ) -> dict[int, LayerGate]:
        """Load the gates of some layers, for some of their KV heads.

        Raises:
            EvictionConfigError: if a weight is not finite.
        """
        tensors = read_tensors(Path(self.folder, self.file))
        found = {}
        for layer, names in _by_layer(tensors, self.kind).items():
            if layer not in layers:
                continue
            linears: list[tuple[Tensor, Tensor]] = []
            for part in _LAYERS[self.form]:
                is_last = part == _LAYERS[self.form][-1]
                rows, kept_as = (heads, torch.float32) if is_last else (slice(None), dtype)
                weight, bias = (
                    tensors[names[name]][rows].to(device, kept_as, copy=True) for name in part
                )
                linears.append((weight, bias))
                if not all(bool(x.isfinite().all()) for x in linears[-1]):
                    raise EvictionConfigError(
                        f"kv_eviction.gates is {quoted(self.folder)}: {part[0]} or {part[1]} of "
                        f"layer {layer} has values that are not finite; train or download it again"
                    )
            found[layer] = LayerGate(self.kind == "trimkv", self.activation, tuple(linears))
        return found

    def num_bytes(self, num_layers: int, num_heads: int, element_bytes: int) -> int:
        """Return the bytes of the weights of some layers, for `num_heads` KV heads of each."""
        num_inner = len(_LAYERS[self.form]) - 1
        width = self.width or self.hidden_size
        inner = num_inner and (self.hidden_size + 1) + (num_inner - 1) * (width + 1)
        return num_layers * (element_bytes * width * inner + 4 * num_heads * (width + 1))


def write(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], file: str | None = None
) -> None:
    """Write a folder of gates, by default as their authors do.

    `tensors` have the names of the format, `config` its fields; `file` is another name of the file
    of weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind: GateKind = "kvzap" if config.get("model_type") == "kvzap" else "trimkv"
    file = file or FILES[kind][-1]
    text = json.dumps(dict(config), indent=2)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")
    # Tied layers share a tensor, which safetensors refuses.
    plain = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(plain, folder / file)
    else:
        torch.save(plain, folder / file)


def _reason(error: Exception) -> str:
    return error.strerror or "" if isinstance(error, OSError) else str(error)


def _form(config: Any) -> tuple[GateKind, str, tuple[str, ...]]:
    """Return the kind of a folder's gates, their activation, and the forms that they may have."""
    if not isinstance(config, Mapping):
        raise ValueError("its config.json is no mapping; give the folder of a checkpoint")
    if config.get("model_type") == "kvzap":
        return "kvzap", "gelu", ("mlp", "linear")
    text = config.get("text_config")
    fields = {**config, **(text if isinstance(text, Mapping) else {})}
    gate, activation = fields.get("retention_gate"), fields.get("hidden_act")
    if gate not in ("rg", "rg10"):
        raise ValueError(
            f"retention_gate of its config.json is {quoted(gate)}, and model_type is not kvzap; "
            "give a checkpoint of TrimKV (rg), DBTrimKV (rg10) or KVzap"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act of its config.json is {quoted(activation)}: "
            f"{choose(activation, list(ACTIVATIONS))}"
        )
    return "trimkv", activation, (gate,)


def read_tensors(file: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file, which are read from it once they are used."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file.name} cannot be read ({reason}); download it again") from error
    if not isinstance(loaded, Mapping) or not all(isinstance(x, Tensor) for x in loaded.values()):
        raise ValueError(f"{file.name} is no mapping of names to tensors; download it again")
    return loaded


def _by_layer(names: Iterable[str], kind: GateKind) -> dict[int, dict[str, str]]:
    """Return the full names of each layer's tensors by their names in the gate.

    Raises:
        ValueError: for a name that belongs to no gate.
    """
    found: dict[int, dict[str, str]] = {}
    for name in names:
        match = _KEYS[kind].search(name)
        if match is None:
            raise ValueError(
                f"{quoted(name)} is no tensor of a gate of {AUTHORS[kind]}; give a file of gates "
                "alone"
            )
        found.setdefault(int(match[1]), {})[match[2]] = name
    return dict(sorted(found.items()))


def _structure(
    shapes: Mapping[str, tuple[int, ...]], kind: GateKind, forms: Sequence[str]
) -> tuple[tuple[int, ...], str, list[tuple[int, ...]]]:
    """Return the layers of a file, the form of their gates, and the shapes of their weights."""
    by_layer = _by_layer(shapes, kind)
    if not by_layer:
        raise ValueError("its file of weights is empty; download it again")
    first = next(iter(by_layer))
    form = next((f for f in forms if set(by_layer[first]) == _names(f)), forms[0])
    wanted: list[tuple[int, ...]] = []
    for layer, names in by_layer.items():
        if different := sorted(set(names) ^ _names(form)):
            raise ValueError(
                f"the gate of layer {layer} {'has' if different[0] in names else 'lacks'} "
                f"{different[0]}, unlike the form {form!r}; give a checkpoint of "
                f"{AUTHORS[kind]}"
            )
        found, biases = ([shapes[names[x]] for x in of] for of in zip(*_LAYERS[form], strict=True))
        wanted = wanted or found
        chained = all(one[:1] == other[1:] for one, other in itertools.pairwise(found))
        if (
            found != wanted
            or not chained
            or any(len(shape) != 2 or 0 in shape for shape in found)
            or biases != [shape[:1] for shape in found]
        ):
            raise ValueError(
                f"the gate of layer {layer} has weights of {found} and biases of {biases}, which "
                f"do not fit each other or those of layer {first}; download it again"
            )
    return tuple(by_layer), form, wanted


def _names(form: str) -> set[str]:
    return {name for linear in _LAYERS[form] for name in linear}
