"""The small JSON files of a Hugging Face model folder, and what every reader of them needs.

Free of torch. Knows keys that all architectures have alike; what they mean for a computation the
architectures know.
"""

import json
from collections.abc import Iterator, Mapping
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


_WITHOUT_EFFECT = frozenset(
    {
        *("_name_or_path", "add_cross_attention", "architectures", "attention_bias"),
        *("attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward"),
        *("dtype", "finetuning_task", "id2label", "initializer_range"),
        *("is_decoder", "is_llama_config", "label2id", "layer_types"),
        *("max_window_layers", "mlp_bias", "model_type", "pad_token_id"),
        *("pard2", "pard2_proj_bias", "pard2_scale", "pard2_target_dim", "pard2_target_layers"),
        *("pard_k", "pard_token", "spd_type"),  # of drafts, which read them
        *("pretraining_tp", "return_dict", "tokenizer_class", "torch_dtype"),
        *("transformers_version", "use_cache", "use_sliding_window"),
    }
)
"""Keys of `config.json` that change no result, or that the names of the tensors confirm."""


class ReadKeys(Mapping[str, Any]):
    """A JSON object that remembers which of its keys were read."""

    def __init__(self, raw: Json) -> None:
        self._raw = raw
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def unread(self) -> tuple[str, ...]:
        """The keys that were not read, except those that change nothing and those without a value."""
        return tuple(
            key for key, value in self._raw.items() if value and key not in self._read | _WITHOUT_EFFECT
        )


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
