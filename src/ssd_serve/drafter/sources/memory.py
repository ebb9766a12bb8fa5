"""How many KV slots a draft is loaded with. Knows settings and sizes; no requests."""

from ssd_serve.base.devices import parse_device
from ssd_serve.models.memory import available_memory
from ssd_serve.models.sizes import ModelSizes, torch_device
from ssd_serve.base.settings import Settings

_USUAL, _FEWEST = 256 << 20, 1024


def draft_slots(settings: Settings, sizes: ModelSizes, device: str) -> int:
    """As many as all requests need, or fewer where there is not so much memory for them."""
    most = settings.max_running * (settings.context or sizes.context) + settings.tree_nodes
    return min(most, max(_FEWEST, _kv_bytes(settings, sizes, device) // sizes.kv_bytes_per_slot))


def _kv_bytes(settings: Settings, sizes: ModelSizes, device: str) -> int:
    """Bytes: what the settings name, or a share of a GPU that has no target, which would be loading now."""
    if settings.draft_kv_memory_mb is not None:
        return settings.draft_kv_memory_mb << 20
    own, target = parse_device(device), parse_device(settings.target_device or "cpu")
    if own.kind == "cpu" or (target.kind == "cuda" and set(own.indices) & set(target.indices)):
        return _USUAL
    return (available_memory(torch_device(device)) - sizes.resident_bytes) // 10
