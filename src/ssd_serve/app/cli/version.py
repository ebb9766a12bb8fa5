"""`ssd version --full`: what a report of a problem should begin with. Imports nothing heavy."""

import platform
from importlib.metadata import PackageNotFoundError, version

from ssd_serve.base.devices import this_machine
from ssd_serve.base.version import __version__

_PACKAGES = (
    *("torch", "triton", "flashinfer-python", "ray", "llguidance", "tokenizers", "safetensors", "numpy"),
    *("huggingface-hub", "fastapi", "starlette", "uvicorn", "pydantic", "msgspec"),
)


def full_version() -> dict[str, object]:
    """Versions, of packages that are not here null, and what the machine has."""
    machine = this_machine()
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(machine.cores),
        "gpus": machine.gpus,
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
