# SPDX-License-Identifier: Apache-2.0
"""The files in `configs/`, read as `vllm serve --config` and Prometheus read them."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.conftest import ROOT
from vllm_tgvkv.config.server import CONFIG_KEY, EvictionConfig
from vllm_tgvkv.engine import patches
from vllm_tgvkv.shared.budget import Budget

pytestmark = pytest.mark.apparatus

CONFIGS = ROOT / "configs"
FLAVOURS = ("quality", "balanced", "throughput")
MODELS = {
    "internvl3-8b": "InternVL",
    "llava-1.5-7b": "Llava",
    "llava-onevision-7b": "LlavaOnevision",
    "qwen2.5-vl-7b": "Qwen2_5_VL",
    "qwen3-vl-4b": "Qwen3VL",
    "qwen3-vl-8b": "Qwen3VL",
}
"""With the names of their architectures, which end in `ForConditionalGeneration`."""
FILES = [CONFIGS / model / f"{flavour}.yaml" for model in MODELS for flavour in FLAVOURS]


@pytest.fixture(scope="session")
def serve_parser() -> FlexibleArgumentParser:
    """Return the parser of `vllm serve` with the plugin's flags."""
    patches.install_flags()
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


def serve(parser: FlexibleArgumentParser, *arguments: str) -> argparse.Namespace:
    """Return what `vllm serve ARGUMENTS` reads from its command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vllm", "serve", *arguments])
        args = parser.parse_args(sys.argv[1:])
    args.model = args.model_tag or args.model  # as the command does
    return args


def engine_args(parser: FlexibleArgumentParser, *arguments: str) -> AsyncEngineArgs:
    """Return the arguments from which vLLM makes its engine; a model's name stays a name."""
    with pytest.MonkeyPatch.context() as patch:
        # Offline, vLLM would replace it by the path of a downloaded model.
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        return AsyncEngineArgs.from_cli_args(serve(parser, *arguments))


def read(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text())
    assert isinstance(values, dict)
    return values


def test_every_model_has_every_flavour() -> None:
    assert sorted(CONFIGS.glob("*/*.yaml")) == sorted(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_values_reach_engine_and_eviction(serve_parser: FlexibleArgumentParser, path: Path) -> None:
    """And one flag leads back to stock."""
    values = read(path)
    # vLLM ignores keys that are no flags if their value is `false`.
    (commands,) = (a for a in serve_parser._actions if isinstance(a, argparse._SubParsersAction))
    known = commands.choices["serve"]._option_string_actions
    assert [key for key in values if f"--{key}" not in known] == []
    made = engine_args(serve_parser, "--config", str(path))
    settings = EvictionConfig.from_mapping(made.additional_config[CONFIG_KEY])
    assert settings.policy == values.pop("kv-eviction")
    assert settings.budget == Budget.parse(values.pop("kv-eviction-budget"), "the file")
    assert settings.when == values.pop("kv-eviction-when")
    assert settings.active
    assert {key: getattr(made, key.replace("-", "_")) for key in values} == values
    made = engine_args(serve_parser, "--config", str(path), "--kv-eviction", "none")
    assert not EvictionConfig.from_mapping(made.additional_config[CONFIG_KEY]).active


@pytest.mark.parametrize(
    "line", ["kv-evicton-window: 3", "kv-eviction-budget: 2.5", "max-model-length: 3"]
)
def test_a_wrong_line_is_refused(
    serve_parser: FlexibleArgumentParser, tmp_path: Path, line: str
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(f"model: some/model\n{line}\n")
    with pytest.raises(SystemExit):
        serve(serve_parser, "--config", str(path))


def table(heading: str) -> list[list[str]]:
    """Return the rows of the first table below a heading of `configs/README.md`."""
    text = (CONFIGS / "README.md").read_text().split(f"\n## {heading}\n")[1]
    rows = re.findall(r"^\|(.*)\|$", text.split("\n## ")[0], flags=re.MULTILINE)
    return [[cell.strip().strip("`") for cell in row.split("|")] for row in rows[2:]]


def test_tables_of_the_readme_are_those_of_the_files() -> None:
    by_model = {model: [read(CONFIGS / model / f"{f}.yaml") for f in FLAVOURS] for model in MODELS}
    rows = {row[0]: row for row in table("Models")}
    assert rows.keys() == by_model.keys()
    for model, files in by_model.items():
        name, length, images = (rows[model][i] for i in (1, 3, 4))
        assert {name} == {values["model"] for values in files}
        assert length == " / ".join(str(values["max-model-len"]) for values in files)
        assert images == " / ".join(str(v["limit-mm-per-prompt"]["image"]) for v in files)

    for key, *cells, note in table("Flavours"):
        for model, files in by_model.items():
            differs = key == "kv-eviction-budget" and model in note
            stated = re.findall(r"\b0\.\d+", note) if differs else cells
            assert stated == [str(values[key]) for values in files], (model, key)


def test_the_mix_of_the_readme_is_read(
    serve_parser: FlexibleArgumentParser, tmp_path: Path
) -> None:
    mix = re.findall(r"```yaml\n(.*?)```", (CONFIGS / "README.md").read_text(), flags=re.DOTALL)
    assert len(mix) == 1
    balanced = (CONFIGS / "qwen2.5-vl-7b/balanced.yaml").read_text()
    path = tmp_path / "mix.yaml"
    path.write_text(balanced.replace("kv-eviction: reach\n", mix[0]))
    made = engine_args(serve_parser, "--config", str(path))
    settings = EvictionConfig.from_mapping(made.additional_config[CONFIG_KEY])
    assert settings.policy == "reach_by_layer"
    assert settings.methods["reach_by_layer"].allocation == "prefixkv"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_engine_configuration_is_accepted(
    serve_parser: FlexibleArgumentParser, tmp_path: Path, model: str
) -> None:
    """vLLM knows the architecture, and the plugin accepts it."""
    architecture = f"{MODELS[model]}ForConditionalGeneration"
    config = getattr(transformers, architecture).config_class()
    config.architectures = [architecture]
    text = config.get_text_config()
    text.max_position_embeddings = max(text.max_position_embeddings, 4096)
    config.save_pretrained(tmp_path)
    for flavour in FLAVOURS:
        path = CONFIGS / model / f"{flavour}.yaml"
        flags = ("--config", str(path), "--skip-tokenizer-init")
        made = engine_args(serve_parser, str(tmp_path), *flags).create_engine_config()
        values = read(path)
        assert made.model_config.architecture == architecture
        assert made.model_config.max_model_len == values["max-model-len"]
        assert made.cache_config.block_size == values["block-size"]
        schedulers = (patches.SCHEDULER_CLS, patches.ASYNC_SCHEDULER_CLS)
        assert made.scheduler_config.scheduler_cls in schedulers


def test_prometheus_and_grafana_fit_together() -> None:
    path, folder = CONFIGS / "prometheus/prometheus.yml", CONFIGS / "grafana/provisioning"
    (job,) = read(path)["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    if promtool := shutil.which("promtool"):
        subprocess.run([promtool, "check", "config", path], check=True, capture_output=True)
    (source,) = read(folder / "datasources/prometheus.yml")["datasources"]
    assert (source["uid"], source["type"]) == ("prometheus", "prometheus")
    assert source["jsonData"]["timeInterval"] == read(path)["global"]["scrape_interval"]
    (provider,) = read(folder / "dashboards/vllm-tgvkv.yml")["providers"]
    assert provider["type"] == "file"
    for dashboard in (CONFIGS / "grafana/dashboards").glob("*.json"):
        panels = json.dumps(json.loads(dashboard.read_text())["panels"])
        uids = re.findall(r'"uid": "([^"]*)"', panels)
        assert {uid for uid in uids if not uid.startswith(("$", "-- "))} <= {
            "prometheus",
            "grafana",
        }
