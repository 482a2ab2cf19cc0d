# SPDX-License-Identifier: Apache-2.0
"""Answer questions with kvpress. Run in its environment: `python peers_kvpress.py FOLDER`.

Reads `questions.json` from FOLDER: the model's folder, the share that is kept, presses by name
(class, and that of the press inside it; whether they see the question), the folder of KVzap's
gates if there is one, and questions (key, token ids of the prompt, number of them before the
question, most tokens of the answer).
Writes a line of `answers.jsonl` for each question and press: the answer's token ids, what share of
the prompt's keys was hidden or dropped, and what share of the memory was given back. Answers that
the file has already are not computed again.

As in kvpress's pipeline, the prompt is computed under the press, and the answer is decoded at its
true positions. The prompt holds the question, as in the engine; for presses that do not see it, it
is computed after them and kept whole, as kvpress's pipeline does.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

WINDOW = 32
"""Last tokens that a DMSPress keeps, as the `kvzap` of this project does. kvpress has 128, which is
more than a fifth of a prompt of 512."""


def make_press(kvpress: Any, names: list[str], kept: float, gates: str | None) -> Any:
    """Return the press of a name, around another one if two are given."""
    *outer, inner = names
    press = getattr(kvpress, inner)(compression_ratio=1 - kept)
    if inner == "KVzapPress":
        module = importlib.import_module("kvpress.presses.kvzap_press")
        network = module.KVzapModel.from_pretrained(gates)
        # In place of this method, which would look on the network for gates of the model's name.
        press.post_init_from_model = lambda _: setattr(press, "kvzap_model", network)
    if outer == ["DMSPress"]:
        return kvpress.DMSPress(press, sliding_window_size=WINDOW)
    return getattr(kvpress, outer[0])(press) if outer else press


@torch.inference_mode()
def set_threshold(model: Any, cache: Any, press: Any, ids: list[int], kept: float) -> None:
    """Set the threshold at which a DMSPress keeps the share of this prompt, its window included."""
    scores: list[torch.Tensor] = []
    own = press.press.score

    def score(*arguments: Any) -> torch.Tensor:
        scores.append(own(*arguments))
        return scores[-1]

    press.press.score, press.threshold = score, -torch.inf
    with press(model):
        model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
    press.press.score = own
    ranked = torch.cat([found[..., :-WINDOW].flatten() for found in scores]).sort().values
    press.threshold = ranked[round((1 - kept) * sum(found.numel() for found in scores))].item()


@torch.inference_mode()
def answer(
    model: Any, cache: Any, press: Any, ids: list[int], end: int, most: int
) -> tuple[list[int], Any]:
    """Return the tokens of a greedy answer, and the shares of keys dropped and memory freed.

    Args:
        end: number of the prompt's tokens that are computed under the press.
    """
    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        attention.masked_key_indices = None
    with press(model):
        out = model(torch.tensor([ids[:end]]), past_key_values=cache, logits_to_keep=1)
    if end < len(ids):
        rest = torch.arange(end, len(ids))[None]
        question = torch.tensor([ids[end:]])
        out = model(question, past_key_values=cache, position_ids=rest, logits_to_keep=1)
    held = [layer.keys.shape[1] * layer.keys.shape[2] for layer in cache.layers]
    whole = len(ids) * cache.layers[0].keys.shape[1] * len(held)
    masked = [a.masked_key_indices for a in attentions]
    hidden = sum(0 if indices is None else len(indices[0]) for indices in masked)
    freed = 1 - sum(held) / whole
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    tokens: list[int] = []
    while True:
        token = int(out.logits[0, -1].argmax())
        if token in ends:
            break
        tokens.append(token)
        if len(tokens) == most:
            break
        position = torch.tensor([[len(ids) + len(tokens) - 1]])
        out = model(torch.tensor([[token]]), past_key_values=cache, position_ids=position)
    return tokens, {"dropped": freed + hidden / whole, "freed": freed}


def main(folder: Path) -> None:
    """Answer all questions with all presses."""
    kvpress = importlib.import_module("kvpress")
    from transformers import AutoModelForCausalLM, DynamicCache

    wanted = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(wanted["model"], dtype=torch.float32).eval()
    done = folder / "answers.jsonl"
    lines = done.read_text(encoding="utf-8").splitlines() if done.exists() else []
    known = {(line["key"], line["press"]) for line in map(json.loads, lines)}
    with done.open("a", encoding="utf-8") as file:
        for question in wanted["questions"]:
            for name, (classes, sees_question) in wanted["presses"].items():
                if (question["key"], name) in known:
                    continue
                press = make_press(kvpress, classes, wanted["kept"], wanted["gates"])
                ids, most = question["ids"], question["most"]
                end = len(ids) if sees_question else question["context"]
                if classes[0] == "DMSPress":
                    set_threshold(model, DynamicCache(), press, ids[:end], wanted["kept"])
                tokens, shares = answer(model, DynamicCache(), press, ids, end, most)
                record = {"key": question["key"], "press": name, "tokens": tokens, **shares}
                file.write(json.dumps(record) + "\n")
                file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
