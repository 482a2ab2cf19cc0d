# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.peers`: NVIDIA's kvpress on the questions of the texts.

Gives kvpress, in its own environment (docs/kvpress.md), the prompts that `evaluation.text` asked
its part `default`, where the full cache was right, and counts its answers by the same rules.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from evaluation import learned
from evaluation.answers import Answer, AnswerLog, read_answers, write_answers
from evaluation.field import Run
from evaluation.fingerprint import ROOT
from evaluation.text_arms import FULL, PARTS, Cells, Part, TextArm
from evaluation.text_engine import SPARE_TOKENS
from measure.document import Block, Items, Table, Text, write_markdown
from measure.facts import command_line
from measure.smollm import model_folder
from measure.statistics import wilson
from measure.text_tasks import FRESH, TextExample, TextQuestion, TextTask

PRESSES = {
    "SnapKVPress": (["SnapKVPress"], True),
    "ExpectedAttentionPress": (["ExpectedAttentionPress"], True),
    "ExpectedAttentionPress, question kept": (["ExpectedAttentionPress"], False),
    "AdaKVPress over SnapKVPress": (["AdaKVPress", "SnapKVPress"], True),
    "DMSPress over KVzapPress": (["DMSPress", "KVzapPress"], True),
}
"""Classes of kvpress 0.5.5, with their own settings, and whether they see the question. The last
one reads gates, which both sides have from one folder."""
KEPT = 0.2
ASKED = ROOT / "docs" / "evaluation" / "text" / "answers-default.jsonl.gz"
OUTPUT = ROOT / "docs" / "evaluation" / "peers"
WORK = ROOT / "build" / "evaluation" / "peers"
ANSWERS = "answers.jsonl.gz"
GATED_ANSWERS = "answers-kvzap.jsonl.gz"


@dataclass(frozen=True)
class Prompt:
    """A question as both sides get it."""

    question: TextQuestion
    example: TextExample
    text: str

    @property
    def key(self) -> str:
        return f"{self.question.task.name}/{self.question.number}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Have kvpress answer, write its answers and the page, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.peers", description=__doc__)
    parser.add_argument("--questions", type=int, default=10, help="of each task, at most")
    parser.add_argument("--tasks", nargs="+", help="by name; default: all of the part")
    parser.add_argument(
        "--python",
        type=Path,
        default=ROOT / "build" / "kvpress" / "bin" / "python",
        help="of kvpress's environment; the tests of docs/kvpress.md make it",
    )
    parser.add_argument(
        "--gates",
        type=Path,
        default=ROOT / learned.KVZAP,
        help="folder of KVzap's gates for this model; docs/gates.md trains them",
    )
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    command = command_line("evaluation.peers", given)
    if not options.python.exists():
        parser.error(
            f"--python {options.python}: does not exist; run "
            "`python -m pytest tests/kvpress/test_kvpress.py` once, which installs kvpress"
        )
    if not (options.gates / "model.safetensors").exists():
        parser.error(
            f"--gates {options.gates}: holds no gates; train them by the first two commands of "
            "docs/gates.md#what-was-measured"
        )
    from transformers import AutoTokenizer

    folder = model_folder(ROOT / "build" / "models")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = read_answers(ASKED)
    prompts = list(_prompts(tokenizer, ours, options.questions, options.tasks))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    wanted = {
        "model": str(folder),
        "kept": KEPT,
        "presses": PRESSES,
        "gates": str(options.gates.resolve()),
        "questions": [
            {
                "key": prompt.key,
                "ids": encode(prompt.text),
                "context": len(encode(prompt.text.rsplit("\n", 3)[0])),
                "most": len(encode(prompt.example.answer)) + SPARE_TOKENS,
            }
            for prompt in prompts
        ],
    }
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / "questions.json").write_text(json.dumps(wanted), encoding="utf-8")
    script = Path(__file__).with_name("peers_kvpress.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    status = subprocess.run([options.python, script, WORK], env=environment, check=False)
    if status.returncode:
        return status.returncode
    lines = (WORK / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    by_key = {prompt.key: prompt for prompt in prompts}
    theirs = [line for line in map(json.loads, lines) if line["key"] in by_key]
    for line in theirs:
        example = by_key[line["key"]].example
        line["text"] = tokenizer.decode(line.pop("tokens"))
        pieces = [str(tokenizer.decode([token])) for token in encode(example.answer)]
        line["hits"] = example.hits(line["text"], pieces)
    gated = gated_answers(prompts, options.gates)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    write_answers(gated, OUTPUT / GATED_ANSWERS)
    kept = "".join(json.dumps(line) + "\n" for line in theirs)
    (OUTPUT / ANSWERS).write_bytes(gzip.compress(kept.encode(), mtime=0))
    write_markdown(list(page(prompts, theirs, [*ours.values(), *gated], command)), OUTPUT)
    print(f"Written: {OUTPUT / 'README.md'}")
    return 0


def _prompts(
    tokenizer: Any, ours: dict[Any, Answer], most: int, names: Sequence[str] | None
) -> Iterator[Prompt]:
    """Yield the first questions of each task that the full cache answers right."""
    tasks: dict[str, TextTask] = {task.name: task for task, _, _ in PARTS["default"].work}  # type: ignore[misc]
    count = lru_cache(maxsize=1 << 14)(
        lambda text: len(tokenizer.encode(text, add_special_tokens=False))
    )

    def turn(message: str) -> str:
        turns = [{"role": "user", "content": message}]
        return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))

    for name, task in tasks.items():
        if names is not None and name not in names:
            continue
        right = sorted(
            a.number for a in ours.values() if (a.task, a.arm) == (name, FULL.key) and a.is_exact
        )
        for number in right[:most]:
            question = TextQuestion(task, number)
            example = question.example(count(turn("")), count)
            yield Prompt(question, example, turn(example.message) + example.start)


def gated_answers(prompts: Sequence[Prompt], gates: Path) -> list[Answer]:
    """Return our own answers with KVzap's gates, through the engine."""
    arm = TextArm("kvzap", KEPT, gates=str(gates.resolve()))
    numbers: dict[TextTask, list[int]] = {}
    for prompt in prompts:
        numbers.setdefault(prompt.question.task, []).append(prompt.question.number)
    cells = (Cells((t,), (arm,), max(mine) - FRESH + 1) for t, mine in numbers.items())
    part = Part("kvpress", "", tuple(cells))
    with AnswerLog(WORK, learned.FIELD.settings().fingerprint) as log:
        current = Run(learned.FIELD, {"kvpress": part}, None, log, first=FRESH)
        try:
            current.answer(part)
        finally:
            current.close()
        return [log[t.name, n, arm.identity] for t, mine in numbers.items() for n in mine]


def page(
    prompts: Sequence[Prompt],
    theirs: Sequence[dict[str, Any]],
    ours: Sequence[Answer],
    command: str = "python -m evaluation.peers",
) -> Iterator[Block]:
    """Yield the page's blocks: both sides' answers to the same questions."""
    yield Text(
        "# NVIDIA's kvpress on the same questions\n\nSmolLM2-135M-Instruct in float32, the prompts "
        "of [the recommended method](../text/README.md#the-recommended-method) that the full cache "
        "answers right, 20 % of each prompt kept. kvpress 0.5.5 runs in its own environment "
        "([kvpress.md](../../kvpress.md)) with the presses' own settings, on the whole prompt, "
        "question included, as the engine does. Its own pipeline compresses what comes before the "
        "question; *question kept* is `ExpectedAttentionPress` used so. With 99 % kept, "
        "`SnapKVPress` gave right answers to the two questions that were tried. Made by\n\n"
        f"    {command}"
    )
    tasks = list(dict.fromkeys(prompt.question.task.name for prompt in prompts))
    asked = {(prompt.question.task.name, prompt.question.number) for prompt in prompts}
    rows = []
    arms = dict.fromkeys(a.arm for a in ours if "@0.2" in a.arm)
    for arm in arms:
        mine = [a for a in ours if a.arm == arm and (a.task, a.number) in asked]
        right = {task: [a.is_exact for a in mine if a.task == task] for task in tasks}
        freed = 1 - sum(a.blocks_held for a in mine) / max(len(mine), 1)
        rows.append([f"ours: `{arm.partition(' ')[0]}`", *_counts(right), f"{100 * freed:.0f} %"])
    for press in PRESSES:
        lines = [line for line in theirs if line["press"] == press]
        exact = [(line["key"].split("/")[0], "0" not in line["hits"]) for line in lines]
        right = {task: [ok for name, ok in exact if name == task] for task in tasks}
        freed = sum(line["freed"] for line in lines) / max(len(lines), 1)
        rows.append([f"kvpress: `{press}`", *_counts(right), f"{100 * freed:.0f} %"])
    yield Table(["method", *tasks, "all", "memory given back"], rows)
    yield Items(
        [
            "*Right* is an answer that is right to the last character. Intervals are Wilson's.",
            "**Head-wise presses of kvpress save no memory**: `AdaKVPress` and `DMSPress` hide "
            "80 % of the keys from attention and leave them in the cache, since a tensor holds "
            "equally many for each head. Here their pages go back to the pool.",
            "**KVzap** reads the same gates on both sides, linear ones that "
            "[this project trained](../../gates.md#what-was-measured) and wrote in kvpress's "
            "format: NVIDIA publishes none for this model. Keys below one threshold are hidden in "
            "all layers and heads. The threshold is set for each prompt so that 20 % stay, and the "
            "last 32 tokens are kept, as here; kvpress keeps 128, a quarter of the shorter "
            "prompts.",
            "A wait, as in `defer=4`, holds the whole prompt for 4 tokens of the answer first. "
            "kvpress evicts at the end of the prompt.",
            f"Their answers are in [{ANSWERS}]({ANSWERS}), ours in "
            "[answers-default.jsonl.gz](../text/answers-default.jsonl.gz) and "
            f"[{GATED_ANSWERS}]({GATED_ANSWERS}).",
        ]
    )


def _counts(right: dict[str, list[bool]]) -> list[str]:
    total = [ok for answers in right.values() for ok in answers]
    cells = [f"{sum(answers)} of {len(answers)}" for answers in right.values()]
    everything = f"{sum(total)} of {len(total)}: {wilson(sum(total), len(total))}" if total else ""
    return [*cells, everything]


if __name__ == "__main__":
    sys.exit(main())
