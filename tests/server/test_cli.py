# SPDX-License-Identifier: Apache-2.0
"""The flags in the real argument parser of `vllm serve`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import re
import shlex
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.inputs import write_gates
from vllm_tgvkv.config.server import CONFIG_KEY, EvictionConfig, config_of
from vllm_tgvkv.engine import patches
from vllm_tgvkv.policies import METHOD_NAMES
from vllm_tgvkv.shared.errors import EvictionConfigError


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """Build the parser of `vllm serve`, as `vllm.entrypoints.cli.main` does."""
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


def parse(parser: FlexibleArgumentParser, flags: str = "", model: str = ".") -> argparse.Namespace:
    """Return what `vllm serve` reads from flags as a shell has them."""
    # vLLM reads `sys.argv` to know which of its commands runs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vllm", "serve", model, *shlex.split(flags)])
        args = parser.parse_args(sys.argv[1:])
    args.model = args.model_tag  # as the command does
    return args


def settings(parser: FlexibleArgumentParser, flags: str) -> dict[str, Any]:
    """Return `additional_config` after these flags."""
    return AsyncEngineArgs.from_cli_args(parse(parser, flags)).additional_config


def write_config(folder: Path, **fields: Any) -> Path:
    """Write the configuration of a small model, without weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    config = Qwen2Config(**sizes, **fields)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("topic", ["", "KVEviction", "kv-eviction", "all"])
def test_help_shows_the_flags_and_explains_every_setting(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], topic: str
) -> None:
    """Settings of `--kv-eviction-config` one a line, with values and default; not `debug`."""
    with pytest.raises(SystemExit) as caught:
        parse(parser, f"--help={topic}" if topic else "--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    if topic != "kv-eviction":  # a search for flags shows no group titles
        assert "KVEviction" in text
    if topic:
        for flag in ("", "-budget", "-when", "-config", "-gates"):
            assert f"--kv-eviction{flag} " in text
        assert "{" + ",".join(["none", *METHOD_NAMES]) + "}" in text
    if topic == "KVEviction":
        assert "--max-model-len" not in text
        text = re.sub(r"\n +(?! |- )", " ", text)
        listed = re.findall(r"^ *- (\w+): .*\(.+; default: .+\)", text, flags=re.MULTILINE)
        assert listed == [field.name for field in dataclasses.fields(EvictionConfig)][3:-1]
        assert "`auto:SHARE`" in text
        assert "the method's own: 0.1, 0.2 with `reach`" in text


TGV = "--kv-eviction tgv"


def inline(**fields: Any) -> str:
    """Return the flag with settings as inline JSON."""
    return f"--kv-eviction-config '{json.dumps(fields)}'"


ADDITIONAL = json.dumps({CONFIG_KEY: {"policy": "tgv", "budget": 0.2}})


@pytest.mark.parametrize(
    ("flags", "mapping"),
    [
        ("", None),
        ("--kv-eviction none", {"policy": "none"}),
        (TGV, {"policy": "tgv"}),
        ("--kv-eviction=tgv --kv-eviction-budget=0.2", {"policy": "tgv", "budget": "0.2"}),
        (f"{TGV} --kv-eviction-when pressure", {"policy": "tgv", "when": "pressure"}),
        ("--kv_eviction tgv --kv_eviction_budget 1", {"policy": "tgv", "budget": "1"}),
        (f"{TGV} --kv-eviction-budget 512", {"policy": "tgv", "budget": "512"}),
        (f"{TGV} --kv-eviction-budget auto:0.9", {"policy": "tgv", "budget": "auto:0.9"}),
        (f"{TGV} {inline(sinks=8)}", {"policy": "tgv", "sinks": 8}),
        (
            f"{TGV} --kv-eviction-config.decode.max_tokens 512",
            {"policy": "tgv", "decode": {"max_tokens": 512}},
        ),
        (inline(policy="tgv", sinks=0), {"policy": "tgv", "sinks": 0}),
        (
            "--kv-eviction m " + inline(methods={"m": {"allocation": "vv"}}),
            {"policy": "m", "methods": {"m": {"allocation": "vv"}}},
        ),
        (
            "--kv-eviction none " + inline(policy="tgv", budget=0.5),
            {"policy": "none", "budget": 0.5},
        ),
        (f"--additional-config '{ADDITIONAL}'", {"policy": "tgv", "budget": 0.2}),
    ],
)
def test_flags_fill_additional_config(
    parser: FlexibleArgumentParser, flags: str, mapping: dict[str, Any] | None
) -> None:
    """A flag wins over the same key in the config, and other keys stay."""
    assert settings(parser, flags) == ({} if mapping is None else {CONFIG_KEY: mapping})
    if mapping is not None and "additional" not in flags:
        others = settings(parser, f"--additional-config '{{\"other\": 1}}' {flags}")
        assert others == {"other": 1, CONFIG_KEY: mapping}


def test_a_folder_of_gates(
    parser: FlexibleArgumentParser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a path of any kind, which other processes get as an absolute one."""
    write_gates(tmp_path / "gates", "rg10", 2, 64, 4)
    monkeypatch.chdir(tmp_path)
    gates = "--kv-eviction-gates gates"
    flags, wanted = f"--kv-eviction dbtrimkv {gates}", {"policy": "dbtrimkv"}
    wanted["gates"] = str(tmp_path / "gates")
    assert settings(parser, flags) == {CONFIG_KEY: wanted}
    found = settings(parser, f"{flags} {inline(sinks=0)}")
    assert found == {CONFIG_KEY: {**wanted, "sinks": 0}}
    for given, *parts in (
        ("--kv-eviction dbtrimkv", "'trimkv' reads gates of", "give their folder with"),
        (f"--kv-eviction kvzap {gates}", "'kvzap' reads gates of KVzap, and "),
        (gates, "-gates is given without --kv-eviction"),
        (f"{flags[:-5]}none", f"kv_eviction.gates is '{tmp_path}/none': its config.json"),
        (f"{TGV} {inline(gates='/other')}", "'/other': its config.json"),
    ):
        line = refusal(parser, capsys, given)
        assert all(part in line for part in parts), line


@pytest.mark.parametrize("inline", [True, False])
def test_configs_as_files(parser: FlexibleArgumentParser, tmp_path: Path, inline: bool) -> None:
    """`vllm serve --config serve.yaml` with the plugin's keys in it."""
    eviction, path = tmp_path / "eviction.yaml", tmp_path / "serve.yaml"
    eviction.write_text("sinks: 8\nmethods: {mine: {base: tgv, pooling: grid}}\n")
    wanted: dict[str, Any] = {"sinks": 8, "methods": {"mine": {"base": "tgv", "pooling": "grid"}}}
    path.write_text(
        "max-model-len: 777\nkv-eviction: tgv\nkv-eviction-budget: 0.25\n"
        f"kv-eviction-config: {json.dumps(wanted) if inline else eviction}\n"
    )
    args = parse(parser, f"--config {path}")
    assert args.max_model_len == 777
    found = AsyncEngineArgs.from_cli_args(args).additional_config[CONFIG_KEY]
    assert found == {"policy": "tgv", "budget": "0.25", **wanted}
    found = settings(parser, f"{TGV} --kv-eviction-config {eviction}")[CONFIG_KEY]
    assert found == {"policy": "tgv", **wanted}


def refusal(parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], flags: str) -> str:
    """Return the one line after vLLM's line about usage, with which parsing ends the program."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        parse(parser, flags)
    assert caught.value.code == 2
    usage, line = capsys.readouterr().err.strip().splitlines()
    assert usage.startswith("usage: vllm serve")
    assert "error: " in line
    assert "debug" not in line
    assert "null" not in line
    return line


BUDGET, CONFIG = f"{TGV} --kv-eviction-budget", f"{TGV} --kv-eviction-config"
MINE2 = "--kv-eviction is 'mine2': did you mean mine?"
MINE = inline(methods={"mine": {}})


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (f"{BUDGET} auto:2", ["--kv-eviction-budget", "'auto:2'", "auto:0.98"]),
        (f"{BUDGET} 0", ["--kv-eviction-budget", "'0'", "0 < budget <= 1"]),
        (f"{BUDGET}=-1", ["--kv-eviction-budget", "'-1'", "tokens per KV head"]),
        (f"{CONFIG} /nowhere/e.yaml", ["--kv-eviction-config", "/nowhere/e.yaml", "YAML or JSON"]),
        (f"{CONFIG} '{{sinks: 8'", ["--kv-eviction-config", "{sinks: 8", "not valid"]),
        (
            f"{TGV} {inline(sinks=-1)}",
            ["--kv-eviction-config", "kv_eviction.sinks is -1", "at least 0"],
        ),
        (
            f"{TGV} {inline(snks=4)}",
            ["--kv-eviction-config", "snks", "did you mean sinks? Known are"],
        ),
        # Wrong only together, whatever their order.
        (
            "--kv-eviction snapkb",
            ["--kv-eviction is 'snapkb': did you mean snapkv? Choose one of none, tgv"],
        ),
        (f"--kv-eviction mine2 {MINE}", [MINE2]),
        (f"{MINE} --kv-eviction mine2", [MINE2]),
        ("--kv-eviction-budget 0.2", ["--kv-eviction-budget", "--kv-eviction reach"]),
        (inline(sinks=8), ["--kv-eviction-config", "--kv-eviction reach"]),
        (
            f"{TGV} --additional-config '{ADDITIONAL}'",
            ["--additional-config", "both given: use one"],
        ),
        (
            "--kv-eviction random --kv-eviction-budget auto:0.9",
            ["auto", "--kv-eviction 'random'", "another method"],
        ),
        (
            f"{inline(granularity='head')} {TGV}",
            ["kv_eviction has granularity, which was removed: set it in a mix"],
        ),
        (
            "--kv-eviction aircache " + inline(text_only="evict"),
            ["text_only", "'aircache'", "snapkv"],
        ),
    ],
)
def test_wrong_flags_exit_with_one_message(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], flags: str, parts: list[str]
) -> None:
    """The last line names the flag, the value and the way out."""
    line = refusal(parser, capsys, flags)
    assert all(part in line for part in parts), line
    assert parse(parser).subparser == "serve"  # the next arguments are not held against them


def test_parsed_arguments_that_are_wrong_raise(parser: FlexibleArgumentParser) -> None:
    """Programs that make the arguments themselves get an exception, before a model is read."""
    args = parse(parser, TGV, model="/nowhere")
    args.kv_eviction = "snapkb"
    with pytest.raises(EvictionConfigError, match=r"--kv-eviction is 'snapkb': did you mean snapk"):
        AsyncEngineArgs.from_cli_args(args)


@pytest.mark.slow
def test_a_refused_model_ends_the_server_with_one_line(tmp_path: Path) -> None:
    """A real `vllm serve`: its log up to then, one line with the model and layers, exit code 2."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 4}
    windows = write_config(tmp_path, use_sliding_window=True, sliding_window=64, **layers)
    command = [sys.executable, "-c", "from vllm.entrypoints.cli.main import main; main()"]
    flags = ["--skip-tokenizer-init", "--kv-eviction", "tgv"]
    ended = subprocess.run(
        [*command, "serve", str(windows), *flags], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        f"vllm serve: error: --kv-eviction does not work with sliding-window attention in "
        f"all layers ({windows}: 0-3) yet: serve another model or leave out --kv-eviction"
    )
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.slow
def test_settings_in_additional_config_end_a_server_likewise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Python the same settings raise."""
    given = {CONFIG_KEY: {"policy": "t"}}
    model = str(write_config(tmp_path))
    args = AsyncEngineArgs(model=model, skip_tokenizer_init=True, additional_config=given)
    with pytest.raises(SystemExit) as caught:
        args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("vllm serve: error: kv_eviction.policy is 't': choose one of none, tgv")
    with pytest.raises(EvictionConfigError, match=r"kv_eviction.policy is 't'"):
        args.create_engine_config(usage_context=UsageContext.LLM_CLASS)


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_a_server_without_its_routes_says_what_is_missing(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM loads routes of a plugin only if `VLLM_PLUGINS` names it."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if named:
        monkeypatch.setenv("VLLM_PLUGINS", "tgvkv")
    given = {CONFIG_KEY: {"policy": "tgv"}}
    model = str(write_config(tmp_path))
    args = AsyncEngineArgs(model=model, skip_tokenizer_init=True, additional_config=given)
    with caplog.at_level("WARNING", "vllm.tgvkv"):
        args.create_engine_config(usage_context=UsageContext.LLM_CLASS)
        assert "VLLM_PLUGINS" not in caplog.text
        args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    assert ("with VLLM_PLUGINS=tgvkv" in caplog.text) == (not named)


@pytest.mark.slow
def test_help_is_as_quick_as_vllms_own() -> None:
    """The flags import this plugin's own light modules, and nothing that vLLM had not imported."""
    code = (
        "import sys, vllm.entrypoints.cli.serve\n"
        "before = set(sys.modules)\n"
        "import vllm_tgvkv.plugin\n"
        "vllm_tgvkv.plugin.register()\n"
        "print('imported', *sorted(set(sys.modules) - before))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (found,) = (line for line in ended.stdout.splitlines() if line.startswith("imported "))
    imported = found.split()[1:]
    assert "vllm_tgvkv.engine.patches" in imported
    assert [name for name in imported if not name.startswith("vllm_tgvkv")] == []
    heavy = {"scheduler", "manager", "worker", "attention", "evictor", "server"}
    assert heavy.isdisjoint(name.split(".")[1] for name in imported if "." in name)


def read_in_a_fresh_process(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Read the arguments as an API server process does."""
    from vllm.v1.engine.input_processor import InputProcessor

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    wrapped = patches.is_wrapped(InputProcessor, "process_inputs")
    return config.additional_config, wrapped


@pytest.mark.slow
def test_flags_reach_api_server_processes(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    """`--api-server-count 2`: each server is a new process that reads the parsed arguments.

    It does so before it loads any plugin. A server that misses the flags would accept wrong
    request parameters, which end the engine.
    """
    args = parse(parser, f"{BUDGET} 0.2", model=str(write_config(tmp_path)))
    wanted = {CONFIG_KEY: {"policy": "tgv", "budget": "0.2"}}
    assert AsyncEngineArgs.from_cli_args(args).additional_config == wanted  # the parent's
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(read_in_a_fresh_process, args).result() == (wanted, True)
    assert AsyncEngineArgs.from_cli_args(args).additional_config == wanted  # again


@pytest.mark.slow
def test_flags_are_read_once(
    parser: FlexibleArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line to the engine's configuration; a mapping of Python's, per engine."""
    read, calls = EvictionConfig.from_mapping, []
    monkeypatch.setattr(
        EvictionConfig, "from_mapping", lambda *args: calls.append(args) or read(*args)
    )
    model = str(write_config(tmp_path))
    args = parse(parser, f"{TGV} {inline()}", model=model)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert config_of(config) is config_of(config)
    assert len(calls) == 1
    mapping = {CONFIG_KEY: {"policy": "tgv"}}
    for number in (2, 3):  # a file that it names may have changed meanwhile
        args = AsyncEngineArgs(model=model, skip_tokenizer_init=True, additional_config=mapping)
        config_of(args.create_engine_config())
        assert len(calls) == number
