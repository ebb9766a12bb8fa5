"""Results of `ssd bench` as blocks of documents. Knows which formatter a result needs, not what it holds."""

import os
from collections.abc import Mapping
from pathlib import Path

from ssd_serve.base.errors import UserError
from ssd_serve.bench.load.report import load_plot, load_tables
from ssd_serve.bench.modes_result import modes_tables
from ssd_serve.bench.peer_failures import with_folded_failures
from ssd_serve.bench.peers.report import markdown


def block_name(result: Mapping[str, object]) -> str:
    """The name that the markers of this result's block have."""
    named = result.get("benchmark", result.get("bench", "modes"))
    return str(named) if named in ("load", "peers") else "modes"


def block_text(result: Mapping[str, object], file: Path, folder: Path) -> str:
    """The tables of the result in `file`, for a document in `folder`: failures of peers that are alike in one
    line, and above them a chart that lies beside the file."""
    name = block_name(result)
    if name == "load":
        return load_tables(result)
    if name == "modes":
        return modes_tables(result)
    drawn = file.with_suffix(".svg")
    image = f"![Whole requests of each engine]({os.path.relpath(drawn, folder)})\n\n"
    return (image if drawn.exists() else "") + markdown(with_folded_failures(result))


def chart(result: Mapping[str, object]) -> str:
    """The SVG of a result of load or peers."""
    name = block_name(result)
    if name == "load":
        return load_plot(result)
    if name == "peers":
        from ssd_serve.bench.peers.chart import bar_chart  # needs matplotlib

        return bar_chart(result)
    raise UserError("only results of load and peers have a chart")
