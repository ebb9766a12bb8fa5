"""What others could learn from a server with these settings, and what its operator is told about that."""

from ssd_serve.base.settings import Settings


def exposure_warnings(settings: Settings, alone: bool) -> list[str]:
    """Sentences for the log. `alone`: only this machine reaches the address."""
    if alone:
        return []
    found: list[str] = []
    if settings.api_key is None and settings.api_keys_file is None:
        found.append(
            "anybody who reaches this address may use the model; set SSD_API_KEY or SSD_API_KEYS_FILE"
        )
    if settings.metrics_port is not None and settings.metrics_key is None:
        found.append("anybody who reaches SSD_METRICS_PORT may read the metrics; set SSD_METRICS_KEY")
    return found


def metrics_may_tell_cached(settings: Settings) -> bool:
    """Whether the metrics may count tokens found in the prefix cache. Read before and after a request, on a
    quiet server, they say what its answer keeps to itself: not where clients who share SSD_API_KEY read them.
    Where there are no keys nobody has said that there are users to keep apart."""
    door_of_their_own = settings.metrics_key is not None or settings.metrics_port is not None
    shared = settings.api_key is not None and settings.api_keys_file is None
    return door_of_their_own or settings.tell_cached_tokens or not shared
