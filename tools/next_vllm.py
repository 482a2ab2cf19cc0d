# SPDX-License-Identifier: Apache-2.0
"""Put the Python sources of the next vLLM over the operators of the installed vLLM for CPU.

    python tools/next_vllm.py [FOLDER]

No CPU build of vLLM 0.33 is published, but its Python code runs over the operators of 0.32, whose
interface it still uses. With the folder at the front of `PYTHONPATH`, `vllm` is 0.33: scheduler,
block manager, worker, model runner V1, attention and server are its own. Not its own are the CPU
operators and the installed torch, and nothing of CUDA can run. `make test-next` runs tests so.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"
FOLDER = Path(__file__).parents[1] / f"build/vllm-{VERSION}"
NEW_REQUIREMENTS = ("orjson",)
"""What it imports on CPU and the installed vLLM does not require."""


def assemble(wheel: Path, installed: Path, target: Path) -> None:
    """Unpack a wheel of vLLM into `target`, with links to the libraries of another vLLM.

    Args:
        wheel: any build of vLLM. Its own compiled libraries are left out.
        installed: the package folder of a vLLM for CPU.
        target: a folder that exists.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(target, names)
    for library in installed.rglob("*.so"):
        link = target / "vllm" / library.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)
    # vLLM chooses its platform by the distribution's version.
    (metadata,) = target.glob("vllm-*.dist-info")
    version = metadata.name.removeprefix("vllm-").removesuffix(".dist-info")
    text = (metadata / "METADATA").read_text()
    text = text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    (metadata / "METADATA").write_text(text)
    metadata.rename(metadata.with_name(f"vllm-{version}+cpu.dist-info"))


def main(folder: Path) -> None:
    """Download the wheel and make the folder, which exists only if it is complete."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("No vLLM is installed whose operators could be used: run `make setup` first")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as downloads:
        wanted = f"vllm=={VERSION}"
        subprocess.run([*pip, "download", "--no-deps", "--dest", downloads, wanted], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        shutil.rmtree(folder, ignore_errors=True)
        parts = folder.with_name(f"{folder.name}.parts")
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
        assemble(wheel, Path(spec.origin).parent, parts)
    requirements = ["--no-deps", "--target", str(parts), *NEW_REQUIREMENTS]
    subprocess.run([*pip, "install", *requirements], check=True)
    parts.rename(folder)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else FOLDER)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, error.cmd[2:]))} failed: is vLLM {VERSION} in the index?")
