"""Finds the models that the settings name before any process is started, downloading what is missing.

The workers then find the same files at once, and errors and progress are shown in one place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ssd_serve.base.engine_settings import Mode
from ssd_serve.base.hub_id import pinned
from ssd_serve.base.setting_values import LOOKUPS
from ssd_serve.base.settings import Settings
from ssd_serve.drafter.sources.registry import is_source, self_draft_layers
from ssd_serve.models.hub import Role, resolve_model
from ssd_serve.sampling.validation import model_defaults


@dataclass(frozen=True, slots=True)
class FoundModels:
    """Folders of the models, and settings that name them."""

    settings: Settings
    """Those that asked, with the commit of each hub id: workers take the same files, also when they are
    started again after the hub has got newer ones, and need neither network nor token for it."""
    target: Path
    """The target's folder."""


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

    update: dict[str, object] = {}
    if settings.mode is not Mode.AR:
        drafts = [
            name if _needs_no_files(name) else pinned(name, find(name, "draft")) for name in settings.drafts
        ]
        update["draft"] = ",".join(drafts) or settings.draft
    target = find(settings.target, "target")
    if settings.generation_config == "auto":
        model_defaults(target)  # whatever is wrong with them is told before anything is started
    update["target"] = pinned(settings.target, target)
    return FoundModels(settings.model_copy(update=update), target)


def _needs_no_files(draft: str) -> bool:
    """But for the target's."""
    return is_source(draft) or draft in LOOKUPS or self_draft_layers(draft) is not None
