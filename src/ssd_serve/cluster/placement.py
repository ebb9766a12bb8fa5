"""Placement of an engine's processes: mode, devices, models, and the configuration that follows.

A function of the settings, the machine and the models' files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ssd_serve.base.devices import Device, Machine, check_device, parse_device
from ssd_serve.base.engine_config import LOOKUPS, EngineConfig, Mode
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.names import pinned
from ssd_serve.base.settings import Settings
from ssd_serve.drafter.sources.registry import is_source, registered_source, self_draft_layers
from ssd_serve.models.hub import Role, model_here, resolve_model
from ssd_serve.models.short_names import ShortNames
from ssd_serve.sampling.model_defaults import model_defaults


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of an engine's processes.

    `draft` is None without a drafter process; several drafters divide it. `front_end` has the cores of the
    server. `alone` is the target's device while no drafter works and drafts may be made inline; None: a
    drafter always works.
    """

    mode: Mode
    target: Device
    draft: Device | None
    front_end: Device
    alone: Device | None = None

    @property
    def shares_a_device(self) -> bool:
        """True if target and drafter compete for a core or a GPU: speculation then costs target time."""
        if self.draft is None or self.draft.kind != self.target.kind:
            return False
        return not self.draft.indices or not self.target.indices or self._overlap()

    def _overlap(self) -> bool:
        return self.draft is not None and bool(set(self.draft.indices) & set(self.target.indices))


def place(settings: Settings, machine: Machine) -> Placement:
    """Choose the devices: those of the settings, else a core or a GPU of its own for the drafter."""
    ranks = settings.tensor_parallel
    if ranks > 1 and settings.target_device_alone:
        raise SettingsError("SSD_TARGET_DEVICE_ALONE is for one rank: unset it, or SSD_TENSOR_PARALLEL")
    target = _named(settings.target_device, machine, "SSD_TARGET_DEVICE", ranks)
    draft = _named_draft(settings, machine)
    mode = chosen_mode(settings, machine.gpus or len(machine.cores), cores_draft(settings, machine))
    if mode is not Mode.SSD or not settings.drafter_count:
        target = target or _free_gpus(machine, ranks, None) or Device("cpu", machine.cores)
        alone = _alone(settings, target, None, machine) if mode is Mode.SSD else None
        return Placement(mode, target, None, Device("cpu", _others(machine.cores, target)), alone)
    if target is None:
        target = _free_gpus(machine, ranks, draft)
    if draft is None:
        draft = _draft_device(target, machine, settings.drafter_count)
    if target is None:
        target = Device("cpu", _others(machine.cores, draft))
    by_core = target.kind == draft.kind == "cpu"
    busy = target if target.kind == "cpu" else draft
    front_end = draft if by_core else Device("cpu", _others(machine.cores, busy))
    return Placement(mode, target, draft, front_end, _alone(settings, target, draft, machine))


@dataclass(frozen=True, slots=True)
class PinnedModels:
    """Names of the models with the commit of each hub id, so that restarted workers load the same files."""

    target: str
    drafts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FoundModels:
    """The target's folder, and the names by which workers find the same files."""

    target: Path
    names: PinnedModels


def resolve_config(
    settings: Settings, placement: Placement, models: PinnedModels | None = None, **changes: object
) -> EngineConfig:
    """Return the configuration of an engine with resolved models, mode and devices.

    `models`: None takes the names of the settings. `changes`: fields that the launcher knows.
    """
    target = settings.target if models is None else models.target
    drafts = settings.drafts if models is None else models.drafts
    device, draft, alone = placement.target, placement.draft, placement.alone
    return settings.engine_config(
        target=target,
        target_is_named=True,
        drafts=() if placement.mode is Mode.AR else drafts,
        mode=placement.mode,
        target_device=str(device),
        target_device_alone=None if alone is None else str(alone),
        draft_device=None if draft is None else str(draft),
        **changes,
    )


def _named_draft(settings: Settings, machine: Machine) -> Device | None:
    """Device that the drafters divide, checked: not more GPUs than drafters."""
    if settings.draft_device is None:
        return None
    device, count = parse_device(settings.draft_device), max(1, settings.drafter_count)
    check_device(device, machine, "SSD_DRAFT_DEVICE")
    if device.kind == "cuda" and len(device.indices) > count:
        why = "the draft model uses one" if count == 1 else f"SSD_DRAFTERS is {count}, and each uses one"
        raise SettingsError(f"SSD_DRAFT_DEVICE is {device}, but {why}: name {count} GPU{'s' * (count > 1)}")
    if count > 1 and not device.indices:
        return Device("cpu", machine.cores)  # the drafters divide them
    return device


def _named(text: str | None, machine: Machine, setting: str, ranks: int = 1) -> Device | None:
    if text is None:
        return None
    device = parse_device(text)
    check_device(device, machine, setting)
    if device.kind == "cuda" and len(device.indices) != ranks:
        raise SettingsError(
            f"{setting} is {device}, but SSD_TENSOR_PARALLEL is {ranks}: name {ranks} GPU{'s' * (ranks > 1)}"
        )
    if ranks > 1 and not device.indices:
        return Device("cpu", machine.cores)  # the ranks divide them
    return device


def chosen_mode(settings: Settings, devices: int, cores_draft: bool = False) -> Mode:
    """Resolve mode `auto` for a number of GPUs, or of cores. `cores_draft`: a core drafts if no GPU is left.
    Raises `SettingsError` for an impossible mode."""
    remote = _awaits_others(settings)
    if settings.mode is Mode.AUTO:
        if remote:
            return Mode.SSD
        if not settings.draft_models:
            return Mode.SD if settings.lookups else Mode.AR
        return Mode.SSD if cores_draft or devices > settings.tensor_parallel else Mode.SD
    drafted = bool(settings.draft_models) or (remote if settings.mode is Mode.SSD else bool(settings.lookups))
    if settings.mode is not Mode.AR and not drafted:
        what = "a draft model for its own device" if settings.mode is Mode.SSD else "a draft"
        raise SettingsError(
            f"mode {settings.mode.value} needs {what}: set SSD_DRAFT to a folder or a hub id, or "
            f"SSD_MODE={'ar' if not settings.lookups else 'sd, where lookup drafts'}"
        )
    return settings.mode


def _awaits_others(settings: Settings) -> bool:
    """True if all drafters join from other machines."""
    address = settings.drafter_address or ""
    if address.startswith("tcp://") and not settings.cluster_key:
        raise SettingsError(
            "SSD_DRAFTER_ADDRESS is a TCP address: set SSD_CLUSTER_KEY to the same random text here and for "
            "the drafters"
        )
    if settings.drafters == 0 and not address and settings.mode in (Mode.AUTO, Mode.SSD):
        raise SettingsError(
            "SSD_DRAFTERS is 0, but there is no SSD_DRAFTER_ADDRESS at which drafters could join: set it, "
            "e.g. to tcp://127.0.0.1:4711, or SSD_MODE=ar"
        )
    return bool(address) and settings.drafter_count == 0


def _alone(settings: Settings, target: Device, draft: Device | None, machine: Machine) -> Device | None:
    """Device of the target while no drafter works: in mode auto all cores unless the user named the target's.
    A GPU with a drafter on cores stays, since drafts can be made on either. Ranks stay on their devices.
    """
    alone = _named(settings.target_device_alone, machine, "SSD_TARGET_DEVICE_ALONE")
    if settings.tensor_parallel > 1:
        return None
    if alone is None and settings.mode is Mode.AUTO:
        if target.kind == "cuda":
            return target if draft is not None and draft.kind == "cpu" else None
        if not settings.target_device:
            alone = Device("cpu", machine.cores)
    return alone if alone != target or target.kind == "cuda" else None


def _free_gpus(machine: Machine, ranks: int, draft: Device | None) -> Device | None:
    """The first GPUs that the draft model does not use, one for each rank; None: the target goes to cores."""
    taken = draft.indices if draft is not None and draft.kind == "cuda" else ()
    free = tuple(gpu for gpu in range(machine.gpus) if gpu not in taken)
    if len(free) >= ranks:
        return Device("cuda", free[:ranks])
    if machine.gpus and ranks > 1:
        raise SettingsError(
            f"SSD_TENSOR_PARALLEL={ranks} needs {ranks} GPUs beside the draft model's, and {len(free)} "
            f"{'is' if len(free) == 1 else 'are'} there; lower it, or set SSD_TARGET_DEVICE=cpu"
        )
    return None


def _draft_device(target: Device | None, machine: Machine, count: int) -> Device:
    """Return a free GPU for each of `count` drafters if there are any, else the last cores that the target does
    not use. A target without named cores keeps at least one."""
    if target is not None and target.kind == "cuda":
        spare = tuple(gpu for gpu in range(machine.gpus) if gpu not in target.indices)
        return Device("cuda", spare[:count]) if spare else Device("cpu", machine.cores[-count:])
    if target is not None:
        free = [core for core in machine.cores if core not in target.indices] or list(machine.cores)
        return Device("cpu", tuple(free[-count:]))
    return Device("cpu", machine.cores[-min(count, max(1, len(machine.cores) - 1)) :])


def _others(cores: tuple[int, ...], device: Device) -> tuple[int, ...]:
    """Return the cores that the device leaves free; all cores if it leaves none."""
    if device.kind != "cpu":
        return cores
    return tuple(core for core in cores if core not in device.indices) or cores


_SMALL_BYTES = 256 << 20
"""Weights that one core reads in some 25 ms, about a round of a large target."""
_HOST_CORES = 2
"""Cores kept for the host: one feeds the GPU, one serves HTTP."""
_WEIGHTS = (".safetensors", ".bin")


def cores_draft(settings: Settings, machine: Machine) -> bool:
    """True if cores draft in mode auto although the target's ranks take all GPUs: the user named cores, or
    there are spare cores for small drafts of one rank. Reads the drafts' files only in the second case."""
    ranks = settings.tensor_parallel
    if settings.mode is not Mode.AUTO or not 0 < machine.gpus <= ranks:
        return False
    if settings.draft_device is not None:
        return names_cores(settings)
    spare = len(machine.cores) - _HOST_CORES
    return (
        ranks == 1
        and spare >= settings.drafter_count > 0
        and all(_is_small(name, settings.engine_config()) for name in settings.draft_models)
    )


def names_cores(settings: Settings) -> bool:
    """True if the user named cores for the drafts."""
    return settings.draft_device is not None and parse_device(settings.draft_device).kind == "cpu"


def _is_small(draft: str, config: EngineConfig) -> bool:
    """Return True for few bytes of weights, unless the source reads features, which are on the GPU."""
    if is_source(draft) or self_draft_layers(draft) is not None:
        return False
    folder = model_here(draft, "draft")
    if folder is None or registered_source(draft, folder).describe(config, folder).features:
        return False
    files = [file for file in folder.iterdir() if file.suffix in _WEIGHTS and file.is_file()]
    return sum(file.stat().st_size for file in files) <= _SMALL_BYTES


def find_models(
    settings: Settings, show: Callable[[str], None], warn: Callable[[str], None] = lambda _line: None
) -> FoundModels:
    """Find the models that the settings name before any process is started, and download missing ones. Workers
    then find the same files at once. `show` receives lines of progress, `warn` remarks about a model's origin."""
    show("looking for the models")
    free = int(psutil.virtual_memory().available)
    names = ShortNames(settings.models_file, settings.cache_dir)

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
            short_names=names.table(),
        )

    drafts: list[str] = []
    if settings.mode is not Mode.AR:
        named = (name if _needs_no_files(name) else names.expand(name, show) for name in settings.drafts)
        drafts = [name if _needs_no_files(name) else pinned(name, find(name, "draft")) for name in named]
    expanded = names.expand(settings.target, show)
    target = find(expanded, "target")
    if settings.generation_config == "auto":
        model_defaults(target)  # raises for wrong ones
    return FoundModels(target, PinnedModels(pinned(expanded, target), tuple(drafts)))


def _needs_no_files(draft: str) -> bool:
    """But for the target's."""
    return is_source(draft) or draft in LOOKUPS or self_draft_layers(draft) is not None
