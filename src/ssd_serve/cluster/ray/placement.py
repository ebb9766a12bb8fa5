"""Bundles of resources that an engine requests from a Ray cluster: a pure function of settings and nodes.

One placement group: its first bundle holds every rank of the target, since a bundle is never divided between
nodes; each drafter has one of its own. Ray packs them on one node if it can. Calls nothing of Ray.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ssd_serve.base.devices import Device, parse_device
from ssd_serve.base.engine_config import Mode
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.placement import Placement, chosen_mode, names_cores

STRATEGY = "PACK"
_KIND = "accelerator_type:"
_CORE = Device("cpu")
_A_LITTLE = 0.001
"""Amount of an accelerator type that sends the bundle to a node with such a GPU."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """Resources of one node of a cluster."""

    id: str
    cpus: float = 0.0
    gpus: float = 0.0
    kinds: tuple[str, ...] = ()
    """Ray's names of its kinds of GPU, e.g. `AMD-Instinct-MI300X-OAM`."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Resources that one process takes of its bundle."""

    cpus: int = 1
    gpus: int = 0
    kind: str = ""
    device: str | None = None
    """Device of all such processes together, if the user has named it."""

    def of(self, number: int, count: int) -> str | None:
        """Return the named device of one process."""
        return None if self.device is None else str(parse_device(self.device).split(count)[number])

    def times(self, count: int) -> dict[str, float]:
        """Return the bundle for `count` processes."""
        bundle: dict[str, float] = {"CPU": float(self.cpus * count)}
        if self.gpus:
            bundle["GPU"] = float(self.gpus * count)
        if self.kind:
            bundle[_KIND + self.kind] = _A_LITTLE
        return bundle


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """Processes of an engine on a cluster, with the resources of each."""

    placement: Placement
    ranks: int
    rank: GpuShare
    drafters: int
    drafter: GpuShare

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Bundle of the target, and one for every drafter."""
        return [self.rank.times(self.ranks), *(self.drafter.times(1) for _ in range(self.drafters))]


def node_of(entry: Mapping[str, object]) -> RayNode:
    """A node from one of `ray.nodes()`."""
    found = {name: float(count) for name, count in cast(dict[str, float], entry["Resources"]).items()}
    kinds = tuple(sorted(name.removeprefix(_KIND) for name in found if name.startswith(_KIND)))
    return RayNode(str(entry["NodeID"]), found.get("CPU", 0.0), found.get("GPU", 0.0), kinds)


def check_gpus_are_known(settings: Settings, nodes: Sequence[RayNode], gpus_here: Callable[[], int]) -> None:
    """Raise `SettingsError` if cores would replace GPUs that Ray has not detected.

    `gpus_here` returns the number that torch can use on this node; it takes seconds, so it is called rarely.
    """
    named_cores = settings.target_device is not None and parse_device(settings.target_device).kind == "cpu"
    if named_cores or any(node.gpus for node in nodes):
        return
    gpus = gpus_here()
    if gpus:
        raise SettingsError(
            f"Ray knows of no GPU, and torch can use {gpus} here: start its nodes with `ray start "
            f"--num-gpus={gpus}` (it finds AMD's itself with `pip install /opt/rocm/share/amd_smi`), or "
            "set SSD_TARGET_DEVICE=cpu"
        )


def ray_place(settings: Settings, nodes: Sequence[RayNode]) -> RayPlacement:
    """Choose the devices: those of the settings, else GPUs if the cluster has enough, else cores.

    `nodes`: the nodes that are alive, with their total resources. Raises `SettingsError` if no node fits all
    ranks of the target, or the rest of the cluster cannot fit all drafters.
    """
    ranks = settings.tensor_parallel
    target = _named(settings.target_device, "SSD_TARGET_DEVICE", ranks) or _largest(settings, nodes)
    on_gpus = target.kind == "cuda"
    devices = int(sum(node.gpus if on_gpus else node.cpus for node in nodes))
    mode = chosen_mode(settings, devices, on_gpus and names_cores(settings))
    count = settings.drafter_count if mode is Mode.SSD else 0
    named = _named(settings.draft_device, "SSD_DRAFT_DEVICE", count) if count else None
    errors: list[SettingsError] = []
    for draft, kind, rank_kind in _chances(settings, nodes, target, named, count):
        drafter = _drafter(settings, draft, count, kind)
        rank = _rank(settings, target, nodes, drafter.cpus * count, rank_kind)
        try:
            _check_fit(nodes, rank.times(ranks), drafter.times(1), count)
        except SettingsError as error:
            errors.append(error)
            continue
        placement = Placement(mode, target, draft if count else None, _CORE)
        return RayPlacement(placement, ranks, rank, count, drafter)
    raise errors[0]


def actors_device(named: str | None, gpu_ids: Sequence[str], visible: str | None) -> str:
    """Return an actor's device: as named, else the GPU that Ray has assigned to it, else cores.

    Every GPU of a node stays visible in every actor: ROCm reads HIP_VISIBLE_DEVICES only once, and
    ranks access one another's memory. So the device is the index of Ray's id in the node's visible GPUs
    (`visible`: its HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES). A part of a GPU counts as a GPU here.
    """
    if named is not None:
        return named
    if not gpu_ids:
        return "cpu"
    shown = [part.strip() for part in visible.split(",")] if visible else []
    place = shown.index(gpu_ids[0]) if gpu_ids[0] in shown else int(gpu_ids[0])
    return f"cuda:{place}"


def _chances(
    settings: Settings, nodes: Sequence[RayNode], target: Device, named: Device | None, drafters: int
) -> list[tuple[Device, str, str]]:
    """Devices of drafters with Ray's names of their kind and of the target's, in the order to try them."""
    if named is not None:
        drafts = [named]
    elif target.kind == "cuda" and drafters:
        # With a target on GPUs: a GPU, else a core, unless the user has named a kind of GPU.
        drafts = [Device("cuda")] if settings.draft_accelerator else [Device("cuda"), _CORE]
    else:
        drafts = [_CORE]
    rank_kinds = _kinds(target, settings.target_accelerator, nodes, "SSD_TARGET_ACCELERATOR")
    chances = [
        (draft, kind, rank_kind)
        for draft in drafts
        for kind in _kinds(draft, settings.draft_accelerator, nodes, "SSD_DRAFT_ACCELERATOR")
        for rank_kind in rank_kinds
    ]
    # The same board first: that may be another device of the same node.
    return sorted(chances, key=lambda chance: (drafts.index(chance[0]), chance[1] != chance[2]))


def _named(text: str | None, setting: str, count: int) -> Device | None:
    if text is None:
        return None
    device = parse_device(text)
    if device.kind == "cuda" and len(device.indices) != count:
        raise SettingsError(f"{setting} is {device}: with Ray name {count} GPU{'s' * (count > 1)}, or none")
    return device


def _largest(settings: Settings, nodes: Sequence[RayNode]) -> Device:
    """GPUs where one node has enough for all ranks."""
    ranks = settings.tensor_parallel
    most = int(max((node.gpus for node in nodes), default=0))
    if most >= ranks:
        return Device("cuda", tuple(range(ranks)))
    if most and ranks > 1:
        raise SettingsError(
            f"SSD_TENSOR_PARALLEL={ranks} needs {ranks} GPUs of one node, the largest has {most}; "
            "lower it, or set SSD_TARGET_DEVICE=cpu"
        )
    return Device("cpu")


def _rank(settings: Settings, target: Device, nodes: Sequence[RayNode], spared: int, kind: str) -> GpuShare:
    """Resources of a rank; without named cores all cores of the largest node but the `spared` ones."""
    if target.kind == "cuda":
        return GpuShare(gpus=1, kind=kind, device=settings.target_device)
    cpus = (
        len(target.indices) if target.indices else int(max((node.cpus for node in nodes), default=0)) - spared
    )
    return GpuShare(max(1, cpus // settings.tensor_parallel), device=settings.target_device)


def _drafter(settings: Settings, draft: Device, drafters: int, kind: str) -> GpuShare:
    """Resources of a drafter: a GPU, the named cores, or one core."""
    if draft.kind == "cuda":
        return GpuShare(gpus=1, kind=kind, device=settings.draft_device)
    return GpuShare(max(1, len(draft.indices) // max(1, drafters)), device=settings.draft_device)


def _kinds(device: Device, accelerator: str | None, nodes: Sequence[RayNode], setting: str) -> list[str]:
    """Return Ray's names of a kind of GPU: one product has several, by its board. `""`: any kind."""
    if not accelerator or device.kind != "cuda":
        return [""]
    there = sorted({kind for node in nodes for kind in node.kinds})
    found = [kind for kind in there if accelerator.lower() in kind.lower()]
    if found:
        return found
    raise SettingsError(
        f"{setting} is {accelerator}, and the cluster has {', '.join(there) or 'no such GPU'}"
    )


def _check_fit(
    nodes: Sequence[RayNode], target: dict[str, float], drafter: dict[str, float], count: int
) -> None:
    """Raise `SettingsError` unless one node holds the target, and the rest holds the drafters."""
    free = [_resources(node) for node in nodes]
    homes = [index for index, have in enumerate(free) if _holds(have, target)]
    if not homes:
        raise SettingsError(
            f"the target needs {_words(target)} of one node, and no node of the Ray cluster has that; "
            "lower SSD_TENSOR_PARALLEL, name a smaller SSD_TARGET_DEVICE, or add a node"
        )
    most = max(_held(free, home, target, drafter) for home in homes)
    if most < count:
        raise SettingsError(
            f"beside the target the Ray cluster has room for {most} of {count} drafters, which need "
            f"{_words(drafter)} each; name a smaller SSD_TARGET_DEVICE, set SSD_MODE=sd, or add a node"
        )


def _held(
    free: Sequence[dict[str, float]], home: int, target: dict[str, float], drafter: dict[str, float]
) -> int:
    """Return the number of drafters that fit into the cluster with the target on the node `home`."""
    count = 0
    for index, have in enumerate(free):
        left = _without(have, target) if index == home else dict(have)
        while _holds(left, drafter):
            left = _without(left, drafter)
            count += 1
    return count


def _resources(node: RayNode) -> dict[str, float]:
    return {"CPU": node.cpus, "GPU": node.gpus, **{_KIND + kind: 1.0 for kind in node.kinds}}


def _holds(have: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(have.get(name, 0.0) >= count for name, count in wanted.items())


def _without(have: Mapping[str, float], taken: Mapping[str, float]) -> dict[str, float]:
    return {name: count - taken.get(name, 0.0) for name, count in have.items()}


def _words(bundle: Mapping[str, float]) -> str:
    """Format a bundle: `2 CPU and 4 GPU (MI300X)`."""
    kinds = [name.removeprefix(_KIND) for name in bundle if name.startswith(_KIND)]
    counts = " and ".join(
        f"{count:.0f} {name}" for name, count in bundle.items() if not name.startswith(_KIND)
    )
    return counts + (f" ({kinds[0]})" if kinds else "")
