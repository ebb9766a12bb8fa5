"""The small JSON files of a Hugging Face model folder, and what every reader of them needs.

Free of torch. Knows keys that all architectures have alike; what they mean for a computation the
architectures know.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ssd_serve.base.errors import CheckpointError

Json = Mapping[str, Any]


def model_name(path: Path) -> str:
    """Return the displayed name of a model: its hub id if it is a hub download, else the name of its folder or
    file."""
    parent = path.parent.parent if path.suffix == ".gguf" else path.parent
    if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
        return parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return f"embedded-{path.name}" if parent.name == "embedded" else path.name.removesuffix(".gguf")


def read_json(path: Path) -> Json:
    """A JSON object from a file, or a `CheckpointError`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return cast(Json, data)


def positive_size(raw: Json, key: str) -> int:
    """A size that `config.json` must name."""
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def eos_ids(raw: Json, generation: Json) -> tuple[int, ...]:
    """EOS ids of both files; chat models often name their end of turn in generation_config.json only."""
    ids: list[int] = []
    for source in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        ids += source if isinstance(source, list) else [] if source is None else [int(source)]
    return tuple(dict.fromkeys(ids))
