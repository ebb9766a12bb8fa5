"""Which secrets each process gets: those that its work needs, in its settings, and none in its environment.

A drafter that is taken over must not be able to use the API, to read other people's models with the hub's
token, or to join other clusters. Knows the names of roles and settings; nothing of what they do.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.hub_id import hub_id
from ssd_serve.base.settings import HUB_TOKEN_VARIABLE, OTHER_VARIABLES, PREFIX, SECRETS
from ssd_serve.drafter.sources.registry import self_draft_layers

_RAYS_OWN = "RAY_AUTH_TOKEN"
_OTHERS = frozenset({HUB_TOKEN_VARIABLE, "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN", _RAYS_OWN})
_SECRET_VARIABLES = (
    _OTHERS
    | {PREFIX + name.upper() for name in SECRETS}
    | {other for name, other in OTHER_VARIABLES.items() if name in SECRETS}
)


def config_for(worker: str, config: EngineConfig, *, elsewhere: bool = False) -> EngineConfig:
    """The configuration that the worker of this name receives: a drafter's own draft models, no secret that
    the worker does not need. `elsewhere`: it may be on another machine, where it downloads its model itself
    and connects over TCP; on this machine that was done before it was started."""
    role, _, number = worker.partition("-")
    own = config.for_drafter(int(number)) if role == "drafter" else config
    key = role != "rank" and (elsewhere or (role == "verifier" and config.drafter_address is not None))
    drafts = tuple(config.target if self_draft_layers(name) else name for name in own.draft_models)
    models = {"drafter": drafts, "rank": (config.target,)}.get(role, (config.target, *drafts))
    token = elsewhere and any(hub_id(name) for name in models)
    return replace(
        own,
        cluster_key=config.cluster_key if key else None,
        hf_token=config.hf_token if token else None,
    )


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without secrets, and without settings: workers are told theirs."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _SECRET_VARIABLES and not name.startswith(PREFIX)
    }


@contextmanager
def hidden_secrets() -> Generator[None]:
    """For the length of a `with` block this process's environment has no secrets but Ray's own: what Ray
    starts meanwhile inherits it."""
    hidden = {name: os.environ.pop(name) for name in _blanked() if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def blanked_secrets() -> dict[str, str]:
    """Variables that hide those of a process that starts ours: an empty one counts as none."""
    return dict.fromkeys(_blanked(), "")


def _blanked() -> list[str]:
    return sorted(_SECRET_VARIABLES - {_RAYS_OWN})
