# SPDX-License-Identifier: Apache-2.0
"""Package list; everything else is in pyproject.toml.

`kernels/` and `server/` stand at the root of the repository for the reader, but are installed as
`vllm_tgvkv.kernels` and `vllm_tgvkv.server`: top-level packages of these names would shadow others,
such as the `kernels` that transformers looks for.
"""

from setuptools import find_packages, setup

#: Installed parent name of each root folder that is not itself the package.
MAPPED = {"kernels": "vllm_tgvkv.kernels", "server": "vllm_tgvkv.server"}


def mapped_packages() -> dict[str, str]:
    """Map the installed name of every package below a mapped folder to its path."""
    found = find_packages(include=[p for name in MAPPED for p in (name, f"{name}.*")])
    return {
        ".".join([MAPPED[root], *rest]): "/".join([root, *rest])
        for root, *rest in (package.split(".") for package in found)
    }


setup(
    packages=[*find_packages(include=["vllm_tgvkv", "vllm_tgvkv.*"]), *mapped_packages()],
    package_dir=mapped_packages(),
)
