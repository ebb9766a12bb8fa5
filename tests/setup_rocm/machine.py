"""Simulated machine with an AMD GPU for setup_rocm.sh: commands on PATH, a Python with few packages, a pip.

Python itself is real, but sees only the packages of this machine. Nothing is downloaded, and nothing outside
the machine's folder is written. The simulation does not depend on the steps of the script.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pip

from tests.setup_rocm import pretended_pip

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "setup_rocm.sh"
TORCH = "2.9.1+rocm7.2.0.git7e1940d4"
HIP = "7.2.26015-fc0010cf6a"
ROCMINFO = """\
  Name:                    AMD EPYC 9654 96-Core Processor
  Device Type:             CPU
"""
AGENT = """\
  Name:                    {architecture}
  Device Type:             GPU
      Name:                    amdgcn-amd-amdhsa--{architecture}:sramecc+:xnack-
      Name:                    amdgcn-amd-amdhsa--gfx9-4-generic:sramecc+:xnack-
"""
SSD = """\
import os, sys
from pathlib import Path
if sys.argv[1:] == ["--help"]:
    print("usage: ssd COMMAND", "", "    serve   serve a model", {doctor!r}, sep="\\n")
elif sys.argv[1:2] == ["serve"]:
    import torch
    kernels = os.environ["FLASHINFER_WORKSPACE_BASE"]
    print("serves with HIP", torch.version.hip, "kernels in", kernels, *sys.argv[2:])
elif sys.argv[1:] == ["doctor", "--target-device", "cuda:0"]:
    seen = {{name: value for name, value in os.environ.items() if name.startswith(("SSD_", "FLASHINFER_"))}}
    Path({report!r}).write_text(repr(seen))
    sys.exit({code})
else:
    sys.exit(2)
"""


@dataclass(frozen=True)
class Call:
    arguments: list[str]
    constraints: list[str]


@dataclass(frozen=True)
class Outcome:
    code: int
    said: str
    complained: str


@dataclass
class Machine:
    """Simulated machine in a folder; tests change it before they run the script."""

    place: Path
    mood: dict[str, Any] = field(
        default_factory=lambda: {
            "offline": False,
            "torch": "keeps",
            "index": {
                "amd-flashinfer": ["0.5.3+amd.1", "0.5.3+amd.2", "0.6.18+amd.2"],
                "triton": ["3.5.1+rocm7.2.0", "3.9.0"],
            },
            "source": "",
        }
    )
    variables: dict[str, str] = field(default_factory=lambda: {})

    @property
    def site(self) -> Path:
        return self.place / "site"

    @property
    def environment_file(self) -> Path:
        return self.place / "home" / ".cache" / "ssd-serve" / "rocm.env"

    def build(self) -> "Machine":
        """Set up a ROCm image of PyTorch on an MI300X with torch, numpy and Triton."""
        for folder in ("bin", "site", "home"):
            (self.place / folder).mkdir()
        (self.site / "pip").symlink_to(Path(pip.__file__).parent)
        pretended_pip.write_torch(self.site, TORCH, HIP, None)
        pretended_pip.write_package(self.site, "numpy", "2.1.3")
        pretended_pip.write_package(self.site, "triton", "3.5.1+rocm7.2.0")
        pretended_pip.write_module(self.site, "triton", "")
        (self.place / "kfd").touch()
        self.show("gfx942")
        self.command(
            "python3",
            f"""\
if [[ "$1 $2" == "-m pip" ]]; then
  shift 2
  exec {sys.executable} {pretended_pip.__file__} {self.place} "$@"
fi
PYTHONPATH={self.site} exec {sys.executable} -S "$@"
""",
        )
        self.give_ssd()
        return self

    def command(self, name: str, body: str) -> None:
        """Put a command on the PATH."""
        path = self.place / "bin" / name
        path.write_text("#!/usr/bin/env bash\n" + body, encoding="utf-8")
        path.chmod(0o755)

    def show(self, *architectures: str) -> None:
        """Make rocminfo list GPUs of these architectures."""
        text = ROCMINFO + "".join(AGENT.format(architecture=each) for each in architectures)
        self.command("rocminfo", f"cat <<'END'\n{text}END\n")

    def give_ssd(self, doctor: bool = False, code: int = 0) -> None:
        line = "    doctor  look for what is wrong" if doctor else "    plan    a doctor for plans"
        source = SSD.format(doctor=line, report=str(self.place / "doctor"), code=code)
        pretended_pip.write_module(self.site, "ssd_serve", source)

    def remove(self, name: str) -> None:
        """Remove a module and its metadata."""
        (self.site / f"{name}.py").unlink()
        for info in self.site.glob(f"{name}-*.dist-info"):
            for file in info.iterdir():
                file.unlink()
            info.rmdir()

    def run(self, *arguments: str) -> Outcome:
        """Run the script without the environment variables of the test process."""
        (self.place / "mood.json").write_text(json.dumps(self.mood), encoding="utf-8")
        variables = {
            "PATH": f"{self.place / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.place / "home"),
            "ROCM_PATH": str(self.place / "no-rocm"),
            "SSD_KFD": str(self.place / "kfd"),
            "PIP_BREAK_SYSTEM_PACKAGES": "1",
            "LC_ALL": "C",
        } | self.variables
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            cwd=self.place,
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def calls(self) -> list[Call]:
        file = self.place / "pip.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [Call(**json.loads(line)) for line in lines]

    def torch(self) -> tuple[str, str]:
        return (self.site / "torch.py").read_text(encoding="utf-8"), next(self.site.glob("torch-*")).name

    def files(self) -> dict[str, tuple[int, int]]:
        """Return size and modification time of each file of the machine, except mood.json."""
        found: dict[str, tuple[int, int]] = {}
        for folder, _, names in os.walk(self.place):
            for name in names:
                state = (Path(folder) / name).lstat()
                found[str(Path(folder) / name)] = (state.st_size, state.st_mtime_ns)
        found.pop(str(self.place / "mood.json"), None)
        return found
