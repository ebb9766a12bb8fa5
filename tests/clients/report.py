"""What a page shows of other people's software: a line for each, with what was checked."""

from collections.abc import Mapping
from typing import Any

from ssd_serve.bench.tables import markdown_table


def clients_table(result: Mapping[str, Any]) -> str:
    """A line for each script."""
    lines = [
        (
            ", ".join(f"{name} {version}" for name, version in each["versions"].items()),
            "; ".join(
                f"{check['check']}{' (**failed**)' if 'failed' in check else ''}" for check in each["checks"]
            ),
        )
        for each in result["software"]
    ]
    return markdown_table(("software", "checked"), lines)
