"""All settings: one class, prefix `SSD_`. `engine_settings.py` and `front_settings.py` have most of them.

Worker processes get their settings as JSON from the process that starts them, so that all of them agree. Does
not know where values come from: `settings_sources.py` does.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.engine_settings import EngineSettings
from ssd_serve.base.front_settings import FrontSettings
from ssd_serve.base.setting_values import ClusterKey

PREFIX = "SSD_"
HUB_TOKEN_VARIABLE = "HF_TOKEN"
RAY_VARIABLE = "RAY_ADDRESS"
OTHER_VARIABLES = {"hf_token": HUB_TOKEN_VARIABLE, "ray_address": RAY_VARIABLE}
"""Variables of other programs that are read too."""
SECRETS = frozenset({"api_key", "metrics_key", "cluster_key", "hf_token"})
KEY_SETTINGS = (
    *("api_key", "api_keys_file", "key_requests_per_minute", "key_tokens_per_minute", "salt_by_key"),
    *("tell_cached_tokens", "metrics_key", "metrics_port", "metrics_prefix"),
)
"""Who may ask for what: a benchmark, which asks itself, has none of them."""
GONE = {"emulate": ("model_wrapper", "ssd_serve.bench.emulated:device:TABLE")}
"""Settings that earlier versions had: the ones that took their places, with values that say the same."""
REMOVED = {
    "api_workers": "run replicas instead (docs/launchers.md)",
    "record": "report requests with their seeds instead: a request's output is a function of them",
    "record_mb": "report requests with their seeds instead: a request's output is a function of them",
}
"""Settings that earlier versions had and that have no successor: what to do instead."""


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
        default=EngineConfig.log_level, description="least severe line to log"
    )
    log_format: Literal["text", "json"] = Field(
        default=EngineConfig.log_format, description="one line an event, for people or machines"
    )
    run_dir: Path | None = Field(
        default=EngineConfig.run_dir, description="folder for sockets; empty: a private temporary one"
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
        default=EngineConfig.cluster_key,
        description="key that processes which meet over TCP prove to know, and by which they encrypt; "
        "empty: a random one for each run",
    )
    model_wrapper: str | None = Field(
        default=EngineConfig.model_wrapper,
        description="import path of a function that puts something before each loaded model, as "
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
