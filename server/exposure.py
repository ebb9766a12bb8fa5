"""What an operator is told before others can reach the server. Knows settings; listens to nothing."""

from ssd_serve.settings import Settings


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
