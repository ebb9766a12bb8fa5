"""What Ray sees of this machine, or of the cluster that RAY_ADDRESS names, asked in a process of its own.

Without an address Ray starts a node for it, for some seconds. Knows names of Ray's resources; not placement.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ssd_serve.base.settings import RAY_VARIABLE
from ssd_serve.base.subprocess_probe import tried
from ssd_serve.cluster.ray.token import prepare_token

_TIMEOUT_S = 60.0
_PROGRAM = (sys.executable, "-m", "ssd_serve.cluster.ray.view")
_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0"}
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True, slots=True)
class RayView:
    """Counts of cores and GPUs, and Ray's names of the kinds of GPU; or why there is no answer."""

    cores: int = 0
    gpus: int = 0
    kinds: tuple[str, ...] = ()
    failure: str = ""


def ray_view(timeout_s: float = _TIMEOUT_S, program: Sequence[str] = _PROGRAM) -> RayView:
    """What Ray sees, or why that cannot be known. Raises nothing."""
    answer = tried(program, timeout_s, _VARIABLES)
    if answer.failure:
        return RayView(failure=answer.failure)
    try:
        found: dict[str, float] = json.loads(answer.printed.splitlines()[-1])
        counts = {str(name): int(count) for name, count in found.items()}
    except (ValueError, IndexError, AttributeError, TypeError):
        return RayView(failure=f"an answer that is none: {answer.printed[-80:]!r}")
    kinds = sorted(name.removeprefix(_ACCELERATOR) for name in counts if name.startswith(_ACCELERATOR))
    return RayView(counts.get("CPU", 0), counts.get("GPU", 0), tuple(kinds))


def main() -> int:
    """Print Ray's resources as JSON."""
    prepare_token(os.environ, joining=RAY_VARIABLE in os.environ)
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        print(json.dumps(cast(Any, ray).cluster_resources()))
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
