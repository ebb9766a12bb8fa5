"""How a server is reached, by whom, and how it speaks. Other settings are in `settings.py`."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings

from ssd_serve.base.setting_values import Hosts, Key, Origins, RootPath

_USUAL_PORT = 8000
_SERVICE = re.compile("(tcp|udp|sctp)://")


def _port(value: object) -> object:
    """Kubernetes sets SSD_PORT to the address of a service named `ssd`: that is no wish."""
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
    metrics_prefix: Annotated[str, Field(pattern="^[a-zA-Z_:][a-zA-Z0-9_:]{0,31}$")] = Field(
        default="ssd_",
        description="what names of metrics begin with; 'vllm:' for dashboards and routers that know those",
    )
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = Field(
        default=None,
        description="where spans of requests go, by OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces; "
        "needs the extra `otel`; empty: nowhere",
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
        description="connections of clients at once, of each process; idle ones make room for others, and "
        "where none is idle the answer is 503; empty: 4 x (SSD_MAX_RUNNING + SSD_MAX_WAITING) + 64, as far "
        "as descriptors reach",
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
