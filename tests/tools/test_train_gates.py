# SPDX-License-Identifier: Apache-2.0
"""The training of gates: its losses against loops, its gradient, interruption, and its folders.

Models are tiny Llamas with random weights in float64; nothing is downloaded.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from measure.folders import byte_tokenizer, text_sizes
from measure.text_tasks import split_of
from measure.text_words import python_prose
from oracle.gates import log_betas, predicted
from tests.inputs import said_by
from tests.models import TinyModel, model_folder
from training import examples, gates, kvzap, trimkv
from training.data import (
    BEGIN,
    Prompt,
    Prompter,
    TrainingError,
    packed,
    read_examples,
    sequences,
)
from training.examples import text_lines
from training.frozen import FrozenModel
from training.networks import GateNetworks, SharedByHeads, Tying
from training.run import Run
from vllm_tgvkv.gates.folder import Gates, read_tensors

pytestmark = pytest.mark.apparatus

LAYERS, HEADS, GROUP, HIDDEN = 2, 2, 2, 16
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with a byte tokenizer."""
    return write_model(tmp_path_factory.mktemp("model"), LlamaConfig, LlamaForCausalLM)


def write_model(path: Path, config: Any, model: Any, **fields: Any) -> str:
    tokenizer, _ = byte_tokenizer(
        ["<end>", "<user>", "<assistant>"], eos="<end>", pad="<end>", max_length=4096
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    sizes = text_sizes(
        hidden=HIDDEN,
        intermediate=24,
        layers=LAYERS,
        query_heads=HEADS * GROUP,
        kv_heads=HEADS,
        max_positions=4096,
    )
    torch.manual_seed(0)
    found = model(config(vocab_size=len(tokenizer), initializer_range=0.3, **sizes, **fields))
    found.to(torch.float64).save_pretrained(path)
    return str(path)


@pytest.fixture
def frozen(folder: str, monkeypatch: pytest.MonkeyPatch) -> FrozenModel:
    """The model in float64 throughout: transformers' norm computes in float32."""

    def norm(self: Any, hidden: Tensor) -> Tensor:
        mean = hidden.square().mean(-1, keepdim=True) + self.variance_epsilon
        return self.weight * hidden / mean.sqrt()

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
    return FrozenModel.load(folder, "cpu", torch.float64)


def small(kind: str, bias: float = 2.0, tied: Tying = "nothing") -> GateNetworks:
    """Return random gates with betas that differ."""
    config = LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS * GROUP, num_key_value_heads=HEADS
    )
    found = GateNetworks(kind, LAYERS, config, 6, bias, tied).double()
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.4)
    lasts = {layer[-1] for layer in found.linears}
    for last in lasts:
        (last.row if isinstance(last, SharedByHeads) else last).bias.data += bias
    return found


def random_prompt(*lengths: int) -> Prompt:
    """Return documents of random tokens; some are labelled, the last one always."""
    return packed(
        [
            Prompt(
                torch.randint(0, 256, (n,)),
                (torch.rand(n) < 0.6) & (torch.arange(n) > 0) | (torch.arange(n) == n - 1),
                torch.zeros(n, dtype=torch.int64),
            )
            for n in lengths
        ]
    )


def lines(path: Path, number: int, length: int = 60) -> Path:
    """Write texts of random letters and questions."""
    torch.manual_seed(1)
    found = []
    for index in range(number):
        text = "".join(chr(97 + x) for x in torch.randint(0, 4, (length - index,)).tolist())
        answer = {"role": "assistant", "content": text[:5]}
        talk = [{"role": "user", "content": text[: length // 2]}, answer]
        found.append({"text": text} if index % 2 else {"messages": talk})
    path.write_text("\n".join(map(json.dumps, found)))
    return path


@pytest.mark.parametrize("shared", [True, False])
def test_capacity_by_loops(shared: bool) -> None:
    lengths, memory = (5, 1, 8), 2
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    betas = torch.rand(LAYERS, HEADS, len(documents), dtype=torch.float64) ** 0.3
    counts = [t for n in lengths for t in range(1, n + 1)]
    sums = [
        [sum(float(head[t - age]) ** age for age in range(n)) for t, n in enumerate(counts)]
        for head in betas.flatten(0, 1)
    ]
    n = LAYERS * HEADS if shared else 1
    every = [
        max(total - n * memory, 0) / max(n * (count - memory), 1)
        for row in ([[sum(x) for x in zip(*sums, strict=True)]] if shared else sums)
        for total, count in zip(row, counts, strict=True)
    ]
    over = [x for x in every if x > 0]
    found = trimkv.capacity(list(betas.log()), documents, memory, shared)
    assert 0 < len(over) < len(every)
    assert float(found) == pytest.approx(sum(over) / len(over), rel=1e-12)
    printed = trimkv.capacity(list(betas.log()), documents, memory, shared, printed=True)
    rows = [[sum(x) for x in zip(*sums, strict=True)]] if shared else sums
    excess = sum(max(0, total - n * memory) for row in rows for total in row)
    assert float(printed) == pytest.approx(excess, rel=1e-12)
    assert float(trimkv.capacity(list(betas.log()), documents, 50, shared)) == 0


def by_loops(frozen: FrozenModel, gate: Any, ids: Tensor) -> tuple[Tensor, list[Any]]:
    """Return a Llama's logits, one query after the other, and what its layers saw.

    Args:
        gate: (layer, hidden states) -> log beta `[S, H]`, or None.
    """
    model = frozen.model.model
    x, seen = model.embed_tokens(ids)[None], []
    turns = model.rotary_emb(x, torch.arange(len(ids))[None])
    for index, layer in enumerate(model.layers):
        hidden, attention = layer.input_layernorm(x), layer.self_attn
        q, k, v = (
            part(hidden).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        (q, k), v = (part[0] for part in apply_rotary_pos_emb(q, k, *turns)), v[0]
        decay = torch.zeros(len(ids), HEADS) if gate is None else gate(index, hidden[0])
        output = torch.zeros(len(ids), HEADS * GROUP, attention.head_dim, dtype=x.dtype)
        weights = torch.zeros(HEADS * GROUP, len(ids), len(ids), dtype=x.dtype)
        for t, head in itertools.product(range(len(ids)), range(HEADS * GROUP)):
            shared = head // GROUP
            terms = [
                math.exp(
                    float(q[head, t] @ k[shared, j]) / math.sqrt(attention.head_dim)
                    + (t - j) * float(decay[j, shared])
                )
                for j in range(t + 1)
            ]
            for j, term in enumerate(terms):
                weights[head, t, j] = term / sum(terms)
                output[t, head] += weights[head, t, j] * v[shared, j]
        seen.append((weights, v, hidden[0], attention.o_proj.weight))
        x = x + attention.o_proj(output.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return frozen.model.lm_head(model.norm(x))[0], seen


@torch.no_grad()
def test_the_losses_of_packed_documents(frozen: FrozenModel) -> None:
    """Of the whole model, against one query after the other in each document alone."""
    prompt, gate = random_prompt(6, 9), small("dbtrimkv")
    found = {name: float(x) for name, x in trimkv.losses(frozen, gate, prompt, 2).items()}
    divergences, next_tokens = [], []
    for document in (0, 1):
        own = prompt.documents == document
        ids, labelled = prompt.ids[own], prompt.labelled[own]
        (student, _), (teacher, _) = (by_loops(frozen, x, ids) for x in (gate, None))
        for t in labelled.nonzero()[:, 0].tolist():
            p, q = (logits[t - 1].softmax(-1) for logits in (teacher, student))
            divergences.append(float((p * (p / q).log()).sum()))
            next_tokens.append(-math.log(float(q[ids[t]])))
    assert found["divergence"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-6)
    assert found["next_token"] == pytest.approx(sum(next_tokens) / len(next_tokens), rel=1e-6)
    total = (found["divergence"] + found["next_token"]) / 2 + found["capacity"]
    assert found["loss"] == pytest.approx(total)
    printed = {n: float(x) for n, x in trimkv.losses(frozen, gate, prompt, 2, True).items()}
    assert printed["loss"] == pytest.approx(
        sum(divergences) + sum(next_tokens) + printed["capacity"], rel=1e-6
    )
    assert found["divergence"] > 1e-4
    assert found["capacity"] > 0


@torch.no_grad()
def test_what_kvzap_predicts(frozen: FrozenModel) -> None:
    prompt = random_prompt(14)
    prompt = Prompt(
        prompt.ids, prompt.labelled, prompt.documents, keys=slice(2, 6), rows=slice(8, 12)
    )
    found = kvzap.collect_prompt(frozen, prompt)
    _, seen = by_loops(frozen, None, prompt.ids)
    for layer, (weights, v, hidden, projection) in enumerate(seen):
        torch.testing.assert_close(found.hidden[layer], hidden[2:6])
        for shared, (place, j) in itertools.product(range(HEADS), enumerate(range(2, 6))):
            most = 0.0
            for t, head in itertools.product(range(8, 12), range(GROUP)):
                head += shared * GROUP
                size = v.shape[-1]
                part = projection[:, head * size : (head + 1) * size] @ v[shared, j]
                share = weights[head, t, j] * part.norm() / hidden[t].norm()
                most = max(most, float(share))
            assert float(found.scores[layer, place, shared]) == pytest.approx(math.log(most))


@pytest.mark.parametrize(
    ("method", "tied"), [("trimkv", "nothing"), ("dbtrimkv", "layers"), ("dbtrimkv", "heads")]
)
def test_the_gradient(method: str, tied: Tying, frozen: FrozenModel) -> None:
    """Along random directions, against differences of the loss; DBTrimKV shares a projection."""
    gate, prompt = small(method, tied=tied), random_prompt(5, 9)

    def loss() -> Tensor:
        return trimkv.losses(frozen, gate, prompt, 2)["loss"]

    loss().backward()  # type: ignore[no-untyped-call]
    assert all(x.grad is None for x in frozen.model.parameters())
    parameters = list(gate.parameters())
    assert len(parameters) == 2 * (2 * LAYERS + 1 if method == "dbtrimkv" else 2 * LAYERS)
    if tied == "heads":  # the paper's gate: one row of weights, one bias, for all heads
        hidden = torch.randn(4, HIDDEN, dtype=torch.float64)
        first, second, last = gate.linears[1]
        assert isinstance(last, SharedByHeads)
        inside = gate.activate(second(gate.activate(first(hidden))))
        for head, part in enumerate(inside.split(6 // HEADS, dim=1)):
            said = torch.sigmoid(part @ last.row.weight[0] + last.row.bias).log()
            torch.testing.assert_close(gate(1, hidden)[:, head], said)
    for parameter in parameters:
        assert parameter.grad is not None
        direction = torch.randn_like(parameter)
        slope, values = float((parameter.grad * direction).sum()), []
        for sign in (1, -2):
            parameter.data += sign * 1e-5 * direction
            values.append(float(loss().detach()))
        parameter.data += 1e-5 * direction
        assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-7)


def test_ridge_regression() -> None:
    gate = small("linear")
    hidden = torch.randn(LAYERS, 50, HIDDEN, dtype=torch.float64)
    scores = torch.randn(LAYERS, 50, HEADS, dtype=torch.float64) - 7
    kvzap.fit_linear(gate, kvzap.Pairs(hidden, scores))
    for layer in range(LAYERS):
        # Least squares with a row for each penalised weight; the bias has none.
        rows = torch.cat([hidden[layer], torch.ones(50, 1)], 1)
        bounds = torch.eye(HIDDEN, HIDDEN + 1, dtype=torch.float64)
        targets = torch.cat([scores[layer], torch.zeros(HIDDEN, HEADS)])
        wanted = torch.linalg.lstsq(torch.cat([rows, bounds]), targets).solution.T
        (linear,) = gate.linears[layer]
        found = torch.cat([linear.weight, linear.bias[:, None]], 1)
        torch.testing.assert_close(found.detach(), wanted)


class Interrupted(Run):
    """A sitting that is over after some looks at the clock."""

    left = 2

    @property
    def is_over(self) -> bool:
        self.left -= 1
        return self.left < 0


COMMANDS = {
    "trimkv": ["--method", "trimkv", "--accumulate", "2"],
    "dbtrimkv": ["--method", "dbtrimkv", "--accumulate", "1"],
    "dbtrimkv untied": ["--method", "dbtrimkv", "--tied", "nothing", "--accumulate", "1"],
    "dbtrimkv printed": ["--method", "dbtrimkv", "--tied", "heads", "--loss", "paper"],
    "mlp": ["--method", "kvzap"],
    "linear": ["--method", "kvzap", "--form", "linear"],
}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_training_from_command_to_folder(
    name: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Interrupted again and again, it has the same weights; the plugin reads what is written."""
    monkeypatch.setattr(kvzap, "EPOCHS", 12)
    monkeypatch.setattr(kvzap, "SAMPLED", 20)
    data = lines(tmp_path / "lines.jsonl", 12)
    common = [folder, *COMMANDS[name], "--data", str(data), "--tokens", "90", "--width", "8"]
    common += ["--dtype", "float64", "--memory", "4", "--bias", "3", "--rate", "0.05"]
    common += ["--steps", "5"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    gates.main([*common, "--output", str(whole)])
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(gates, "Run", Interrupted)
        number = 0
        while True:
            number += 1
            gates.main([*common, "--output", str(parts)])
            if "stopped" not in capsys.readouterr().out:
                break
            assert not (parts / "config.json").exists()
    assert number > 2
    found, again = (Gates.read(str(x), "here") for x in (whole, parts))
    assert (found.layers, found.hidden_size, found.kv_heads) == ((0, 1), HIDDEN, HEADS)
    assert found.kind == ("trimkv" if "trimkv" in name else "kvzap")
    file = read_tensors(whole / found.file)
    for key, tensor in read_tensors(parts / again.file).items():
        assert torch.equal(tensor, file[key]), key

    hidden = torch.randn(5, HIDDEN)
    if name == "linear":
        oracle = lambda n, x: x @ file[f"layers.{n}.weight"].T + file[f"layers.{n}.bias"]  # noqa: E731
    elif name == "mlp":
        oracle = predicted(file)
    else:
        oracle = log_betas(file, "model.layers", 1 if name == "trimkv" else 2)
    for layer, gate in found.load([0, 1], slice(None), torch.float32, "cpu").items():
        said = said_by(gate, hidden).double()
        torch.testing.assert_close(said, oracle(layer, hidden).double())
    if "dbtrimkv" in name:
        last = [f"model.layers.{n}.self_attn.retention_gate.linear3.weight" for n in (0, 1)]
        is_tied = torch.equal(file[last[0]], file[last[1]])
        written = json.loads((whole / "config.json").read_text())
        assert written["tie_retention_gate_layers"] == is_tied == ("untied" not in name)
        assert written["global_capacity"]
    card = (whole / "README.md").read_text()
    assert f"`{found.form}`" in card
    assert "11 examples, 1 held out" in card

    with pytest.raises(SystemExit, match="another training"):
        gates.main([*common, "--seed", "5", "--output", str(whole)])


def test_training_lowers_the_loss(folder: str, tmp_path: Path) -> None:
    """Capacity is learnt within 40 steps, and scores are predicted better than by their mean."""
    data = lines(tmp_path / "lines.jsonl", 20)

    def train(name: str, *options: str) -> dict[str, float]:
        common = [folder, "--data", str(data), "--tokens", "90", "--width", "16"]
        common += ["--dtype", "float64", "--output", str(tmp_path / name)]
        return gates.train(gates.parse([*common, *options]))

    found = train("kvzap", "--method", "kvzap")
    assert found["squared error"] < 0.5 * found["squared error of the mean score"]
    options = ["--method", "dbtrimkv", "--memory", "4", "--bias", "6", "--rate", "0.02"]
    before, after = (
        train(steps, *options, "--steps", steps)["share retained at the end"]
        for steps in ("1", "40")
    )
    assert before > 0.8
    assert after < 0.5 * before


def test_examples_as_tokens(folder: str, tmp_path: Path) -> None:
    prompter = Prompter(folder, 90)
    training, held_out = read_examples(lines(tmp_path / "lines.jsonl", 12))
    assert len(training) == 11
    assert len(held_out) == 1
    decode = prompter.tokenizer.decode
    for example in training:
        prompt = prompter.repeated(example)
        text = example.context
        assert decode(prompt.ids[prompt.keys]) == decode(prompt.ids[prompt.rows]) == text
        assert BEGIN not in decode(prompt.ids)
        prompt = prompter.dialogue(example)
        answer = decode(prompt.ids[prompt.labelled])
        if example.text is None:
            assert answer == f"{example.messages[-1]['content']}<end>"
        else:
            assert answer == text[1:]
    found = list(itertools.islice(sequences(prompter, training, 3), 9))
    assert max(int(x.documents[-1]) for x in found) > 0
    for sequence in found:
        assert len(sequence.ids) <= 90
        starts = sequence.documents.diff(prepend=torch.tensor([-1])) != 0
        assert (sequence.positions == 0).equal(starts)
        assert not (sequence.labelled & starts).any()


def test_the_ready_set(folder: str, tmp_path: Path) -> None:
    """Held-out passages have sentences of their own; questions and prose are not the tests'."""
    prompter = Prompter(folder, 900)
    found = list(text_lines(800, prompter.count, 40))
    texts = [line["text"] for line in found if "text" in line]
    sentences = [{s for s in examples.library_prose() if s in text} for text in texts]
    assert set.union(*sentences[:18]).isdisjoint(set.union(*sentences[18:]))
    assert all(sentences)
    # The evaluation hides its questions in other sentences.
    assert not any(s in text for text in texts for s in python_prose())
    assert split_of(examples.FIRST_QUESTION) == "training"
    examples.main([str(tmp_path / "x.jsonl"), "--model", folder, "--tokens", "900"])
    for example in itertools.chain(*read_examples(tmp_path / "x.jsonl")):
        prompter.dialogue(example)
        prompter.repeated(example)


@pytest.mark.parametrize("arch", ["llava", "qwen3_vl"])
def test_gates_of_vision_language_models(arch: str, tmp_path: Path) -> None:
    """They are trained on texts, and belong to the language model."""
    model = str(model_folder(tmp_path, TinyModel(arch, layers=2)))
    data = lines(tmp_path / "lines.jsonl", 4)
    for method in ("kvzap", "trimkv"):
        output = tmp_path / method
        command = [model, "--method", method, "--data", str(data), "--steps", "2"]
        command += ["--width", "8", "--tokens", "900", "--output", str(output)]
        gates.main(command)
        assert Gates.read(str(output), "here").kv_heads


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no example"),
        ("[]", "is no example"),
        ("{}", "either `text` or `messages`"),
        ('{"text": "a", "messages": [{"role": "user", "content": "b"}]}', "either"),
        ('{"messages": [{"content": "a"}]}', "'role' is missing"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "is a string"),
    ],
)
def test_wrong_lines(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ValueError, match=f"x.jsonl:2.*{message}"):
        read_examples(tmp_path / "x.jsonl")


def test_a_model_with_a_window_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path, MistralConfig, MistralForCausalLM, sliding_window=8)
    frozen = FrozenModel.load(model, "cpu", torch.float64)
    with pytest.raises(TrainingError, match="does not attend plainly"):
        frozen.check(random_prompt(30))
    FrozenModel.load(model, "cpu", torch.float64).check(random_prompt(8))
