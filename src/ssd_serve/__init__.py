"""ssd-serve: an inference server that speculates while it verifies.

`LLM` and `SamplingParams` are found when they are asked for: whoever imports the package alone loads no
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssd_serve.llm.llm import LLM
    from ssd_serve.llm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_ROOMS = {"LLM": "ssd_serve.llm.llm", "SamplingParams": "ssd_serve.llm.sampling_params"}


def __getattr__(name: str) -> object:
    """What is public and lives in a module that takes long to import."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'ssd_serve' has no attribute '{name}'")
    return getattr(import_module(_ROOMS[name]), name)
