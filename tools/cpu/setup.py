# SPDX-License-Identifier: Apache-2.0
"""Put `vllm_cpu_setup.pth` next to the module; setuptools has no declarative way to do it."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    """`build_py` that also copies the start-up file to the top of site-packages."""

    PTH = "vllm_cpu_setup.pth"

    def run(self) -> None:
        super().run()
        self.copy_file(self.PTH, str(Path(self.build_lib, self.PTH)))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, self.PTH))]


setup(cmdclass={"build_py": BuildWithPth})
