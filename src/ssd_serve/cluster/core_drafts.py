"""Whether a core drafts for a target on GPUs of which none is left for a drafter.

Beside the GPU a small draft costs the target nothing, while on it each step waits for launches; a large one
takes a core longer than the target's whole round. Knows settings and the sizes of files; loads nothing.
"""

from ssd_serve.base.devices import Machine, parse_device
from ssd_serve.base.engine_config import Mode
from ssd_serve.base.settings import Settings
from ssd_serve.drafter.sources.registry import is_head, is_source, self_draft_layers
from ssd_serve.models.hub import model_here

_SMALL_BYTES = 256 << 20
"""Weights that one core reads in some 25 ms, about a round of a large target."""
_HOST_CORES = 2
"""One feeds the GPU, one answers HTTP."""
_WEIGHTS = (".safetensors", ".bin")


def cores_draft(settings: Settings, machine: Machine) -> bool:
    """In mode auto, where the target's ranks take all GPUs: whether the user has named cores, or cores are
    left for drafts that are small, beside one rank. The drafts' files are looked at for the latter only."""
    ranks = settings.tensor_parallel
    if settings.mode is not Mode.AUTO or not 0 < machine.gpus <= ranks:
        return False
    if settings.draft_device is not None:
        return names_cores(settings)
    spare = len(machine.cores) - _HOST_CORES
    return (
        ranks == 1
        and spare >= settings.drafter_count > 0
        and all(_is_small(name) for name in settings.draft_models)
    )


def names_cores(settings: Settings) -> bool:
    """Whether the user wants drafts to be made on cores."""
    return settings.draft_device is not None and parse_device(settings.draft_device).kind == "cpu"


def _is_small(draft: str) -> bool:
    """A whole model with few bytes of weights: what a head reads would have to leave the GPU first."""
    if is_source(draft) or self_draft_layers(draft) is not None:
        return False
    folder = model_here(draft, "draft")
    if folder is None or is_head(folder):
        return False
    files = [file for file in folder.iterdir() if file.suffix in _WEIGHTS and file.is_file()]
    return sum(file.stat().st_size for file in files) <= _SMALL_BYTES
