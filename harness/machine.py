"""What a measurement depends on: GPU, driver, CUDA. Never names of hosts or users."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_CUDA_FOLDERS = ("CUDA_HOME", "CUDA_PATH")
_SMI_FOLDERS = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib")


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about the first GPU; None where nvidia-smi does not tell."""

    gpu: str | None = None
    compute_capability: str | None = None
    driver: str | None = None

    @property
    def arch(self) -> int | None:
        """The compute capability as nvcc counts: 90 for 9.0."""
        if self.compute_capability is None:
            return None
        return int(self.compute_capability.replace(".", ""))


def look() -> Machine:
    """Ask nvidia-smi."""
    smi = shutil.which("nvidia-smi") or shutil.which(
        "nvidia-smi", path=os.pathsep.join(_SMI_FOLDERS)
    )
    if smi is None:
        return Machine()
    query = ("--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    first = said(smi, *query).partition("\n")[0]
    facts = [fact.strip() for fact in first.split(",")]
    if len(facts) != 3 or not re.fullmatch(r"\d+\.\d+", facts[1]):
        return Machine()
    return Machine(*facts)


def find_nvcc() -> Path | None:
    """The nvcc on PATH, of CUDA_HOME, or of the newest CUDA in /usr/local."""
    on_path = shutil.which("nvcc")
    if on_path:
        return Path(on_path)
    named = [os.environ.get(name) for name in _CUDA_FOLDERS]
    folders = [Path(folder) for folder in named if folder]
    installed = Path("/usr/local").glob("cuda*")
    folders += sorted(installed, key=_numbers_in, reverse=True)
    found = (folder / "bin" / "nvcc" for folder in folders)
    return next((path for path in found if os.access(path, os.X_OK)), None)


def cuda_release(nvcc: Path) -> str | None:
    """The toolkit's version, such as 13.0."""
    found = re.search(r"release (\d+\.\d+)", said(nvcc, "--version"))
    return found[1] if found else None


def said(program: str | Path, *arguments: str) -> str:
    """What a program prints; nothing if it can't be run."""
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _numbers_in(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.name))
