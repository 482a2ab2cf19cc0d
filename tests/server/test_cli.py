# SPDX-License-Identifier: Apache-2.0
"""The flags in the real argument parser of `vllm serve`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config
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


def parse(parser: FlexibleArgumentParser, *flags: str, model: str = ".") -> argparse.Namespace:
    # vLLM reads `sys.argv` to know which of its commands runs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vllm", "serve", model, *flags])
        args = parser.parse_args(sys.argv[1:])
    args.model = args.model_tag  # as the command does
    return args


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the configuration of a small Llama, without weights."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def settings(parser: FlexibleArgumentParser, *flags: str) -> dict[str, Any]:
    """Return `additional_config` after these flags."""
    return AsyncEngineArgs.from_cli_args(parse(parser, *flags)).additional_config


@pytest.mark.parametrize("topic", ["KVEviction", "kv-eviction", "all"])
def test_help_shows_the_group_of_flags(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], topic: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(parser, f"--help={topic}")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--kv-eviction" in text
    assert "--kv-eviction-budget" in text
    assert "--kv-eviction-config" in text
    assert "{" + ",".join(["none", *METHOD_NAMES]) + "}" in text
    if topic != "kv-eviction":  # a search for flags shows no group titles
        assert "KVEviction" in text
    if topic == "KVEviction":
        assert "--max-model-len" not in text


def test_plain_help_lists_the_group(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(parser, "--help")
    assert "KVEviction" in capsys.readouterr().out


def test_the_help_explains_every_setting(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of `--kv-eviction-config` one a line, with values and default; `debug` is for tests."""
    with pytest.raises(SystemExit):
        parse(parser, "--help=KVEviction")
    text = re.sub(r"\n +(?! |- )", " ", capsys.readouterr().out)
    listed = re.findall(r"^ *- (\w+): .*\(.+; default: .+\)", text, flags=re.MULTILINE)
    assert listed == [field.name for field in dataclasses.fields(EvictionConfig)][2:-1]
    assert "`auto:SHARE`" in text
    assert "the method's own: 0.1, 0.2 with `reach`" in text


@pytest.mark.parametrize(
    ("flags", "mapping"),
    [
        ([], None),
        (["--kv-eviction", "none"], {"policy": "none"}),
        (["--kv-eviction", "tgv"], {"policy": "tgv"}),
        (["--kv-eviction=tgv", "--kv-eviction-budget=0.2"], {"policy": "tgv", "budget": "0.2"}),
        (["--kv_eviction", "tgv", "--kv_eviction_budget", "1"], {"policy": "tgv", "budget": "1"}),
        (
            ["--kv-eviction", "tgv", "--kv-eviction-budget", "512"],
            {"policy": "tgv", "budget": "512"},
        ),
        (
            ["--kv-eviction", "tgv", "--kv-eviction-config", '{"sinks": 8}'],
            {"policy": "tgv", "sinks": 8},
        ),
        (
            ["--kv-eviction", "tgv", "--kv-eviction-config.decode.max_tokens", "512"],
            {"policy": "tgv", "decode": {"max_tokens": 512}},
        ),
        (["--kv-eviction-config", '{"policy": "tgv", "sinks": 0}'], {"policy": "tgv", "sinks": 0}),
        (
            ["--kv-eviction", "tgv", "--kv-eviction-budget", "auto:0.98,max=0.4"],
            {"policy": "tgv", "budget": "auto:0.98,max=0.4"},
        ),
        (
            [
                "--kv-eviction",
                "m",
                "--kv-eviction-config",
                '{"methods": {"m": {"allocation": "vv"}}}',
            ],
            {"policy": "m", "methods": {"m": {"allocation": "vv"}}},
        ),
        (
            ["--kv-eviction", "none", "--kv-eviction-config", '{"policy": "tgv", "budget": 0.5}'],
            {"policy": "none", "budget": 0.5},
        ),
    ],
)
def test_flags_fill_additional_config(
    parser: FlexibleArgumentParser, flags: list[str], mapping: dict[str, Any] | None
) -> None:
    """A flag wins over the same key in the config."""
    assert settings(parser, *flags) == ({} if mapping is None else {CONFIG_KEY: mapping})


def test_a_folder_of_gates(
    parser: FlexibleArgumentParser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a path of any kind, which other processes get as an absolute one."""
    write_gates(tmp_path / "gates", "rg10", 2, 64, 4)
    monkeypatch.chdir(tmp_path)
    flags = ["--kv-eviction", "dbtrimkv", "--kv-eviction-gates", "gates"]
    wanted = {"policy": "dbtrimkv", "gates": str(tmp_path / "gates")}
    assert settings(parser, *flags) == {CONFIG_KEY: wanted}
    config = '{"gates": "/other"}'
    assert settings(parser, *flags, "--kv-eviction-config", '{"sinks": 0}') == {
        CONFIG_KEY: {**wanted, "sinks": 0}
    }
    for given, parts in (
        (["--kv-eviction", "dbtrimkv"], ["'trimkv' reads gates of", "give their folder with"]),
        (["--kv-eviction", "kvzap", *flags[2:]], ["'kvzap' reads gates of KVzap, and "]),
        (flags[2:], ["-gates is given without --kv-eviction"]),
        ([*flags[:3], "none"], [f"kv_eviction.gates is '{tmp_path}/none': its config.json"]),
        (["--kv-eviction", "tgv", "--kv-eviction-config", config], ["'/other': its config.json"]),
    ):
        line = refusal(parser, capsys, *given)
        assert all(part in line for part in parts), line


def test_other_additional_config_is_kept(parser: FlexibleArgumentParser) -> None:
    flags = ["--additional-config", '{"other": {"x": 1}}', "--kv-eviction", "tgv"]
    assert settings(parser, *flags) == {"other": {"x": 1}, CONFIG_KEY: {"policy": "tgv"}}


def test_eviction_config_as_a_file(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    path = tmp_path / "eviction.yaml"
    path.write_text("sinks: 8\nmethods: {mine: {base: tgv, pooling: grid}}\n")
    mapping = settings(parser, "--kv-eviction", "tgv", "--kv-eviction-config", str(path))
    assert mapping[CONFIG_KEY] == {
        "policy": "tgv",
        "sinks": 8,
        "methods": {"mine": {"base": "tgv", "pooling": "grid"}},
    }


@pytest.mark.parametrize("inline", [True, False])
def test_vllms_own_config_file(
    parser: FlexibleArgumentParser, tmp_path: Path, inline: bool
) -> None:
    """`vllm serve --config serve.yaml` with the plugin's keys in it."""
    eviction = tmp_path / "eviction.json"
    eviction.write_text(json.dumps({"sinks": 8}))
    config = "{sinks: 8}" if inline else str(eviction)
    path = tmp_path / "serve.yaml"
    path.write_text(
        "max-model-len: 777\nkv-eviction: tgv\nkv-eviction-budget: 0.25\n"
        f"kv-eviction-config: {config}\n"
    )
    args = parse(parser, "--config", str(path))
    assert args.max_model_len == 777
    assert AsyncEngineArgs.from_cli_args(args).additional_config[CONFIG_KEY] == {
        "policy": "tgv",
        "budget": "0.25",
        "sinks": 8,
    }


def refusal(parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the one line after vLLM's line about usage, with which parsing ends the program."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        parse(parser, *flags)
    assert caught.value.code == 2
    usage, line = capsys.readouterr().err.strip().splitlines()
    assert usage.startswith("usage: vllm serve")
    assert "error: " in line
    assert "debug" not in line
    assert "null" not in line
    return line


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--kv-eviction-budget", "auto:2"], ["--kv-eviction-budget", "'auto:2'", "auto:0.98"]),
        (["--kv-eviction-budget", "0"], ["--kv-eviction-budget", "'0'", "0 < budget <= 1"]),
        (["--kv-eviction-budget=-1"], ["--kv-eviction-budget", "'-1'", "tokens per KV head"]),
        (["--kv-eviction-budget", "1.5"], ["--kv-eviction-budget", "'1.5'", "0 < budget <= 1"]),
        (["--kv-eviction-budget", "lots"], ["--kv-eviction-budget", "'lots'", "such as 512"]),
        (["--kv-eviction-budget", "nan"], ["--kv-eviction-budget", "'nan'", "such as 512"]),
        (
            ["--kv-eviction-config", "/nowhere/eviction.yaml"],
            ["--kv-eviction-config", "/nowhere/eviction.yaml", "YAML or JSON"],
        ),
        (["--kv-eviction-config", "{sinks: 8"], ["--kv-eviction-config", "{sinks: 8", "not valid"]),
        (
            ["--kv-eviction-config", '{"sinks": -1}'],
            ["--kv-eviction-config", "kv_eviction.sinks is -1", "at least 0"],
        ),
        (
            ["--kv-eviction-config", '{"snks": 4}'],
            ["--kv-eviction-config", "snks", "did you mean sinks? Known are"],
        ),
    ],
)
def test_wrong_values_exit_with_one_message(
    parser: FlexibleArgumentParser,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    parts: list[str],
) -> None:
    """The last line names the flag, the value and the way out."""
    line = refusal(parser, capsys, "--kv-eviction", "tgv", *flags)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["--kv-eviction", "snapkb"],
            ["--kv-eviction is 'snapkb': did you mean snapkv? Choose one of none, tgv"],
        ),
        (["--kv-eviction", "zzz"], ["--kv-eviction is 'zzz': choose one of none, tgv"]),
        (
            ["--kv-eviction", "mine2", "--kv-eviction-config", '{"methods": {"mine": {}}}'],
            ["--kv-eviction is 'mine2': did you mean mine?"],
        ),
        (
            ["--kv-eviction-config", '{"methods": {"mine": {}}}', "--kv-eviction", "mine2"],
            ["--kv-eviction is 'mine2': did you mean mine?"],
        ),
        (["--kv-eviction-budget", "0.2"], ["--kv-eviction-budget", "--kv-eviction tgv"]),
        (["--kv-eviction-config", '{"sinks": 8}'], ["--kv-eviction-config", "--kv-eviction tgv"]),
        (
            [
                "--kv-eviction",
                "tgv",
                "--additional-config",
                json.dumps({CONFIG_KEY: {"policy": "tgv"}}),
            ],
            ["--additional-config", "both given: use one"],
        ),
        (
            ["--kv-eviction", "random", "--kv-eviction-budget", "auto:0.9"],
            ["auto", "--kv-eviction 'random'", "another method"],
        ),
        (
            [
                "--kv-eviction-config",
                '{"methods": {"mine": {"base": "adakv", "granularity": "layer"}}}',
                *("--kv-eviction", "mine"),
            ],
            ["'mine'", "no meaning", "choose head"],
        ),
        (
            ["--kv-eviction-config", '{"granularity": "head"}', "--kv-eviction", "tgv"],
            ["kv_eviction has granularity, which was removed: set it in a mix"],
        ),
        (
            ["--kv-eviction", "aircache", "--kv-eviction-config", '{"text_only": "evict"}'],
            ["text_only", "'aircache'", "snapkv"],
        ),
    ],
)
def test_impossible_methods_are_refused(
    parser: FlexibleArgumentParser,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    parts: list[str],
) -> None:
    """Flags that are wrong only together end the program in the same way, whatever their order."""
    line = refusal(parser, capsys, *flags)
    for part in parts:
        assert part in line
    assert parse(parser).subparser == "serve"  # the next arguments are not held against them


def test_parsed_arguments_that_are_wrong_raise(parser: FlexibleArgumentParser) -> None:
    """Programs that make the arguments themselves get an exception, before a model is read."""
    args = parse(parser, "--kv-eviction", "tgv", model="/nowhere")
    args.kv_eviction = "snapkb"
    with pytest.raises(EvictionConfigError, match=r"--kv-eviction is 'snapkb': did you mean snapk"):
        AsyncEngineArgs.from_cli_args(args)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the configuration of a small model whose layers all attend over a window."""
    folder = tmp_path_factory.mktemp("windows")
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_sliding_window=True,
        sliding_window=64,
        layer_types=["sliding_attention"] * 4,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_refused_model_ends_the_server_with_one_line(windows: Path) -> None:
    """A real `vllm serve`: its log up to then, one line with the model and layers, exit code 2."""
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
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Python the same settings raise."""
    args = AsyncEngineArgs(
        model=str(llama), skip_tokenizer_init=True, additional_config={CONFIG_KEY: {"policy": "t"}}
    )
    with pytest.raises(SystemExit) as caught:
        args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("vllm serve: error: kv_eviction.policy is 't': choose one of none, tgv")
    with pytest.raises(EvictionConfigError, match=r"kv_eviction.policy is 't'"):
        args.create_engine_config(usage_context=UsageContext.LLM_CLASS)


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
    wrapped = patches.is_wrapped(InputProcessor, "_validate_params")
    return config.additional_config, wrapped


@pytest.mark.slow
def test_flags_reach_api_server_processes(parser: FlexibleArgumentParser, llama: Path) -> None:
    """`--api-server-count 2`: each server is a new process that reads the parsed arguments.

    It does so before it loads any plugin. A server that misses the flags would accept wrong
    request parameters, which end the engine.
    """
    args = parse(parser, "--kv-eviction", "tgv", "--kv-eviction-budget", "0.2", model=str(llama))
    wanted = {CONFIG_KEY: {"policy": "tgv", "budget": "0.2"}}
    assert AsyncEngineArgs.from_cli_args(args).additional_config == wanted  # the parent's
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(read_in_a_fresh_process, args).result() == (wanted, True)
    assert AsyncEngineArgs.from_cli_args(args).additional_config == wanted  # again


@pytest.mark.slow
def test_flags_are_read_once(
    parser: FlexibleArgumentParser, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line to the engine's configuration; a mapping of Python's, per engine."""
    read, calls = EvictionConfig.from_mapping, []
    monkeypatch.setattr(
        EvictionConfig, "from_mapping", lambda *args: calls.append(args) or read(*args)
    )
    args = parse(parser, "--kv-eviction", "tgv", "--kv-eviction-config", "{}", model=str(llama))
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert config_of(config) is config_of(config)
    assert len(calls) == 1
    mapping = {CONFIG_KEY: {"policy": "tgv"}}
    for number in (2, 3):  # a file that it names may have changed meanwhile
        args = AsyncEngineArgs(
            model=str(llama), skip_tokenizer_init=True, additional_config=mapping
        )
        config_of(args.create_engine_config())
        assert len(calls) == number


def test_additional_config_alone_is_enough(parser: FlexibleArgumentParser) -> None:
    mapping = {CONFIG_KEY: {"policy": "tgv", "budget": 0.2}}
    assert settings(parser, "--additional-config", json.dumps(mapping)) == mapping
