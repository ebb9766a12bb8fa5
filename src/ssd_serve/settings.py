"""All settings: one class, prefix `SSD_`, flags override variables, unknown names are errors.

No other module reads the environment. Worker processes get their settings as JSON from the process that
starts them, so that all of them agree.
"""

from enum import Enum
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

EMBEDDED = "embedded"


class Mode(str, Enum):
    """How drafts are made: not at all, inline on the target's device, or on a device of their own."""

    AR = "ar"
    SD = "sd"
    SSD = "ssd"
    AUTO = "auto"


class Settings(BaseSettings):
    """Settings of a deployment; every field is a variable `SSD_<NAME>` and a flag `--<name>`."""

    model_config = SettingsConfigDict(env_prefix="SSD_", extra="forbid", frozen=True)

    target: str = Field(EMBEDDED, description="target model: a folder, a hub id, or 'embedded'")
    draft: str | None = Field(
        None, description="draft model: a folder, a hub id, 'embedded', or empty: none, or the embedded pair's"
    )
    mode: Mode = Field(Mode.AUTO, description="ar (plain), sd (draft inline), ssd (draft on its own device), auto")
    target_device: str | None = Field(
        None, description="device of the target: cpu, cpu:0, cpu:0-1, cuda:0; empty: chosen by the mode"
    )
    draft_device: str | None = Field(None, description="device of the drafter; empty: chosen by the mode")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="weights and activations; auto: bf16 where the device computes it fast, else fp32"
    )
    tree_decode_backend: Literal["auto", "sdpa"] = Field(
        "auto", description="tree attention kernel; only sdpa is built today"
    )
    host: str = Field("127.0.0.1", description="address to listen on; loopback by default")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    api_key: str | None = Field(None, description="when set, every request but /health needs this bearer token")
    served_model_name: str | None = Field(None, description="model id in the API; empty: from the target's name")
    context: int | None = Field(None, ge=16, description="longest prompt + output in tokens; empty: the model's")
    kv_memory_mb: int | None = Field(
        None, ge=1, description="memory for the target's KV cache in MiB; empty: a share of what is free"
    )
    draft_kv_memory_mb: int = Field(256, ge=1, description="memory for the drafter's KV cache in MiB")
    max_running: int = Field(32, ge=1, le=1024, description="requests that decode at the same time")
    max_waiting: int = Field(256, ge=0, description="requests that may queue; more are answered 429")
    prefill_chunk: int = Field(256, ge=16, description="prompt tokens of one round, over all requests")
    budget: int | None = Field(
        None, ge=0, le=1024, description="most nodes verified in a round, over all requests; empty: cost model alone"
    )
    tree_nodes: int = Field(512, ge=1, le=65536, description="most nodes in one request's tree")
    draft_width: int = Field(8, ge=1, le=256, description="most nodes that the drafter expands in a step")
    draft_fan_out: int = Field(4, ge=1, le=64, description="children of an expanded node")
    draft_depth: int = Field(16, ge=1, le=128, description="deepest node below the root")
    grow_first: bool = Field(True, description="wait for one more draft step where that pays")
    prefix_cache: bool = Field(True, description="reuse the KV of prompts that begin alike")
    hf_token: str | None = Field(None, description="token for gated hub models (HF_TOKEN is read too)")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log line")
    log_format: Literal["text", "json"] = Field("text", description="one line an event, for people or machines")
    run_dir: Path | None = Field(None, description="folder for sockets; empty: a private temporary one")
    emulate: str | None = Field(
        None, description="device table for emulated step times, e.g. mi300x-70b-1b; for benchmarks only"
    )
