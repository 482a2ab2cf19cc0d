# SPDX-License-Identifier: Apache-2.0
"""Statistics of attention that the papers print, over prompts that SmolLM2 reads in transformers.

The right answer follows each prompt, so that one pass has the rows of prefill and decoding.
A is the attention of one layer, `[Q, n, n]` of Q query heads and n tokens, of which m are the
prompt. A statistic sees A layer by layer; of what it took from all layers it makes points of curves
and numbers of the prompt. Papers and their claims are in `evaluation.papers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evaluation.arms import ROOT
from evaluation.eager import EagerModel
from evaluation.engine import TextWriter, turns
from evaluation.results import estimates
from measure.statistics import bootstrap
from reader.tasks import PageQuestion
from vllm_tgvkv.gates.folder import Gates
from vllm_tgvkv.judge.statistics import Estimate
from vllm_tgvkv.kernels.gates import ACTIVATIONS, LayerGate

LEAST = 0.01
"""VL-Cache's p: of a row, what is below this part of its maximum counts as nothing."""
BUDGET = 0.1
"""Share of the tokens that VL-Cache's hit rate and coverage choose."""
KEPT = 0.2
"""Share of the prompt's tokens, over all layers and heads, that gates keep."""
WINDOW = 32
NUMBERS = (4, 8, 16, 32)
"""K of the survival: 1 / 256 to 1 / 32 of a prompt, as the paper's 64 to 512 of 16,384."""
MASSES = (0.9, 0.95, 0.99)
HORIZONS = (1, 8, 32, 64, 128, 256, 512)
QUARTER = 256
"""The horizon that is judged, a quarter of a prompt as in the paper."""


@dataclass(frozen=True)
class Reading:
    """A prompt of m tokens with its right answer, n together."""

    prompt_tokens: int
    is_vision: Tensor
    """bool `[n]`."""
    is_useful: Tensor
    """bool `[n]`, the sentence that has the answer; of texts only."""
    log_betas: Tensor
    """The gates' output for each token, `[L, H, n]`; empty without gates."""

    @property
    def question(self) -> Tensor:
        """Positions of the text after the last vision token, in the prompt."""
        places = self.is_vision.nonzero().flatten()
        start = int(places[-1]) + 1 if len(places) else 0
        return torch.arange(start, self.prompt_tokens)


Layer = dict[str, Tensor]
Curves = dict[tuple[str, str, float], float]
"""By panel, curve and place on the x axis."""
Values = dict[str, float]
Prompted = tuple[Curves, Values]
"""The numbers of a statistic for one prompt."""


@dataclass(frozen=True)
class Statistic:
    """The part of a layer's A that it needs, and the numbers from all layers' parts, stacked."""

    of_layer: Callable[[Tensor, Reading], Layer]
    of_prompt: Callable[[Layer, Reading], Prompted]
    axis: str = "layer"
    """Label of x."""
    needs_gates: bool = False


# -- VL-Cache -------------------------------------------------------------------------------


def sparsity(rows: Tensor, positions: Tensor) -> Tensor:
    """Return the share of the entries that rows see which are below LEAST of the row's maximum.

    VL-Cache, equations 1 and 2.

    Args:
        rows: `[Q, R, n]`, zero where a row does not see a key.
        positions: int64 `[R]`.

    Returns:
        `[Q]`.
    """
    visible = torch.arange(rows.shape[-1]) <= positions[:, None]
    below = (rows < LEAST * rows.amax(-1, keepdim=True)) & visible
    return below.sum((1, 2)) / visible.sum()


def _sparsities(attention: Tensor, reading: Reading) -> Layer:
    m, n = reading.prompt_tokens, attention.shape[-1]
    rows = {
        "prefill": torch.arange(m),
        "question": reading.question,
        "decoding": torch.arange(m, n),
    }
    return {name: sparsity(attention[:, places], places) for name, places in rows.items()}


def _sparsity_values(layers: Layer, reading: Reading) -> tuple[Curves, Values]:
    means = {name: each.mean(1) for name, each in layers.items()}
    prefill, decoding = means["prefill"], means["decoding"]
    return _by_layer("share of A below 1 % of its row's maximum", means), {
        "first": float(prefill[2:].mean() - prefill[:2].mean()),
        "follows": _correlation(prefill, decoding),
        "second": float(decoding[1] - prefill[1]),
        "question": _correlation(means["question"], decoding) - _correlation(prefill, decoding),
        "least": float(prefill.min()),
        "most": float(prefill.max()),
    }


def hits(scores: Tensor, wanted: Tensor, number: int) -> Tensor:
    """Return which share of the best keys by `wanted` are among the best by `scores`.

    VL-Cache, definition 3.1. Arguments `[Q, m]`; returns `[Q]`.
    """
    best = [_best(each, number) for each in (scores, wanted)]
    return (best[0] & best[1]).sum(-1) / number


def _hits(attention: Tensor, reading: Reading) -> Layer:
    m = reading.prompt_tokens
    rows: dict[str, slice | Tensor] = {
        "all rows": slice(m),
        f"last {WINDOW} rows": slice(m - WINDOW, m),
        "rows after vision": reading.question,
    }
    wanted = attention[:, m, :m]
    return {
        name: hits(attention[:, places, :m].sum(1), wanted, int(BUDGET * m))
        for name, places in rows.items()
    }


def _hit_values(layers: Layer, reading: Reading) -> tuple[Curves, Values]:
    means = {name: each.mean(1) for name, each in layers.items()}
    every, window, question = (float(each.mean()) for each in means.values())
    return _by_layer("hit rate at 10 %", means), {
        "question-all": question - every,
        "question-window": question - window,
        "window-all": window - every,
    }


def contribution(rows: Tensor, is_kind: Tensor, is_prompt: Tensor) -> Tensor:
    """Return the share of tokens of a kind in what the rows see of the prompt.

    What is below LEAST of a row's maximum does not count, nor do rows that then see nothing of the
    prompt. VL-Cache, equation 3.

    Args:
        rows: `[Q, R, n]`.
        is_kind, is_prompt: bool `[n]`.

    Returns:
        `[Q]`, the mean over the rows.
    """
    left = torch.where(rows >= LEAST * rows.amax(-1, keepdim=True), rows, 0)
    return (left[..., is_kind & is_prompt].sum(-1) / left[..., is_prompt].sum(-1)).nanmean(1)


def coverage(rows: Tensor, is_kind: Tensor, is_prompt: Tensor, number: int) -> Tensor:
    """Return the share of tokens of a kind among the prompt's tokens in each row's best keys.

    VL-Cache, equations 4 and 5; arguments as above.
    """
    best = _best(rows, number)
    return (best[..., is_kind & is_prompt].sum(-1) / best[..., is_prompt].sum(-1)).mean(1)


def _modalities(attention: Tensor, reading: Reading) -> Layer:
    m, n = reading.prompt_tokens, attention.shape[-1]
    rows, is_prompt = attention[:, m:], torch.arange(n) < m
    given = (rows, reading.is_vision, is_prompt)
    return {
        "contribution": contribution(*given),
        "coverage": coverage(*given, int(BUDGET * n)),
        "vision among the prompt's tokens": reading.is_vision[:m].float().mean()[None],
    }


def _modality_values(layers: Layer, reading: Reading) -> tuple[Curves, Values]:
    means = {name: each.nanmean(1) for name, each in layers.items()}
    seen, chosen, _ = means.values()
    third = len(seen) // 3
    return _by_layer("share of vision", means), {
        "first": float(seen[0] - 0.5),
        "later": float(0.5 - seen[2:].mean()),
        "middle": float((chosen - seen)[third : 2 * third].mean()),
    }


# -- AirCache -------------------------------------------------------------------------------


def strength_and_skewness(attention: Tensor, question: Tensor, is_vision: Tensor) -> Tensor:
    """Return AirCache's strength and skewness of a layer, `[2]`; equations 5 to 10."""
    last = attention[:, question[-1], question]
    votes = (last / last.sum(-1, keepdim=True)).mean(0)
    elite = question[votes >= 0.9 * votes.max()]
    seen = is_vision.index_fill(0, elite, True)
    rows = attention[:, elite] * seen
    scores = (rows / rows.sum(-1, keepdim=True)).mean((0, 1))[is_vision].double()
    centred = (scores - scores.mean()) / scores.std(correction=0)
    return torch.stack((scores.sum(), centred.pow(3).mean().clamp(min=0)))


def divergence(first: Tensor, second: Tensor) -> float:
    """Return the Jensen-Shannon divergence of two distributions, between 0 and 1."""
    mean = (first + second) / 2
    entropies = (torch.special.entr(each).sum() for each in (mean, first, second))
    of_mean, of_first, of_second = entropies
    return float((of_mean - (of_first + of_second) / 2) / torch.log(torch.tensor(2.0)))


def _strengths(attention: Tensor, reading: Reading) -> Layer:
    m = reading.prompt_tokens
    vision = reading.is_vision[:m]
    return {"both": strength_and_skewness(attention[:, :m, :m], reading.question, vision)}


def _strength_values(layers: Layer, reading: Reading) -> tuple[Curves, Values]:
    strength, skewness = (layers["both"] / layers["both"].sum(0)).T
    both, equal = (strength + skewness) / 2, torch.full_like(strength, 1 / len(strength))
    shares = {"strength": strength, "skewness": skewness, "both": both, "equal": equal}
    return _by_layer("share of the vision budget", shares), {
        "strength": divergence(strength, equal),
        "skewness": divergence(skewness, equal),
        "both": divergence(both, equal),
        "between": divergence(strength, skewness),
    }


# -- Make Each Token Count ------------------------------------------------------------------


def _useful(attention: Tensor, reading: Reading) -> Layer:
    # A copy: a part of A would keep the whole of every layer.
    return {"rows": attention[:, reading.prompt_tokens :].clone()}


def dilution(rows: Tensor, kept: Tensor, is_useful: Tensor) -> Tensor:
    """Return the share of attention that goes to other than useful tokens, over kept ones.

    Equation 7 and corollary 3.2; 1 where no useful token is kept.

    Args:
        rows: `[..., R, n]`.
        kept: bool or float `[..., 1 or R, n]`, r.
        is_useful: bool `[n]`.
    """
    left = rows * kept
    return 1 - left[..., is_useful].sum(-1) / left.sum(-1)


def kept_by_gates(log_betas: Tensor, prompt_tokens: int, share: float) -> Tensor:
    """Return which tokens are left by one ranking of all layers and heads, bool `[L, H, n]`.

    The score is beta^age + beta^(age + 1), equation 9 with two tokens to come. The answer stays.
    """
    of_prompt = log_betas[..., :prompt_tokens].double()
    ages = torch.arange(prompt_tokens, 0, -1)
    scores = torch.logaddexp(ages * of_prompt, (ages + 1) * of_prompt)
    least = scores.flatten().topk(int(share * scores.numel())).values[-1]
    kept = torch.ones_like(log_betas, dtype=torch.bool)
    kept[..., :prompt_tokens] = scores >= least
    return kept


def _dilution_values(layers: Layer, reading: Reading) -> tuple[Curves, Values]:
    rows, m, useful = layers["rows"], reading.prompt_tokens, reading.is_useful
    kept = kept_by_gates(reading.log_betas, m, KEPT).unsqueeze(2)
    kept = kept.repeat_interleave(rows.shape[1] // kept.shape[1], dim=1)
    full, left = dilution(rows, torch.ones(1), useful), dilution(rows, kept, useful)
    is_other = ~useful & (torch.arange(len(useful)) < m)
    rates = [(rows * kept)[..., k].sum() / rows[..., k].sum() for k in (useful, is_other)]
    place = float(1 << (m - 1).bit_length())  # prompts are a little shorter than their task says
    most = full.mean(2).flatten().min()
    curves = {
        ("dilution", "full cache, mean of heads", place): float(full.mean()),
        ("dilution", "full cache, best head", place): float(most),
        ("dilution", "gates keep 20 %, mean of heads", place): float(left.mean()),
        ("attention that is kept", "useful tokens", place): float(rates[0]),
        ("attention that is kept", "others", place): float(rates[1]),
    }
    return curves, {
        "dilution": float(full.mean()),
        "best": float(most),
        "rates": float(rates[0] - rates[1]),
        "falls": float((full - left).mean()),
    }


def last_selections(attention: Tensor) -> dict[str, Tensor]:
    """Return the last row that selects each token, int64 `[Q, m]`, -1 if none does; figure 9.

    A row selects its K largest entries, or the fewest that have a share of its mass.
    """
    ordered = attention.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    least = {f"best {k}": ordered[..., k - 1] for k in NUMBERS}
    for mass in MASSES:
        number = (before < mass).sum(-1, keepdim=True)
        least[f"{100 * mass:.0f} % of the mass"] = ordered.gather(-1, number - 1)[..., 0]
    places = torch.arange(attention.shape[1])[:, None]
    return {
        name: torch.where((attention >= each[..., None]) & (attention > 0), places, -1).amax(1)
        for name, each in least.items()
    }


def survival(last: Tensor, horizon: int, is_kind: Tensor) -> Tensor:
    """Return the share of a kind's tokens that a row selects at least `horizon` tokens later.

    Of tokens that have rows so much later. Returns `[Q]`.
    """
    births = torch.arange(last.shape[1])
    able = (births + horizon < last.shape[1]) & is_kind
    return (last - births >= horizon)[:, able].float().mean(1)


def _survivals(attention: Tensor, reading: Reading) -> Layer:
    m = reading.prompt_tokens
    last = last_selections(attention[:, :m, :m])
    vision = reading.is_vision[:m]
    kinds = {"": torch.ones_like(vision), "vision": vision, "text": ~vision}
    return {
        f"{name}/{kind}": torch.stack([survival(each, x, of_kind) for x in HORIZONS])
        for name, each in last.items()
        for kind, of_kind in kinds.items()
        if not kind or (vision.any() and name == "best 16")
    }


def _survival_values(layers: Layer, reading: Reading) -> tuple[Curves, Values]:
    curves, values = Curves(), Values()
    at = {x: number for number, x in enumerate(HORIZONS)}
    for key, each in layers.items():
        name, _, kind = key.partition("/")
        panel = "best 16, pages" if kind else "all tokens"
        for horizon, value in zip(HORIZONS, each.mean((0, 2)).tolist(), strict=True):
            curves[panel, kind or name, horizon] = value
    heads = layers["best 16/"][:, at[QUARTER]].flatten()
    values["dies"] = 0.5 - float(heads.mean())
    values["heads"] = float(heads.quantile(0.9) - heads.quantile(0.1))
    of_mass = float(layers["99 % of the mass/"][:, at[QUARTER]].mean())
    values["mass"], values["of mass"] = of_mass - float(heads.mean()), of_mass
    values["survives"] = float(heads.mean())
    if reading.is_vision.any():
        vision, text = (layers[f"best 16/{k}"][:, at[32]].mean() for k in ("vision", "text"))
        values["kinds"] = float(vision - text)
    return curves, values


STATISTICS = {
    "sparsity": Statistic(_sparsities, _sparsity_values),
    "hits": Statistic(_hits, _hit_values),
    "coverage": Statistic(_modalities, _modality_values),
    "budgets": Statistic(_strengths, _strength_values),
    "dilution": Statistic(_useful, _dilution_values, "tokens of the prompt", needs_gates=True),
    "survival": Statistic(_survivals, _survival_values, "tokens since birth"),
}


def _best(values: Tensor, number: int) -> Tensor:
    best = values.topk(number, dim=-1).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, best, True)


def _by_layer(panel: str, curves: Mapping[str, Tensor]) -> Curves:
    return {
        (panel, name, layer): value
        for name, each in curves.items()
        for layer, value in enumerate(each.tolist())
    }


def _correlation(first: Tensor, second: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((first, second)))[0, 1])


# -- results --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A point of a curve: the mean over prompts with its interval."""

    panel: str
    curve: str
    x: float
    prompts: int
    y: Estimate


@dataclass(frozen=True)
class Number:
    """A number of each prompt: its mean with its interval."""

    name: str
    prompts: int
    mean: Estimate


@dataclass(frozen=True)
class Measured:
    """The results of a statistic, and the facts of how they were made."""

    facts: dict[str, Any]
    points: list[Point]
    numbers: list[Number]


def summarise(facts: dict[str, Any], prompts: Sequence[Prompted]) -> Measured:
    """Return the results from the points and the numbers of each prompt."""
    points: dict[tuple[str, str, float], list[float]] = {}
    numbers: dict[str, list[float]] = {}
    for curves, values in prompts:
        for place, value in curves.items():
            points.setdefault(place, []).append(value)
        for name, value in values.items():
            numbers.setdefault(name, []).append(value)
    return Measured(
        facts,
        [Point(*place, len(each), bootstrap(each)) for place, each in points.items()],
        [Number(name, len(each), bootstrap(each)) for name, each in numbers.items()],
    )


def read_measured(part: dict[str, Any]) -> Measured:
    """Return a statistic's results as the file has them."""
    points = [Point(**estimates(each)) for each in part["points"]]
    return Measured(part["facts"], points, [Number(**estimates(each)) for each in part["numbers"]])


# -- the model ------------------------------------------------------------------------------


class AttentionReader(EagerModel):
    """The page model in transformers, which reads texts too and shows its attention."""

    def __init__(self, gates_folder: str = "") -> None:
        """Load the model; it is written on the first call.

        Args:
            gates_folder: relative to the repository; empty for no gates.

        Raises:
            WeightsMissingError: if the package with the language model is not installed.
            EvictionConfigError: if there are no gates.
        """
        self._gates: Mapping[int, LayerGate] = {}
        if gates_folder:
            gates = Gates.read(str(ROOT / gates_folder), "the folder of the gates")
            heads, cpu = slice(gates.kv_heads), torch.device("cpu")
            self._gates = gates.load(gates.layers, heads, torch.float32, cpu)
        super().__init__()
        self._write = TextWriter(self.tokenizer)
        self._look: Callable[[Tensor], None] = lambda attention: None

    @torch.inference_mode()
    def measure(self, question: Any, statistics: Mapping[str, Statistic]) -> dict[str, Prompted]:
        """Return what the statistics say of a question's prompt."""
        example = question.example(self.vocabulary) if isinstance(question, PageQuestion) else None
        asked = example.asked if example else self._write(question)
        messages = example.messages() if example else [{"role": "user", "content": asked.message}]
        text = turns(self.tokenizer, messages) + asked.start
        answer = self.tokenizer.encode(f" {asked.answer}", add_special_tokens=False)
        given: dict[str, Any] = {"text": text, "return_tensors": "pt"}
        if example:
            inputs = dict(self.processor(**given, images=list(example.pages)))
        else:
            inputs = dict(self.tokenizer(**given, add_special_tokens=False))
        ids = torch.cat((inputs["input_ids"], torch.tensor([answer])), dim=1)
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        reading = Reading(
            ids.shape[1] - len(answer),
            ids[0] == self.model.config.image_token_id,
            self._sentence(text, asked.answer, ids.shape[1]) if not example else torch.empty(0),
            torch.empty(0),
        )
        found: dict[str, list[Layer]] = {name: [] for name in statistics}
        betas: list[Tensor] = []

        def look(attention: Tensor) -> None:
            for name, each in statistics.items():
                found[name].append(each.of_layer(attention, reading))

        self._look = look
        with self.attending(), self._gated(betas):
            self.model(**inputs, logits_to_keep=1)
        if betas:
            reading = replace(reading, log_betas=torch.stack(betas))
        return {
            name: each.of_prompt(
                {key: torch.stack([layer[key] for layer in found[name]]) for key in found[name][0]},
                reading,
            )
            for name, each in statistics.items()
        }

    def _sentence(self, text: str, answer: str, length: int) -> Tensor:
        """Return the tokens of the sentence that tells the answer, bool `[n]`."""
        place = text.index(f"{answer}.")
        start, end = text.rindex(". ", 0, place) + 2, place + len(answer)
        given = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = given["offset_mapping"]
        inside = [number for number, (low, high) in enumerate(spans) if low < end and high > start]
        return torch.zeros(length, dtype=torch.bool).index_fill(0, torch.tensor(inside), True)

    def attend(
        self, layer: int, query: Tensor, logits: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        weights = logits.softmax(-1)
        self._look(weights.flatten(0, 1))
        return weights @ value

    @contextmanager
    def _gated(self, found: list[Tensor]) -> Iterator[None]:
        """Add log beta of each layer's tokens to a list, `[H, n]`, if there are gates."""

        def read(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            gate = self._gates[self.numbers[module]]
            *inner, (weight, bias) = gate.linears
            hidden = hidden[0]
            for w, b in inner:
                hidden = ACTIVATIONS[gate.activation](hidden @ w.T + b)
            found.append(torch.nn.functional.logsigmoid(hidden.float() @ weight.T + bias).T)

        modules = self.numbers if self._gates else ()
        handles = [each.register_forward_pre_hook(read, with_kwargs=True) for each in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
