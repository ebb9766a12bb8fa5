"""ssd-serve: an inference server that speculates while it verifies.

`LLM` and `SamplingParams` are imported on first access, so that `import ssd_serve` alone loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssd_serve.app.llm.llm import LLM
    from ssd_serve.app.llm.sampling_params import SamplingParams

from ssd_serve.base.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]

_LAZY = {"LLM": "ssd_serve.app.llm.llm", "SamplingParams": "ssd_serve.app.llm.sampling_params"}


def __getattr__(name: str) -> object:
    """Import a public name of a slow module on first access."""
    if name not in _LAZY:
        raise AttributeError(f"module 'ssd_serve' has no attribute '{name}'")
    return getattr(import_module(_LAZY[name]), name)
