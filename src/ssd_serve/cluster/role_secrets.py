"""Which secrets each process gets: those that its work needs, in its settings, and none in its environment.

A drafter that is taken over must not be able to use the API, to read other people's models with the hub's
token, or to join other clusters. Knows the names of roles and settings; nothing of what they do.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from ssd_serve.base.hub_id import hub_id
from ssd_serve.base.settings import HUB_TOKEN_VARIABLE, OTHER_VARIABLES, PREFIX, SECRETS, Settings
from ssd_serve.drafter.sources.registry import self_draft_layers

_RAYS_OWN = "RAY_AUTH_TOKEN"
_OTHERS = frozenset({HUB_TOKEN_VARIABLE, "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN", _RAYS_OWN})
_SECRET_VARIABLES = (
    _OTHERS
    | {PREFIX + name.upper() for name in SECRETS}
    | {other for name, other in OTHER_VARIABLES.items() if name in SECRETS}
)


def settings_for(worker: str, settings: Settings, *, elsewhere: bool = False) -> Settings:
    """What the worker of this name is told. `elsewhere`: it may be on another machine, where it downloads
    its model itself and meets others over TCP; here that was done before it was started."""
    role = worker.partition("-")[0]
    needed: set[str] = set()
    if role != "rank" and (elsewhere or (role == "verifier" and settings.drafter_address is not None)):
        needed.add("cluster_key")
    drafts = [settings.target if self_draft_layers(name) else name for name in settings.draft_models]
    models = {"drafter": drafts, "rank": (settings.target,)}.get(role, (settings.target, *drafts))
    if elsewhere and any(hub_id(name) for name in models):
        needed.add("hf_token")
    return settings.model_copy(update=dict.fromkeys({*SECRETS - needed, "api_keys_file"}))


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
