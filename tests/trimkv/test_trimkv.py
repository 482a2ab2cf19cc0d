# SPDX-License-Identifier: Apache-2.0
"""Numbers and kept tokens equal those of TrimKV's authors, on the same weights.

trimkv 0.1.5 runs in a separate environment, see `environment`, and records its log betas, scores
and kept tokens. Pages of one token make the granularities equal. Every difference is intended and
has a test; `docs/gates.md` lists them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from measure.folders import byte_tokenizer, text_sizes
from oracle.gates import log_betas
from tests.inputs import gate_tensors, said_by
from tests.trimkv.environment import run_script
from training import gates as training
from training.data import Prompt as Tokens
from training.frozen import Attended, FrozenModel
from training.trimkv import capacity, retained
from vllm_tgvkv.gates.folder import Gates, write
from vllm_tgvkv.policies import Prompt, build_policy
from vllm_tgvkv.policies.base import LayerView
from vllm_tgvkv.worker.decision import ScoredPrompt

pytestmark = pytest.mark.slow

LAYERS, HEADS, GROUP, HEAD_SIZE, HIDDEN, VOCABULARY = 3, 2, 2, 16, 32, 250
PROMPT, ANSWER = 120, 60
ROUNDING = 2.0**-18
"""Difference of two of their scores, relative to the largest part of one, that float32 may order
either way: each is a sum of three rounded logarithms, and beta itself is rounded."""

FORMS = {"rg": "trimkv", "rg10": "dbtrimkv"}
CASES = {
    f"{weights}-{form}-{lookahead}": (weights, form, lookahead)
    for weights in ("random", "trained")
    for form, lookahead in (("rg", 1), ("rg", 2), ("rg10", 1), ("rg10", 5))
}
MEMORY, BUFFER = 40, 16
over_cases = pytest.mark.parametrize("case", CASES)


@dataclass(frozen=True)
class Peer:
    """Records of trimkv."""

    folder: Path
    recorded: Mapping[str, Tensor]
    """See `record.py`."""
    facts: Mapping[str, Any]

    def of(self, case: str, name: str) -> Tensor:
        return self.recorded[f"{name}.{case}"]

    def gates(self, case: str) -> Gates:
        """Return the case's gates with the exponents of their code."""
        weights, form, lookahead = CASES[case]
        offset = 1 if lookahead == 1 else 2
        folder = str(self.folder / f"{weights}-{form}")
        return Gates.read(folder, "the case", lookahead=lookahead, age_offset=offset)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """Records of trimkv on random weights and prompts."""
    folder = tmp_path_factory.mktemp("trimkv")
    base = write_model(folder / "model")
    config = json.loads(Path(base, "config.json").read_text())
    (folder / "lines.jsonl").write_text(
        "\n".join(json.dumps({"text": f"the text of line {n}, " * 6}) for n in range(12))
    )
    for form, method in FORMS.items():
        tensors, fields = gate_tensors(form, LAYERS, HIDDEN, HEADS)
        tensors = {name: x * (0.3 if "weight" in name else 1) for name, x in tensors.items()}
        more = {"base_model": base, "trainable_params": "retention_gate"}
        more |= {"retention_gate_intermediate_size": 24, "tie_retention_gate_layers": False}
        write(folder / f"random-{form}", tensors, {**config, **fields, **more})
        options = ["--width", "24", "--rate", "0.05", "--bias", "2", "--memory", "8"]
        options += ["--steps", "4", "--accumulate", "1", "--tokens", "200", "--device", "cpu"]
        files = ["--data", str(folder / "lines.jsonl"), "--output", str(folder / f"trained-{form}")]
        training.train(training.parse([base, "--method", method, *options, *files]))
    cases = {
        name: {
            "gates": str(folder / f"{weights}-{form}"),
            "shared": form == "rg10",
            "memory_size": MEMORY,
            "buffer_size": BUFFER,
            "lookahead_steps": lookahead,
            "prompt": torch.randint(VOCABULARY, (PROMPT,)).tolist(),
            "answer": torch.randint(VOCABULARY, (ANSWER,)).tolist(),
        }
        for name, (weights, form, lookahead) in CASES.items()
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    inputs = {
        "query": torch.randn(1, HEADS * GROUP, 50, HEAD_SIZE),
        "key": torch.randn(1, HEADS, 50, HEAD_SIZE),
        "value": torch.randn(1, HEADS, 50, HEAD_SIZE),
        "log_betas": -torch.rand(1, HEADS, 50) / 5,
        "said": -torch.rand(LAYERS, HEADS, 50) / 5,
    }
    documents = torch.zeros(50, dtype=torch.int64)
    inputs["sums"] = torch.stack([retained(x, documents) for x in inputs["said"]])[None]
    save_file(inputs, folder / "inputs.safetensors")
    run_script("record.py", folder)
    recorded = load_file(folder / "recorded.safetensors") | inputs
    return Peer(folder, recorded, json.loads((folder / "facts.json").read_text()))


@torch.no_grad()
def write_model(folder: Path) -> str:
    """Write a Qwen3 with a byte tokenizer, as both versions of transformers read it."""
    tokenizer, _ = byte_tokenizer(["<end>"], eos="<end>", pad="<end>", max_length=4096)
    tokenizer.save_pretrained(folder)
    sizes = text_sizes(
        hidden=HIDDEN,
        intermediate=48,
        layers=LAYERS,
        query_heads=HEADS * GROUP,
        kv_heads=HEADS,
        max_positions=4096,
    )
    config = Qwen3Config(vocab_size=len(tokenizer), head_dim=HEAD_SIZE, **sizes)
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    # transformers 4 has another name for the base of the rotary positions.
    fields["rope_theta"] = fields["rope_parameters"]["rope_theta"]
    path.write_text(json.dumps(fields))
    return str(folder)


def our_numbers(peer: Peer, case: str, hidden: Tensor) -> Tensor:
    """Return log betas ``[L, H, T]`` of hidden states ``[L, T, d]``, as the engine computes."""
    loaded = peer.gates(case).load(range(LAYERS), slice(None), torch.float32, "cpu")
    return torch.stack([said_by(loaded[layer], hidden[layer]).T for layer in range(LAYERS)])


@over_cases
def test_numbers(peer: Peer, case: str) -> None:
    """The gates read the same hidden states and give the same numbers, also our trained ones."""
    hidden = peer.of(case, "hidden")
    found = our_numbers(peer, case, hidden)
    torch.testing.assert_close(found, peer.of(case, "log_betas"), rtol=2e-5, atol=2e-6)
    frozen = FrozenModel.load(str(peer.folder / "model"), "cpu", torch.float32)
    ids = torch.tensor(json.loads((peer.folder / "cases.json").read_text())[case]["prompt"])
    seen: list[Tensor] = []

    def see(attended: Attended) -> Tensor:
        seen.append(attended.hidden)
        return attended.output(documents)

    documents = torch.zeros_like(ids)
    with torch.no_grad():
        frozen.logits(Tokens(ids, documents.bool(), documents), torch.tensor([0]), see)
    torch.testing.assert_close(torch.stack(seen), hidden[:, :PROMPT], rtol=1e-3, atol=1e-3)


def our_scores(peer: Peer, case: str, num_tokens: int, **changes: int) -> Tensor:
    """Return scores ``[L, H, num_tokens]`` from the recorded numbers."""
    policy = build_policy(FORMS[CASES[case][1]], gates=replace(peer.gates(case), **changes))
    said, prompt = peer.of(case, "log_betas")[..., :num_tokens], prompt_of(num_tokens)
    views = (LayerView(n, HEADS, prompt, None, gate_outputs=said[n]) for n in range(LAYERS))  # type: ignore[arg-type]
    return torch.stack([policy.scores(view) for view in views])


def prompt_of(num_tokens: int, sinks: int = 0) -> Prompt:
    return Prompt(num_tokens, num_tokens, torch.zeros(num_tokens, dtype=torch.bool), sinks)


def our_kept(
    peer: Peer, case: str, scores: Tensor, left: Tensor | None, sinks: int = 0, floor: int = 0
) -> Tensor:
    """Return what our cut to MEMORY tokens for each head leaves of what is left, bool."""
    policy = build_policy(FORMS[CASES[case][1]], gates=peer.gates(case))
    prompt, nothing = prompt_of(scores.shape[-1], sinks), scores.new_empty(LAYERS, HEADS, 0)
    scored = ScoredPrompt(policy, prompt, scores, nothing, HEADS, 1, floor, present=left)
    found = scored.decide(MEMORY)
    kept = torch.zeros(LAYERS * HEADS, scores.shape[-1], dtype=torch.bool)
    pairs = torch.repeat_interleave(torch.arange(LAYERS * HEADS), found.counts.flatten())
    kept[pairs[:, None], found.positions[: len(pairs)].long()] = True
    return kept.view_as(scores)


@over_cases
def test_kept_tokens(peer: Peer, case: str) -> None:
    """Over the cut of the prompt and several while an answer grows; scores as well."""
    seen, kept, theirs = (peer.of(case, name) for name in ("seen", "kept", "scores"))
    assert seen.tolist() == list(range(PROMPT, PROMPT + ANSWER, BUFFER))
    left = None
    for cut, num_tokens in enumerate(seen.tolist()):
        scores = our_scores(peer, case, num_tokens)
        of_cut = theirs[cut, ..., :num_tokens]
        present = ~of_cut.isnan()
        # Ours are of the mean over the next tokens, theirs of the sum.
        shift = torch.tensor(CASES[case][2]).log()
        bound = ROUNDING * (1 + of_cut[present].abs().max())
        assert (scores[present] + shift - of_cut[present]).abs().max() <= bound
        ours, wanted = our_kept(peer, case, scores, left), kept[cut, ..., :num_tokens]
        assert ours.sum() == wanted.sum() == MEMORY * LAYERS * HEADS
        if CASES[case][1] == "rg":
            assert (wanted.sum(-1) == MEMORY).all()
        exchanged = scores.double().where(ours != wanted, torch.nan)
        of_sets = exchanged if CASES[case][1] == "rg" else exchanged.flatten()
        spread = of_sets.nan_to_num(-torch.inf).amax(-1) - of_sets.nan_to_num(torch.inf).amin(-1)
        assert (spread[spread.isfinite()] <= 2 * bound).all()
        # The answer's tokens until the next cut stay, whatever this one left.
        if cut + 1 < len(seen):
            left = nn.functional.pad(wanted, (0, BUFFER), value=True)
    assert (kept.sum(-1).float().std() > 0) == (CASES[case][1] == "rg10")


def test_exponents(peer: Peer) -> None:
    """The paper's newest token has the exponent 1, and two tokens to come count: our default.

    Their code begins at 2, or 3 with several tokens, and counts one. This changes rankings.
    """
    default = Gates.read(str(peer.folder / "random-rg"), "here")
    assert (default.lookahead, default.age_offset) == (2, 0)
    assert peer.facts == {"lookahead_steps": 1, "sliding_window_size": 0}
    for case, newest in (("random-rg-1", 2), ("random-rg-2", 3)):
        said, theirs = peer.of(case, "log_betas")[..., PROMPT - 1], peer.of(case, "scores")
        n = CASES[case][2]
        powers = [(said.double() * (newest + m)).exp() for m in range(n)]
        torch.testing.assert_close(
            theirs[0, ..., PROMPT - 1].double(), sum(powers).log(), rtol=1e-4, atol=1e-5
        )
    papers = our_scores(peer, "random-rg-2", PROMPT, age_offset=0)
    codes = our_scores(peer, "random-rg-2", PROMPT)
    assert (papers.argsort(-1) != codes.argsort(-1)).any()


def test_sinks_and_floor(peer: Peer) -> None:
    """Every head keeps the first tokens and a page here; theirs may keep neither."""
    case = "random-rg10-1"
    scores, sinks = our_scores(peer, case, PROMPT), 4
    theirs = peer.of(case, "kept")[0, ..., :PROMPT]
    ours = our_kept(peer, case, scores, None, sinks, floor=1)
    assert not theirs[..., :sinks].all()
    assert ours[..., 0].all()
    assert (ours.sum(-1) >= 1).all()
    assert ours.sum() == theirs.sum()
    low = scores.clone()
    low[0, 0] = scores.min() - 1  # a head that forgets everything
    assert our_kept(peer, case, low, None).sum(-1)[0, 0] == 0
    assert our_kept(peer, case, low, None, floor=1).sum(-1)[0, 0] == 1


def test_the_last_projection_in_bfloat16(peer: Peer) -> None:
    """Theirs is computed in the model's dtype, ours in float32: a bias of 18 hides nothing."""
    case = "random-rg-1"
    tensors = torch.load(peer.folder / "random-rg" / "trimkv_weights.pth", weights_only=True)
    hidden = peer.of(case, "hidden")[1].bfloat16()
    exact = log_betas(tensors, "model.layers", 1)(1, hidden)
    (gate,) = peer.gates(case).load([1], slice(None), torch.bfloat16, "cpu").values()
    ours, theirs = ((x - exact).abs().mean() for x in (said_by(gate, hidden), peer.of(case, "low")))
    assert ours < theirs / 1.5


def test_attention_in_training(peer: Peer) -> None:
    """The decay is added to the logits, as in their FlexAttention; their eager path multiplies."""
    query, key, value, said = (
        peer.recorded[name][0] for name in ("query", "key", "value", "log_betas")
    )
    attended = Attended(0, query, query, key, value, HEAD_SIZE**-0.5)
    found = attended.output(torch.zeros(query.shape[1], dtype=torch.int64), said)
    eager, flex = (peer.recorded[name][0].transpose(0, 1) for name in ("eager", "flex"))
    torch.testing.assert_close(found, flex, rtol=1e-4, atol=1e-5)
    rows = torch.arange(query.shape[1])
    ages = (rows[:, None] - rows).clamp(min=0)
    factors = (said[:, None] * ages).exp().repeat_interleave(GROUP, 0)
    logits = query @ key.repeat_interleave(GROUP, 0).mT * HEAD_SIZE**-0.5 * factors
    probabilities = logits.masked_fill(rows > rows[:, None], -torch.inf).softmax(-1)
    multiplied = probabilities @ value.repeat_interleave(GROUP, 0)
    torch.testing.assert_close(eager, multiplied, rtol=1e-4, atol=1e-5)
    assert (eager - flex).abs().max() > 0.05


@pytest.mark.parametrize(("name", "shared"), [("shared", True), ("local", False)])
def test_capacity(peer: Peer, name: str, shared: bool) -> None:
    """Their denominator counts the tokens before the last one, ours with it."""
    said = peer.recorded["said"]
    ours = capacity(list(said), torch.zeros(50, dtype=torch.int64), 4, shared)
    sums = peer.recorded["sums"][0].flatten(0, 1)
    number = len(sums) if shared else 1
    sums = sums.sum(0, keepdim=True) if shared else sums
    excess = (sums - 4 * number).clamp(min=0)
    found = []
    for first in (0, 1):
        most = (number * (torch.arange(first, first + 50) - 4)).clamp(min=1)
        found.append((excess / most).sum() / (excess > 0).sum())
    torch.testing.assert_close(peer.recorded[name], found[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours, found[1], rtol=1e-4, atol=1e-6)
    assert ours < peer.recorded[name]
