"""Which mode runs, and which process computes on which device. A pure function of settings and machine."""

from dataclasses import dataclass

from ssd_serve.devices import Device, Machine, check_device, parse_device
from ssd_serve.errors import SettingsError
from ssd_serve.settings import Mode, Settings


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision. `draft` is None without a drafter process; `front_end` has the cores of the server;
    `alone` is where the target computes while no drafter works beside it, if not where it always does."""

    mode: Mode
    target: Device
    draft: Device | None
    front_end: Device
    alone: Device | None = None

    @property
    def shares_a_device(self) -> bool:
        """Target and drafter compete for a core or a GPU: speculation then costs target time."""
        if self.draft is None or self.draft.kind != self.target.kind:
            return False
        return not self.draft.indices or not self.target.indices or self._overlap()

    def _overlap(self) -> bool:
        return self.draft is not None and bool(set(self.draft.indices) & set(self.target.indices))


def place(settings: Settings, machine: Machine) -> Placement:
    """Devices as set by the user, and for what is not set: a core or a GPU of its own for the drafter."""
    ranks = settings.tensor_parallel
    if ranks > 1 and settings.target_device_alone:
        raise SettingsError("SSD_TARGET_DEVICE_ALONE is for one rank: unset it, or SSD_TENSOR_PARALLEL")
    target = _named(settings.target_device, machine, "SSD_TARGET_DEVICE", ranks)
    draft = _named(settings.draft_device, machine, "SSD_DRAFT_DEVICE")
    mode = _mode(settings, machine)
    if mode is not Mode.SSD:
        target = target or _free_gpus(machine, ranks, None) or Device("cpu", machine.cores)
        return Placement(mode, target, None, Device("cpu", _others(machine.cores, target)))
    if target is None:
        target = _free_gpus(machine, ranks, draft)
    if draft is None:
        draft = _draft_device(target, machine)
    if target is None:
        target = Device("cpu", _others(machine.cores, draft))
    front_end = draft if draft.kind == "cpu" else Device("cpu", _others(machine.cores, target))
    return Placement(mode, target, draft, front_end, _alone(settings, target, machine))


def resolved(settings: Settings, placement: Placement) -> Settings:
    """Settings in which nothing about modes and devices is left to decide; what the workers get."""
    return settings.model_copy(
        update={
            "mode": placement.mode,
            "target_device": str(placement.target),
            "target_device_alone": str(placement.alone) if placement.alone is not None else None,
            "draft_device": str(placement.draft) if placement.draft is not None else None,
            "draft": settings.draft_model if placement.mode is not Mode.AR else None,
        }
    )


def of_rank(settings: Settings, rank: int) -> Settings:
    """Resolved settings as a rank of the target needs them: its own part of the target's device."""
    if settings.tensor_parallel == 1 or settings.target_device is None:
        return settings
    own = parse_device(settings.target_device).split(settings.tensor_parallel)[rank]
    return settings.model_copy(update={"target_device": str(own)})


def _named(text: str | None, machine: Machine, setting: str, ranks: int = 1) -> Device | None:
    if text is None:
        return None
    device = parse_device(text)
    check_device(device, machine, setting)
    if device.kind == "cuda" and len(device.indices) != ranks:
        why = "the draft model uses one" if "DRAFT" in setting else f"SSD_TENSOR_PARALLEL is {ranks}"
        raise SettingsError(f"{setting} is {device}, but {why}: name {ranks} GPU{'s' * (ranks > 1)}")
    if ranks > 1 and not device.indices:
        return Device("cpu", machine.cores)  # ranks have to divide them
    return device


def _mode(settings: Settings, machine: Machine) -> Mode:
    if settings.mode is Mode.AUTO:
        if settings.draft_model is None:
            return Mode.AR
        spare = (machine.gpus or len(machine.cores)) > settings.tensor_parallel
        return Mode.SSD if spare else Mode.SD
    if settings.mode is not Mode.AR and settings.draft_model is None:
        raise SettingsError(
            f"mode {settings.mode.value} needs a draft model: set SSD_DRAFT to a folder or a hub id, "
            "or SSD_MODE=ar"
        )
    return settings.mode


def _alone(settings: Settings, target: Device, machine: Machine) -> Device | None:
    """In mode auto all cores, unless the target's were named; ranks stay on their cores."""
    alone = _named(settings.target_device_alone, machine, "SSD_TARGET_DEVICE_ALONE")
    if settings.tensor_parallel > 1:
        return None
    if alone is None and settings.mode is Mode.AUTO and target.kind == "cpu" and not settings.target_device:
        alone = Device("cpu", machine.cores)
    return alone if alone != target else None


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


def _draft_device(target: Device | None, machine: Machine) -> Device:
    """A second GPU where there is one, else the last core that the target does not use."""
    if target is not None and target.kind == "cuda":
        spare = [gpu for gpu in range(machine.gpus) if gpu not in target.indices]
        return Device("cuda", (spare[0],)) if spare else Device("cpu", machine.cores[-1:])
    used = target.indices if target is not None else ()
    free = [core for core in machine.cores if core not in used] or list(machine.cores)
    return Device("cpu", (free[-1],))


def _others(cores: tuple[int, ...], device: Device) -> tuple[int, ...]:
    """The cores that the device leaves free; all of them if it leaves none."""
    if device.kind != "cpu":
        return cores
    return tuple(core for core in cores if core not in device.indices) or cores
