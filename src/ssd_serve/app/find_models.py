"""Finds the models that the settings name before any process is started, downloading what is missing.

The workers then find the same files at once, and errors and progress are shown in one place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ssd_serve.base.engine_config import Mode
from ssd_serve.base.names import pinned
from ssd_serve.base.setting_values import LOOKUPS
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.placement import PinnedModels
from ssd_serve.drafter.sources.registry import is_source, self_draft_layers
from ssd_serve.models.hub import Role, resolve_model
from ssd_serve.sampling.validation import model_defaults


@dataclass(frozen=True, slots=True)
class FoundModels:
    """The target's folder, and the names by which workers find the same files."""

    target: Path
    names: PinnedModels


def find_models(
    settings: Settings, show: Callable[[str], None], warn: Callable[[str], None] = lambda _line: None
) -> FoundModels:
    """Look for the target, and where the mode may use one for the draft model too. `show` gets lines of
    progress, `warn` what a person should know of where a model comes from."""
    show("looking for the models")
    free = int(psutil.virtual_memory().available)

    def find(name: str, role: Role) -> Path:
        return resolve_model(
            name,
            role,
            token=settings.hf_token,
            allow_pickle=settings.allow_pickle,
            free_memory=free,
            report=show,
            warn=warn,
            ask_hub=True,
        )

    drafts: list[str] = []
    if settings.mode is not Mode.AR:
        drafts = [
            name if _needs_no_files(name) else pinned(name, find(name, "draft")) for name in settings.drafts
        ]
    target = find(settings.target, "target")
    if settings.generation_config == "auto":
        model_defaults(target)  # whatever is wrong with them is told before anything is started
    return FoundModels(target, PinnedModels(pinned(settings.target, target), tuple(drafts)))


def _needs_no_files(draft: str) -> bool:
    """But for the target's."""
    return is_source(draft) or draft in LOOKUPS or self_draft_layers(draft) is not None
