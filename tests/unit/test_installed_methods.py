# SPDX-License-Identifier: Apache-2.0
"""Methods of other installed packages, found by entry points; here modules on a made-up path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.policies import (
    METHOD_NAMES,
    POLICY_NAMES,
    Mix,
    build_policy,
    method_names,
    registry,
)
from vllm_tgvkv.shared.errors import EvictionConfigError

Install = Callable[[str, str, str], None]

RECIPE = """
from vllm_tgvkv.policies.registry import POLICIES, Recipe

POLICIES.add({name!r}, Recipe(score="snapkv", allocation="uniform", retain="text_first"))
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a package with one method: its name, module and code.

    What Python sees is what pip leaves: a module, and a `.dist-info` with its entry points.
    """
    for found in (registry.SCORES, registry.POLICIES):
        monkeypatch.setattr(found, "_values", dict(found._values))
    monkeypatch.syspath_prepend(tmp_path)

    def install(method: str, module: str, code: str) -> None:
        sys.modules.pop(module, None)
        (tmp_path / f"{module}.py").write_text(code)
        information = tmp_path / f"{module}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\n")
        entry = f"[{registry.METHODS_GROUP}]\n{method} = {module}\n"
        (information / "entry_points.txt").write_text(entry)
        registry.broken_methods.cache_clear()

    yield install
    registry.broken_methods.cache_clear()


def test_an_installed_method_is_known_everywhere(install: Install) -> None:
    install("outside", "package_outside", RECIPE.format(name="outside"))
    assert method_names() == (*METHOD_NAMES, "outside")
    assert build_policy("outside").score.rows == "window"
    assert build_policy(Mix("outside", granularity="head")).granularity == "head"
    config = EvictionConfig.from_mapping(
        {"policy": "outside", "methods": {"m": {"base": "outside"}}}
    )
    assert config.method_names == ("none", *POLICY_NAMES, "outside", "m")
    assert RequestOptions.resolve(config, {"kv_eviction": "outside"}).policy == "outside"
    exec(RECIPE.format(name="late"), {})  # in a notebook, say: nothing holds a copy of the names
    assert "late" in config.method_names
    with pytest.raises(EvictionConfigError, match=r"'outsid': did you mean outside\? .*outside"):
        RequestOptions.resolve(config, {"kv_eviction": "outsid"})
    with pytest.raises(EvictionConfigError, match="the name is taken"):
        EvictionConfig.from_mapping({"methods": {"outside": {"base": "tgv"}}})


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_mod"),
        (RECIPE.format(name="other"), "ValueError: package_broken registers no method of this"),
        (RECIPE.format(name="tgv"), "ValueError: policy 'tgv' is already registered"),
    ],
)
def test_a_broken_package_is_named_when_its_method_is_asked_for(
    install: Install, caplog: pytest.LogCaptureFixture, code: str, why: str
) -> None:
    """Every other method still works."""
    install("broken", "package_broken", code)
    with caplog.at_level("WARNING", "vllm.tgvkv"):
        assert "broken" not in method_names()
    assert why in caplog.text
    assert build_policy("tgv").name == "tgv"
    with pytest.raises(EvictionConfigError) as caught:
        EvictionConfig.from_mapping({"policy": "broken"})
    assert "is of the package package_broken and cannot be used" in str(caught.value)
    assert why in str(caught.value)
    with pytest.raises(ValueError, match="the method broken is of the package package_broken"):
        build_policy("broken")


def test_a_package_cannot_take_the_name_of_a_built_in_method(install: Install) -> None:
    install("snapkv", "package_taken", RECIPE.format(name="snapkv"))
    assert method_names() == METHOD_NAMES
    assert build_policy("snapkv").allocation is not None
    assert "already registered" in registry.broken_methods()["snapkv"]
    assert EvictionConfig.from_mapping({"policy": "snapkv"}).policy == "snapkv"
