# SPDX-License-Identifier: Apache-2.0
"""What eviction costs your own questions: the full cache against budgets, on your server.

Usage: python -m vllm_tgvkv.judge --questions mine.jsonl --url http://localhost:8000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vllm_tgvkv.gain import count
from vllm_tgvkv.judge.asking import Server, arms_of, ask_all
from vllm_tgvkv.judge.questions import JudgeError, read_questions
from vllm_tgvkv.judge.report import METHOD, figures, picture, table
from vllm_tgvkv.shared.errors import EvictionConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask all questions, print the table, and write result and picture; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return asyncio.run(_judge(options))
    except (JudgeError, EvictionConfigError, OSError) as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted: the same command asks what is missing")
        return 130


async def _judge(options: argparse.Namespace) -> int:
    folder = options.out or options.questions.with_suffix(".judge")
    arms = arms_of(options.methods, options.budgets)
    questions = read_questions(options.questions, options.max_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    async with Server.connect(options.url, options.model) as server:
        log = folder / "answers.jsonl"
        answers, failed = await ask_all(server, questions, arms, log, options.in_flight, _say)
    questions = [question for question in questions if question.line not in failed]
    found = figures(questions, answers)
    expected = sum(bool(question.answers) for question in questions)
    print(*table(found, expected, len(questions), len(failed)), sep="\n")
    result = {
        "url": options.url,
        "model": server.model,
        "settings": server.settings,
        "method": METHOD,
        "questions": len(questions),
        "expected": expected,
        "failed": failed,
        "arms": [asdict(each) for each in found],
        "answers": [
            {
                "line": question.line,
                "arms": {
                    arm: {"text": given[i].text, "right": question.is_right(given[i].text)}
                    for arm, given in answers.items()
                },
            }
            for i, question in enumerate(questions)
        ],
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (folder / "picture.svg").write_text(picture(found, len(questions)), encoding="utf-8")
    for message in failed.values():
        _say(message)
    _say(f"written to {folder}: {log.name}, result.json, picture.svg")
    return 1 if failed else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vllm_tgvkv.judge", description=__doc__)
    add = parser.add_argument
    add("--questions", type=Path, required=True, help="a JSONL file, see docs/judge.md")
    add("--url", required=True, help="of a server with --kv-eviction; its key: OPENAI_API_KEY")
    add("--model", help="by default the first one that it serves")
    add("--methods", nargs="+", default=["reach"], help="default: reach")
    add("--budgets", nargs="+", default=["0.5", "0.2", "0.1"], help="default: 0.5 0.2 0.1")
    add("--max-tokens", type=count, default=256, help="of an answer (256)")
    add("--in-flight", type=count, default=4, help="requests that run at once (4)")
    add("--out", type=Path, help="folder of log, result and picture; by default QUESTIONS.judge")
    return parser


if __name__ == "__main__":
    sys.exit(main())
