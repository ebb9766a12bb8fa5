"""Finds the models that the settings name before any process is started, downloading what is missing.

The workers then find the same files at once, and errors and progress are shown in one place.
"""

from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ssd_serve.models.hub import resolve_model
from ssd_serve.settings import Mode, Settings


def find_models(settings: Settings, show: Callable[[str], None]) -> Path:
    """The target's folder. The draft model is looked for too where the mode may use one."""
    show("looking for the models")
    free = int(psutil.virtual_memory().available)
    for draft in settings.draft_models if settings.mode is not Mode.AR else ():
        resolve_model(draft, "draft", token=settings.hf_token, free_memory=free, report=show)
    return resolve_model(settings.target, "target", token=settings.hf_token, free_memory=free, report=show)
