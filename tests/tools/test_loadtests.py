# SPDX-License-Identifier: Apache-2.0
"""Load tests: profiles, the report of a recorded run, and a small run of a real server."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests import run
from loadtests.load import bench_arguments, page_requests, plan, read_result, serve_arguments
from loadtests.model import NAME
from loadtests.profile import Pages, Profile, ProfileError
from loadtests.record import FILE, Record
from loadtests.report import failures, write_report
from measure.arm import Arm
from measure.samples import parse
from measure.serving import Server, ServingError

pytestmark = pytest.mark.apparatus

ROOT = Path(__file__).parents[2]
PROFILES = sorted((ROOT / "loadtests" / "profiles").glob("*.yaml"))
DATA = ROOT / "tests/data/loadtests"
"""A recorded run of a small model, stock and evicting."""
RECORDED = ROOT / "tests/data/metrics.txt"

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": NAME,
    "served_model_name": "random",
    "serve": {"block-size": 32, "num-gpu-blocks-override": 64, "enforce-eager": True},
    "arms": {"stock": {}, "tgv": {"serve": {"kv-eviction": "tgv"}}},
    "workloads": {
        "lengths": {"kind": "random", "rates": [1, 4], "seconds": 3, "output_tokens": 16},
        "pages": {"kind": "pages", "rates": [2], "seconds": 2, "output_tokens": 12},
    },
}


def tiny(**changes: Any) -> dict[str, Any]:
    """Return `TINY` with fields replaced; `a__b` is field b of a."""
    values = copy.deepcopy(TINY)
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = values
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[name]
        else:
            place[name] = value
    return values


# -- profiles -------------------------------------------------------------------------------


def test_profiles_are_valid_and_serve_what_their_model_can() -> None:
    """The pool without the null block must hold the longest request, or no server starts."""
    for path in PROFILES:
        profile = Profile.read(path)
        assert profile.name == path.stem
        if profile.serve:
            slots = profile.serve["block-size"] * (profile.serve["num-gpu-blocks-override"] - 1)
            assert slots >= profile.serve["max-model-len"]
            assert profile.model == NAME
        if path.stem == "laptop":  # less than five minutes with starting servers and clients
            seconds = sum(load.requests / load.rate for load in plan(profile))
            assert seconds * len(profile.arms) < 150
    text = (ROOT / "docs" / "loadtest.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    servers = Profile.model_validate(yaml.safe_load(example)).servers
    assert list(servers) == ["stock", "reach"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"modell": "x"}, "modell is no field; choose from name, model, arms"),
        ({"model": None}, "model is missing; give it"),
        ({"arms": {}}, "arms is {}: Dictionary should have at least 1 item"),
        ({"arms__tgv__serv": {}}, "arms.tgv.serv is no field; choose from serve, url"),
        ({"arms__tgv__serve__block-size": 16}, "arms.tgv.serve.block-size is given; pools must"),
        ({"arms__tgv__url": "http://x"}, "arms.tgv.url and serve are both given"),
        ({"arms__stock__url": "x:8000"}, "arms.stock.url is 'x:8000': String should match"),
        ({"serve__block-size": None}, "serve.block-size is missing; give it, so that all arms"),
        ({"serve__port": 80}, "serve.port is set by the load test; leave it out"),
        ({"serve__--dtype": "half"}, "serve.--dtype is no flag of vllm serve; write it dtype"),
        ({"serve__enforce_eager": True}, "serve.enforce_eager is no flag of vllm serve"),
        ({"serve__enforce-eager": False}, "serve.enforce-eager is False; give true for a flag"),
        ({"goodput": {"itl": 3}}, "goodput.itl is 'itl': Input should be 'ttft', 'tpot' or"),
        ({"goodput": {"ttft": 0}}, "goodput.ttft is 0: Input should be greater than 0"),
        ({"workloads__pages__kind": "text"}, "expected tags: 'random', 'pages'"),
        ({"workloads__pages__rates": [1, 0]}, "workloads.pages.rates.1 is 0"),
        ({"workloads__pages__spread": 1}, "workloads.pages.spread is no field; choose from"),
        ({"workloads__lengths__spread": 1}, "workloads.lengths.spread is 1"),
        ({"workloads__lengths__images": 1.5}, "workloads.lengths.images is 1.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_profiles_are_refused(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names file, field, value and way out; nothing is started."""
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(tiny(**changes)))
    with pytest.raises(SystemExit) as caught:
        run.main(["--profile", str(path)])
    assert caught.value.code == 2
    found = capsys.readouterr().err
    assert said in found
    assert str(path) in found


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "text"])
def test_files_that_are_no_profiles(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=re.escape(str(path))):
        Profile.read(path)
    with pytest.raises(ProfileError, match="nowhere"):
        Profile.read(tmp_path / "nowhere.yaml")


# -- load -----------------------------------------------------------------------------------


def test_loads_have_their_own_requests() -> None:
    """No two loads of an arm share pages or seeds; the arms have the same loads."""
    loads = plan(Profile.model_validate(tiny()))
    assert [(load.workload, load.rate, load.requests) for load in loads] == [
        ("lengths", 1, 3),
        ("lengths", 4, 12),
        ("pages", 2, 4),
    ]
    assert len({load.seed for load in loads}) == len({load.first_page for load in loads}) == 3


def images_of(workload: Pages, first: int, count: int) -> list[str]:
    return [
        part["image_url"]["url"]
        for content in page_requests(workload, first, count)
        for part in content
        if part["type"] == "image_url"
    ]


def test_images_are_unique_unless_shared_on_purpose() -> None:
    mixed = Pages(rates=[1], seconds=1, output_tokens=8, pages=[1, 1, 2])
    images = images_of(mixed, 0, 6)
    assert len(images) == 8
    assert len(set(images + images_of(mixed, 10_000, 6))) == 16
    chats = Pages(rates=[1], seconds=1, output_tokens=8, questions_per_page=3)
    requests = list(page_requests(chats, 0, 6))
    assert [len(set(images_of(chats, 0, count))) for count in (3, 6)] == [1, 2]
    assert len({content[-1]["text"] for content in requests[:3]}) == 3
    assert [part["type"] for part in requests[0]] == ["image_url", "text"]


def test_bench_gets_poisson_arrivals_and_natural_ends(tmp_path: Path) -> None:
    """Arms differ in their own flags only."""
    profile = Profile.model_validate(tiny(goodput={"ttft": 500}))
    stock, ours = (serve_arguments(profile, arm) for arm in profile.servers.values())
    assert ours == [*stock, "--kv-eviction", "tgv"]
    arm = Arm(name="tgv", url="http://h:1/", extra_body={"a": 1})
    for load in plan(profile):
        arguments = bench_arguments(profile, arm, Server("http://h:1"), load, tmp_path)
        joined = " ".join(arguments)
        for part in (
            "--base-url http://h:1 ",
            "--burstiness 1 ",
            "--temperature 0",
            "--goodput ttft:500",
            '--extra-body {"a": 1}',
            f"--request-rate {load.rate:g}",
        ):
            assert part in joined
        assert "--ignore-eos" not in arguments  # random-mm sets it itself
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert all(line["content"][0]["type"] == "image_url" for line in lines)


def test_bench_arguments_are_known_to_vllm(tmp_path: Path) -> None:
    """Every argument is parsed by vLLM's own parser."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for path in PROFILES:
        profile = Profile.read(path)
        for load in plan(profile):
            small = replace(load, requests=1)
            for arm in profile.servers.values():
                arguments = bench_arguments(profile, arm, Server("http://h:1"), small, tmp_path)
                parsed = parser.parse_args(arguments[2:])
                assert parsed.request_rate == load.rate
                assert parsed.burstiness == 1


# -- what was recorded ----------------------------------------------------------------------


@pytest.fixture
def record() -> Record:
    return Record.read(DATA)


def test_result_of_bench_is_read() -> None:
    result = read_result(DATA / "bench.json")
    assert result["completed"] == len(result["output_lens"]) == len(result["texts"])
    assert result["failed"] == 0
    assert set(result["errors"]) == {""}
    assert all(re.fullmatch("[0-9a-f]{8}", text) for text in result["texts"])
    assert "generated_texts" not in result
    for measure in ("ttft", "itl", "e2el"):
        values = [result[f"p{percentile}_{measure}_ms"] for percentile in (50, 90, 99)]
        assert values == sorted(values)


def test_metrics_are_parsed() -> None:
    """The text was recorded from a server with eviction under load."""
    sample = parse(RECORDED.read_text(), now=3.0)
    assert (sample.time, sample.pool) == (3.0, (100, 32))
    assert sample.running > 0
    assert 0 < sample.kv_usage <= 1
    assert sample.memory_mib is not None
    assert sample.memory_mib > 100
    assert not sample.idle
    assert sample.eviction
    assert all(value >= 0 for value in sample.eviction.values())


def test_metrics_of_several_engines_are_added_up() -> None:
    lines = []
    for engine, (running, usage) in enumerate([(2, 0.25), (3, 0.75)]):
        labels = f'{{engine="{engine}",model_name="m"}}'
        lines += [f"vllm:num_requests_running{labels} {running}"]
        lines += [f"vllm:kv_cache_usage_perc{labels} {usage}"]
    sample = parse("\n".join(lines) + "\n", now=0, memory_mib=7)
    assert (sample.running, sample.kv_usage, sample.memory_mib) == (5, 0.75, 7)
    with pytest.raises(ServingError, match="is this a vLLM server"):
        parse("up 1\n", now=0)


def test_pools_must_be_equal(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = replace(parse(RECORDED.read_text(), now=0), pool=(99, 16))
    monkeypatch.setattr(run, "scrape", lambda server: sample)
    test = run.LoadTest(Profile.model_validate(tiny()), record, tmp_path, tmp_path)
    with pytest.raises(ServingError, match="other has 99 blocks of 16 tokens, but stock 100"):
        test._pool("other", Server("http://h:1"))
    record.arms.clear()
    assert test._pool("other", Server("http://h:1")) == (99, 16)


def test_report_of_a_recorded_run(record: Record, tmp_path: Path) -> None:
    """Markdown, HTML that loads nothing, and well-formed plots."""
    write_report(record, tmp_path)
    text, page = ((tmp_path / name).read_text() for name in ("README.md", "report.html"))
    plots = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert plots == ["throughput.svg", "usage.svg"]
    for plot in plots:
        xml.etree.ElementTree.parse(tmp_path / plot)
        assert f"]({plot})" in text
    assert page.count("<svg") == len(plots)
    assert not re.search(r"<(script|link|img|iframe|image)\b", page)
    assert not re.search(r"""\s(src|xlink:href)="(?!#)|url\((?!#)|@import""", page)
    assert {*re.findall(r"""<(\w+)[^>]*\shref="(?!#)""", page)} <= {"a"}
    for tag in ("html", "body", "table", "tr", "td", "figure", "p", "ul", "li", "svg", "pre"):
        assert len(re.findall(f"<{tag}[ >]", page)) == page.count(f"</{tag}>")
    for run_ in record.runs:
        assert f"`{run_.workload}` {run_.rate:g}/s | {run_.arm} |" in text
        assert f"{run_.bench['p99_ttft_ms']:.0f}" in text
    assert "No request failed." in text
    assert failures(record) == []
    write_report(record, tmp_path / "again")
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_report_names_failures(record: Record, tmp_path: Path) -> None:
    first, second = record.runs[:2]
    first.bench["failed"], first.bench["errors"][0] = 1, "Bad Gateway"
    left = {"running": 0.0, "waiting": 0.0, "kv_usage": 0.12}
    record.runs[1] = replace(second, idle=False, left=left, drain_seconds=30.0)
    found = failures(record)
    assert len(found) == 2
    assert "1 requests failed: Bad Gateway" in found[0]
    assert "not empty 30 s after the load" in found[1]
    assert "kv_usage 0.12" in found[1]
    write_report(record, tmp_path)
    assert "**Failed:**" in (tmp_path / "README.md").read_text()


def test_report_only_needs_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--report-only", str(tmp_path)])
    assert f"holds no {FILE}" in capsys.readouterr().err
    (tmp_path / FILE).write_bytes((DATA / FILE).read_bytes())
    assert run.main(["--report-only", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()
    Record.read(DATA).write(tmp_path)
    assert asdict(Record.read(tmp_path)) == asdict(Record.read(DATA))


# -- a real run -----------------------------------------------------------------------------


def run_profile(values: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "loadtests.run", "--profile", str(path)]
    return subprocess.run(
        [*command, "--output", str(folder / "report")],
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.engine
@pytest.mark.slow
def test_tiny_profile_from_start_to_end(tmp_path: Path) -> None:
    """A real evicting server, a run of each kind of workload, and a report."""
    values = tiny(
        name=tmp_path.name,
        serve__dtype="bfloat16",
        arms__stock=None,
        workloads__lengths={"kind": "random", "rates": [4], "seconds": 1.5, "output_tokens": 96},
        # Long enough that a busy machine's scrapes see them running.
        workloads__pages__output_tokens=96,
        workloads__pages__natural_end=False,
        scrape_seconds=0.05,
    )
    values["serve"] |= {"max-model-len": 1024, "max-num-seqs": 8}
    done = run_profile(values, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    record = Record.read(tmp_path / "report")
    assert [run_.workload for run_ in record.runs] == ["lengths", "pages"]
    assert record.arms["tgv"]["pool"] == [64, 32]
    for run_ in record.runs:
        assert run_.idle
        assert run_.bench["failed"] == 0
        assert run_.bench["completed"] == run_.counts["finished"]
        assert run_.counts["image_hits"] == 0
        assert max(run_.running) >= 1
        assert max(run_.kv_usage) > 0
        assert all(memory is not None and memory > 100 for memory in run_.memory_mib)
    assert record.runs[0].eviction
    assert (tmp_path / "report" / "report.html").exists()
    assert "tgv: load 2 of 2, 4 requests, pages 2/s" in done.stderr
    assert not [line for line in done.stderr.splitlines() if "Traceback" in line]
