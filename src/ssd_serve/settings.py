"""All settings: one class, prefix `SSD_`.

Worker processes get their settings as JSON from the process that starts them, so that all of them agree. Does
not know where values come from: `settings_sources.py` does.
"""

from enum import Enum
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ssd_serve.kernels.attention.registry import AUTO, told
from ssd_serve.messages import FINAL
from ssd_serve.setting_values import (
    LOOKUPS,
    NGRAM,
    NO_DRAFT,
    ClusterKey,
    Drafts,
    Hosts,
    Key,
    Layers,
    Origins,
    RootPath,
    TreeAttention,
)

EMBEDDED = "embedded"
EMBEDDED_HEAD = "embedded-head"
"""The EAGLE-3 head of the embedded target."""
PREFIX = "SSD_"
HUB_TOKEN_VARIABLE = "HF_TOKEN"
RAY_VARIABLE = "RAY_ADDRESS"
OTHER_VARIABLES = {"hf_token": HUB_TOKEN_VARIABLE, "ray_address": RAY_VARIABLE}
"""Variables of other programs that are read too."""
SECRETS = frozenset({"api_key", "metrics_key", "cluster_key", "hf_token"})
KEY_SETTINGS = (
    *("api_key", "api_keys_file", "key_requests_per_minute", "key_tokens_per_minute", "salt_by_key"),
    *("tell_cached_tokens", "metrics_key", "metrics_port"),
)
"""Who may ask for what: a benchmark, which asks itself, has none of them."""
GONE = {"emulate": ("model_wrapper", "ssd_serve.bench.emulated:device:TABLE")}
"""Settings that earlier versions had: the ones that took their places, with values that say the same."""


class Mode(str, Enum):
    """How drafts are made: not at all, inline on the target's device, or on a device of their own."""

    AR = "ar"
    SD = "sd"
    SSD = "ssd"
    AUTO = "auto"


class Settings(BaseSettings):
    """Settings of a deployment; every field is a variable `SSD_<NAME>` and a flag `--<name>`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    target: str = Field(
        default=EMBEDDED,
        description="target model: a folder, a hub id, a state of it as owner/name@revision, or 'embedded'",
    )
    draft: Drafts | None = Field(
        default=None,
        description="what drafts: a folder, a hub id or 'embedded' for a model, 'embedded-head' for the "
        "EAGLE-3 head of the embedded target, 'self:N' for the target's first N layers, 'ngram' for lookup "
        "in a request's own text, 'suffix' for lookup in others too, or "
        "'none'; several with commas between draft beside each other; empty: the embedded model for the "
        "embedded target, else ngram",
    )
    drafters: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="drafter processes, which share the requests, or the draft models where there are more "
        "of these; empty: one for each draft model; "
        "0: none here, they join at SSD_DRAFTER_ADDRESS",
    )
    mode: Mode = Field(
        default=Mode.AUTO, description="ar (plain), sd (draft inline), ssd (draft on its own device) or auto"
    )
    target_device: str | None = Field(
        default=None,
        description="device of the target: cpu, cpu:0, cpu:0-1, cuda:0, for 4 ranks cuda:0-3; "
        "empty: chosen by the mode",
    )
    target_device_alone: str | None = Field(
        default=None,
        description="device of the target while no drafter works beside it; mode auto chooses all cores",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=8,
        description="ranks that share the target: as many processes, each on a GPU or on a part of the cores",
    )
    draft_device: str | None = Field(
        default=None,
        description="device of the drafter, or those of several: cuda:4-7, cpu:2-5; "
        "empty: chosen by the mode",
    )
    drafter_address: str | None = Field(
        default=None,
        description="address at which drafters of other places join, e.g. tcp://127.0.0.1:4711 "
        "(`ssd draft --connect`); empty: none",
    )
    allow_cpu: bool = Field(
        default=False, description="let cores compute on a machine with a GPU that torch cannot use"
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = Field(
        default="auto",
        description="weights and activations; auto: bf16 where the device computes it fast, else fp32; "
        "int8: weights of 8 bits, activations in bf16, on CPUs",
    )
    tree_decode_backend: TreeAttention = Field(
        default=AUTO,
        description=f"tree attention: {told()} or {AUTO}, the fastest that works",
    )
    tree_decode_check: Literal["", "sdpa"] = Field(
        default="",
        description="compute the attention of one batch in 64 with this backend too, and report differences; "
        "empty: no check",
    )
    batch_invariant: bool = Field(
        default=False,
        description="compute every row of the target alike whatever is in the batch, so that bf16 and fp16 "
        "texts are the same in every mode too; costs speed",
    )
    host: str = Field(default="127.0.0.1", description="address to listen on; loopback by default")
    port: int = Field(default=8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    api_key: Key | None = Field(
        default=None, description="when set, every request but /health and /ping needs this bearer token"
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="file of keys, each a line `name key`, and if wanted `requests_per_minute=N "
        "tokens_per_minute=N`; read again when it changes",
    )
    key_requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="requests a minute of each key, or of everybody where there are no keys; empty: any",
    )
    key_tokens_per_minute: int | None = Field(
        default=None, ge=1, description="prompt and output tokens a minute of each key; empty: any"
    )
    salt_by_key: bool = Field(
        default=True, description="each name of SSD_API_KEYS_FILE reuses only the KV of its own prompts"
    )
    tell_cached_tokens: bool = Field(
        default=False,
        description="tell `cached_tokens` also of KV that others' prompts may have left, which confirms "
        "guesses about them",
    )
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = Field(
        default="auto",
        description="how the model writes calls of tools; auto: as its chat template teaches, none: requests "
        "with tools are refused",
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        default="auto",
        description="think: what stands in <think>...</think> is told apart as `reasoning_content`; auto: "
        "where the model's chat template knows that mark",
    )
    system_prompt: str | None = Field(
        default=None,
        description="what the model is told before every conversation, ahead of what clients tell it",
    )
    strict_requests: bool = Field(
        default=False,
        description="refuse requests with fields that are not known, which are otherwise ignored and told "
        "in the header X-SSD-Ignored",
    )
    metrics_key: Key | None = Field(
        default=None, description="when set, /metrics needs this bearer token instead of an API key"
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="port of SSD_HOST that has /metrics, without an API key; SSD_PORT then has none",
    )
    max_connections: int | None = Field(
        default=None,
        ge=1,
        description="connections of clients at once; idle ones make room for others, and where none is idle "
        "the answer is 503; empty: 4 x (SSD_MAX_RUNNING + SSD_MAX_WAITING) + 64, as far as descriptors reach",
    )
    allowed_hosts: Hosts | None = Field(
        default=None,
        description="names that this server may be called by beside localhost, with commas between, or * for "
        "any; empty: any, but none without a key on loopback",
    )
    cors_origins: Origins | None = Field(
        default=None,
        description="origins of web pages that may call this server, with commas between, or *; empty: none",
    )
    tls_certificate: Path | None = Field(
        default=None, description="certificate chain (PEM file) for HTTPS; needs SSD_TLS_KEY"
    )
    tls_key: Path | None = Field(
        default=None, description="private key (PEM file, not encrypted) of SSD_TLS_CERTIFICATE"
    )
    root_path: RootPath | None = Field(
        default=None, description="path under which a proxy in front shows this server, e.g. /llm"
    )
    served_model_name: str | None = Field(
        default=None, description="model id in the API; empty: from the target's name"
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="sampling parameters that a request leaves out: auto, those of the target's "
        "generation_config.json; none, those of the API",
    )
    context: int | None = Field(
        default=None, ge=16, description="longest prompt + output in tokens; empty: the model's"
    )
    kv_memory_mb: int | None = Field(
        default=None,
        ge=1,
        description="memory for the target's KV cache in MiB; empty: a share of what is free",
    )
    draft_kv_memory_mb: int | None = Field(
        default=None,
        ge=1,
        description="memory for a drafter's KV cache in MiB; empty: 256, or a tenth of a GPU of its own",
    )
    max_running: int = Field(default=32, ge=1, le=1024, description="requests that decode at the same time")
    max_waiting: int = Field(default=256, ge=0, description="requests that may queue; more are answered 429")
    drain_seconds: int = Field(
        default=30,
        ge=0,
        description="seconds for running requests to end after SIGTERM or Ctrl-C; 0: do not wait",
    )
    prefill_chunk: int = Field(
        default=256, ge=16, description="prompt tokens of one round, over all requests"
    )
    budget: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="most nodes verified in a round, over all requests; empty: cost model alone",
    )
    tree_nodes: int = Field(default=4096, ge=1, le=65536, description="most candidates in one request's tree")
    draft_width: int = Field(
        default=16, ge=1, le=256, description="most nodes that the drafter expands in a step"
    )
    eagle_layers: Layers | None = Field(
        default=None,
        description="layers of the target whose outputs an EAGLE head reads, counted from 0, e.g. 1,15,28, "
        "and final, what EAGLE-1 reads; empty: those that the head names, or that follow from the target",
    )
    features_mb: int = Field(
        default=1024,
        ge=0,
        description="most MiB of what the target has computed of cached tokens that are kept for EAGLE heads",
    )
    suffix_shared: int = Field(
        default=0,
        ge=0,
        le=1 << 22,
        description="tokens of requests that are over in which the draft 'suffix' looks too, always for "
        "requests of the same key and salt only; 0: none",
    )
    draft_grammars: bool = Field(
        default=True, description="drafters guess only what the grammar of a structured output allows"
    )
    draft_fan_out: int = Field(default=16, ge=1, le=64, description="candidates of an expanded node")
    draft_depth: int = Field(default=16, ge=1, le=128, description="deepest node below the root")
    cache_dir: Path = Field(
        default=Path("~/.cache/ssd-serve"),
        description="folder of measured step times and compiled kernels, which later starts use again",
    )
    native_kernels: bool = Field(
        default=True,
        description="compile kernels for this CPU once, where there is a C compiler, and use them",
    )
    graphs: bool = Field(
        default=True,
        description="on GPUs capture forwards as CUDA or HIP graphs and replay them; "
        "with flashinfer or triton attention",
    )
    tpot_target_ms: float | None = Field(
        default=None,
        gt=0,
        description="most milliseconds for a token of a running request; empty: fastest overall",
    )
    grow_first: bool = Field(default=True, description="wait for one more draft step where that pays")
    speculation_may_stop: bool = Field(
        default=True, description="stop speculating while plain decoding measures faster"
    )
    prefix_cache: bool = Field(default=True, description="reuse the KV of prompts that begin alike")
    hf_token: str | None = Field(
        default=None,
        validation_alias=AliasChoices("SSD_HF_TOKEN", HUB_TOKEN_VARIABLE, "hf_token"),
        description="token for gated hub models; HF_TOKEN is read too",
    )
    allow_pickle: bool = Field(
        default=False,
        description="load weights from .bin files too, which can run code of whoever made them",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severe line to log"
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="one line an event, for people or machines"
    )
    run_dir: Path | None = Field(
        default=None, description="folder for sockets; empty: a private temporary one"
    )
    launcher: Literal["auto", "local", "ray"] = Field(
        default="auto",
        description="who places the processes: local (on this machine), ray (as Ray actors) or auto: ray "
        "with several GPUs or a Ray address",
    )
    ray_address: str | None = Field(
        default=None,
        validation_alias=AliasChoices("SSD_RAY_ADDRESS", RAY_VARIABLE, "ray_address"),
        description="Ray cluster to join, host:port or auto; RAY_ADDRESS is read too; empty: its own",
    )
    target_accelerator: str | None = Field(
        default=None,
        description="with Ray, kind of GPU for the target: mi300x, mi325x, mi350x, mi355x, h100, h200; "
        "empty: any",
    )
    draft_accelerator: str | None = Field(
        default=None, description="with Ray, kind of GPU for the drafters; empty: any"
    )
    cluster_key: ClusterKey | None = Field(
        default=None,
        description="key that processes which meet over TCP prove to know, and by which they encrypt; "
        "empty: a random one for each run",
    )
    record: Path | None = Field(
        default=None,
        description="folder to record sessions in, with all prompts and outputs, for `ssd replay`; empty: no",
    )
    record_mb: int = Field(default=1024, ge=1, description="most MiB of all sessions in that folder")
    model_wrapper: str | None = Field(
        default=None,
        description="import path of a function that puts something before each loaded model, as "
        "package.module:function:argument; for benchmarks and tests",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 the names are pydantic's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then variables, then defaults; no files."""
        return (init_settings, env_settings)

    @property
    def drafts(self) -> tuple[str, ...]:
        """All that drafts. Unless it is named, the embedded target brings its own; with any other there is
        lookup, or who comes from other places."""
        usual = NGRAM if self.drafters != 0 else NO_DRAFT
        named = self.draft or (EMBEDDED if self.target == EMBEDDED else usual)
        return tuple(name for each in named.split(",") if (name := each.strip()) and name != NO_DRAFT)

    @property
    def draft_models(self) -> tuple[str, ...]:
        """Those of them that are to be loaded."""
        return tuple(name for name in self.drafts if name not in LOOKUPS)

    @property
    def lookups(self) -> tuple[str, ...]:
        """Those that need no model and no device."""
        return tuple(name for name in self.drafts if name in LOOKUPS)

    @property
    def eagle_features(self) -> tuple[int, ...] | None:
        """The layers that are named."""
        layers = self.eagle_layers
        if layers is None:
            return None
        return tuple(FINAL if each == "final" else int(each) for each in layers.split(","))

    @property
    def draft_model(self) -> str | None:
        """The first of the models."""
        return next(iter(self.draft_models), None)

    @property
    def drafter_count(self) -> int:
        """Drafter processes that are started here where a mode has any; fewer than the draft models share
        these."""
        return self.drafters if self.drafters is not None else len(self.draft_models)

    @property
    def joining_drafters(self) -> int:
        """How many drafters these processes are to the verifier: one for each draft model that one has."""
        return max(self.drafter_count, len(self.draft_models)) if self.drafter_count else 0
