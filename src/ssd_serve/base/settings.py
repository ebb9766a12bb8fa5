"""Settings of a deployment in one class, prefix `SSD_`; `engine_settings.py` has those of models and speculation.

Worker processes receive an `EngineConfig`, not settings. `settings_sources.py` reads flags, variables and files.
"""

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.engine_settings import EngineSettings
from ssd_serve.base.setting_values import ClusterKey, Hosts, Key, Origins, RootPath

PREFIX = "SSD_"
HUB_TOKEN_VARIABLE = "HF_TOKEN"
RAY_VARIABLE = "RAY_ADDRESS"
OTHER_VARIABLES = {"hf_token": HUB_TOKEN_VARIABLE, "ray_address": RAY_VARIABLE}
"""Variables of other programs that are read too."""
SECRETS = frozenset({"api_key", "metrics_key", "cluster_key", "hf_token"})
RENAMED_SETTINGS = {"emulate": ("model_wrapper", "ssd_serve.bench.emulated:device:TABLE")}
"""Removed settings with their successors, and the values that have the same meaning."""
REMOVED_SETTINGS = {
    "api_workers": "run replicas instead (docs/launchers.md)",
    "record": "report requests with their seeds instead: a request's output is a function of them",
    "record_mb": "report requests with their seeds instead: a request's output is a function of them",
}
"""Removed settings without a successor, with advice."""


_USUAL_PORT = 8000
_SERVICE = re.compile("(tcp|udp|sctp)://")


def _port(value: object) -> object:
    """Return the default port if Kubernetes has set SSD_PORT to the address of a service named `ssd`."""
    return _USUAL_PORT if isinstance(value, str) and _SERVICE.match(value) else value


class FrontSettings(BaseSettings):
    """Settings of the HTTP front end."""

    host: str = Field(default="127.0.0.1", description="address to listen on; loopback by default")
    port: Annotated[int, BeforeValidator(_port)] = Field(
        default=_USUAL_PORT, ge=0, le=65535, description="HTTP port; 0 takes a free one"
    )
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
        description="requests a minute of each key, or of all clients if there are no keys; empty: any",
    )
    key_tokens_per_minute: int | None = Field(
        default=None, ge=1, description="prompt and output tokens a minute of each key; empty: any"
    )
    salt_by_key: bool = Field(
        default=True, description="each name of SSD_API_KEYS_FILE reuses only the KV of its own prompts"
    )
    tell_cached_tokens: bool = Field(
        default=False,
        description="report `cached_tokens` even when the prefix cache is shared; this can reveal other "
        "users' prompts",
    )
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = Field(
        default="auto",
        description="format of the model's tool calls; auto: from its chat template (hermes where the template "
        "takes no tools, for any value but none); none: requests with tools are refused",
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        default="auto",
        description="think: text in <think>...</think> is returned as `reasoning_content`; auto: if the "
        "model's chat template contains that tag",
    )
    system_prompt: str | None = Field(
        default=None,
        description="system prompt of every conversation, before those of clients",
    )
    page: bool = Field(
        default=True, description="serve a page for browsers at /: chat, and a view of speculation"
    )
    strict_requests: bool = Field(
        default=False,
        description="refuse requests with unknown fields; otherwise they are ignored and listed in the "
        "header X-SSD-Ignored",
    )
    metrics_key: Key | None = Field(
        default=None, description="when set, /metrics needs this bearer token instead of an API key"
    )
    metrics_prefix: Annotated[str, Field(pattern="^[a-zA-Z_:][a-zA-Z0-9_:]{0,31}$")] = Field(
        default="ssd_",
        description="prefix of metrics' names; 'vllm:' for dashboards and routers that expect vLLM's names",
    )
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = Field(
        default=None,
        description="endpoint for spans of requests, OTLP over HTTP, e.g. "
        "http://127.0.0.1:4318/v1/traces; needs the extra `otel`; empty: none",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="separate port for /metrics, served without an API key; SSD_PORT then has no /metrics",
    )
    max_connections: int | None = Field(
        default=None,
        ge=1,
        description="most client connections of each process; idle ones are closed for new ones, and if "
        "none is idle the answer is 503; empty: 4 x (SSD_MAX_RUNNING + SSD_MAX_WAITING) + 64, "
        "as far as the limit of descriptors allows",
    )
    allowed_hosts: Hosts | None = Field(
        default=None,
        description="host names of this server besides localhost, with commas between, or * for any; "
        "empty: any, or only loopback names without a key on loopback",
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
        default=None, description="path prefix under which a reverse proxy serves this server, e.g. /llm"
    )
    served_model_name: str | None = Field(
        default=None, description="model id in the API; empty: from the target's name"
    )


class Settings(FrontSettings, EngineSettings):
    """Settings of a deployment; every field is a variable `SSD_<NAME>` and a flag `--<name>`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    hf_token: str | None = Field(
        default=EngineConfig.hf_token,
        validation_alias=AliasChoices("SSD_HF_TOKEN", HUB_TOKEN_VARIABLE, "hf_token"),
        description="token for gated hub models; HF_TOKEN is read too",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default=EngineConfig.log_level, description="least severe level that is logged"
    )
    log_format: Literal["text", "json"] = Field(
        default=EngineConfig.log_format, description="one line for each event, as text or as JSON"
    )
    run_dir: Path | None = Field(
        default=EngineConfig.run_dir, description="folder for sockets; empty: a private temporary one"
    )
    launcher: Literal["auto", "local", "ray"] = Field(
        default="auto",
        description="placement of the processes: local (on this machine), ray (as Ray actors) or auto: "
        "ray with several GPUs or a Ray address",
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
        default=EngineConfig.cluster_key,
        description="shared key by which processes authenticate and encrypt connections over TCP; empty: "
        "a random one for each run",
    )
    model_wrapper: str | None = Field(
        default=EngineConfig.model_wrapper,
        description="import path of a function that wraps each loaded model, as "
        "package.module:function:argument; for benchmarks and tests",
    )
    drain_seconds: int = Field(
        default=30,
        ge=0,
        description="seconds for running requests to end after SIGTERM or Ctrl-C; 0: do not wait",
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

    def engine_config(self, **changes: object) -> EngineConfig:
        """Convert to a configuration in which nothing is resolved; `changes` replace its fields."""
        names = {field.name for field in fields(EngineConfig)} & Settings.model_fields.keys()
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values |= {
            "target_is_named": "target" in self.model_fields_set,
            "drafts": self.drafts,
            "drafters": self.drafter_count,
            "target_device": self.target_device or EngineConfig.target_device,
            **changes,
        }
        return EngineConfig(**values)
