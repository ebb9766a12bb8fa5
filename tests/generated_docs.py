"""The tables of the documents that are made from code, and a program that writes them.

    .venv/bin/python -m tests.generated_docs

Knows which page holds which table; the words are those of the code.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ssd_serve.app.cli.main import EXIT_CODES
from ssd_serve.app.cli.output import as_markdown
from ssd_serve.base.attention_backends import BACKENDS
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import origins, resolve
from ssd_serve.server.access.tenants import Tenants
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.observability.metrics import ServerMetrics
from tests.server.fakes import READY, STATUS

DOCS = Path(__file__).parents[1] / "docs"
_BUCKETS_BOUND = "le"


def settings_table() -> str:
    """Every setting with its plain default, as `ssd settings --markdown` prints it."""
    return as_markdown(origins(resolve({"target": EngineConfig.target}), {}))


def exit_codes_table() -> str:
    """Every exit code of `ssd`."""
    rows = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES]
    return "\n".join(["| code | meaning |", "|---|---|", *rows])


def metrics_table() -> str:
    """Every metric of a server that has keys and an engine."""
    engine = EngineClient()
    engine.ready = READY
    engine.status = msgspec.structs.replace(STATUS, drafter_requests={"drafter-0": 1})
    metrics = ServerMetrics(engine, lambda: True, Tenants(Settings(api_key="0123456789abcdef" * 2)))
    metrics.ended.labels("stop").inc()
    families: Iterable[Metric] = text_string_to_metric_families(metrics.render().decode())
    rows = sorted(_metric_row(family) for family in families if not family.name.endswith("_created"))
    return "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows])


def _metric_row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = sorted({label for sample in family.samples for label in sample.labels} - {_BUCKETS_BOUND})
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {shown} | {family.documentation} |"


def backends_table() -> str:
    """Every tree attention backend."""
    rows = [f"| `{name}` | {each.where.value} | {each.what} |" for name, each in BACKENDS.items()]
    return "\n".join(["| backend | where | what it is |", "|---|---|---|", *rows])


TABLES = {
    "kernels": backends_table,
    "settings": settings_table,
    "exit-codes": exit_codes_table,
    "metrics": metrics_table,
}
"""Generated tables by name of their page, which is the name of their markers."""


def block(page: str, name: str) -> str:
    """Content of a page between its markers."""
    _, _, rest = page.partition(f"<!-- {name}:begin -->")
    text, end, _ = rest.partition(f"<!-- {name}:end -->")
    assert end
    return text.strip()


def write_tables() -> None:
    """Put every table into its page."""
    for name, table in TABLES.items():
        file = DOCS / f"{name}.md"
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        page = file.read_text(encoding="utf-8")
        head, tail = page.split(begin)[0], page.split(end)[1]
        file.write_text(f"{head}{begin}\n\n{table()}\n\n{end}{tail}", encoding="utf-8")


if __name__ == "__main__":
    write_tables()
