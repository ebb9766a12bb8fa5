"""Registry of architectures, one line each; an architecture is imported with its first model.

Knows how a `config.json` names its architecture, and nothing of what that is.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.architectures.contract import Architecture, Description
from ssd_serve.models.config import Json, ReadKeys
from ssd_serve.models.weights.formats import format_of

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "ssd_serve.models.architectures.dense.models:LLAMA",
    "MistralForCausalLM": "ssd_serve.models.architectures.dense.models:MISTRAL",
    "Qwen2ForCausalLM": "ssd_serve.models.architectures.dense.models:QWEN2",
    "Qwen3ForCausalLM": "ssd_serve.models.architectures.dense.models:QWEN3",
}
"""Path of each `Architecture`, `module:name`, by its entry in `architectures` of `config.json`."""


def architecture(name: str) -> Architecture[Any, Any]:
    """The registered architecture of this name."""
    module, _, variable = ARCHITECTURES[name].partition(":")
    found: Architecture[Any, Any] = getattr(import_module(module), variable)
    return found


def describe(raw: Json, generation: Json | None = None) -> Description[Any]:
    """Return the model that a `config.json` describes. Raises `CheckpointError`."""
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            known, keys = architecture(name), ReadKeys(raw)
            config = known.parse(keys, generation or {})
            return Description(known, config, keys.unread())
    found = ", ".join(names) or f"unnamed (model_type {raw.get('model_type', 'missing')!r})"
    supported = "; ".join(f"{each} ({architecture(each).models})" for each in ARCHITECTURES)
    raise CheckpointError(f"architecture {found} is not supported; supported are {supported}")


def load_description(folder: Path, layers: int | None = None) -> Description[Any]:
    """Return the model that a folder describes, with the EOS ids of `generation_config.json`; with
    `layers`, of the model that has only so many, the first ones."""
    raw, generation = format_of(folder).config(folder)
    if layers is not None:
        each = {key: value[:layers] for key, value in raw.items() if key == "layer_types"}
        raw = {**raw, **each, "num_hidden_layers": layers}
    return describe(raw, generation)
