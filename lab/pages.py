"""`python -m lab.pages`: writes what the documents show of committed results, each block between its markers.

Knows which page shows which file; what a block looks like is told elsewhere.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lab import gpu_blocks, own_modes_block, page_blocks
from lab.clients.report import clients_table
from lab.forwards.report import table as forwards_table
from lab.front.report import front_table
from lab.prediction.report import prediction_tables
from lab.relay.report import relay_table
from ssd_serve.bench.blocks import block_text
from ssd_serve.bench.document import read_file, replace_block
from ssd_serve.bench.load.trace_report import trace_table
from ssd_serve.bench.provenance import ROOT
from ssd_serve.cli.main import exit_code


@dataclass(frozen=True, slots=True)
class Block:
    """What a page shows of some result files, by the name of its markers."""

    page: str
    name: str
    files: tuple[str, ...]
    text: Callable[..., str]

    def made(self, root: Path = ROOT) -> str:
        """The block's text, of the files as they are."""
        return self.text(*(read_file(dict[str, Any], root / file, "a benchmark") for file in self.files))


def _of_bench(name: str) -> Block:
    """A block whose text the benchmark has itself."""
    file = f"bench/results/{name}.json"
    text = partial(block_text, file=ROOT / file, folder=ROOT / "docs")
    return Block("docs/results.md", name, (file,), text)


_LOSSLESS = tuple(f"bench/results/lossless{kind}.json" for kind in ("", "-torch", "-batch-invariant"))
_H100 = "bench/results/h100"
_H100_MODES = (f"{_H100}/modes.json", f"{_H100}/modes-temperature-1.json")
_PEERS = ("peers-temperature-0", "peers-temperature-0.6", "peers-temperature-1", "peers-int8")
_PEERS_FILES = tuple(f"bench/results/{name}.json" for name in _PEERS)
_REREADING = ("lab/results/rereading.json", "lab/results/rereading-inline.json")
_BLOCKS = (
    _of_bench("modes"),
    *(_of_bench(name) for name in _PEERS),
    _of_bench("peers-avx2"),
    Block("docs/results.md", "peers-own", _PEERS_FILES, own_modes_block.own_modes),
    _of_bench("load"),
    _of_bench("load-few"),
    _of_bench("load-same"),
    Block("docs/results.md", "trace", ("bench/results/trace.json",), trace_table),
    Block("docs/results.md", "ablate", ("lab/results/ablate.json",), page_blocks.ablate),
    Block("docs/results.md", "calibration", ("lab/results/calibration.json",), page_blocks.calibration),
    Block("docs/results.md", "quality", ("bench/results/quality.json",), page_blocks.quality),
    Block("docs/results.md", "drafters", ("lab/results/drafters.json",), page_blocks.drafters),
    Block("docs/results.md", "channels", ("lab/results/channels.json",), page_blocks.channels),
    Block("docs/drafts.md", "features", ("lab/results/features.json",), page_blocks.features),
    Block("docs/api.md", "grammars", ("lab/results/grammars.json",), page_blocks.grammars),
    Block("docs/api.md", "grammar-drafts", ("lab/results/grammar-drafts.json",), page_blocks.grammar_drafts),
    Block("docs/api.md", "clients", ("lab/results/clients.json",), clients_table),
    Block("docs/operations.md", "front", ("lab/results/front.json",), front_table),
    Block("docs/operations.md", "relay", ("lab/results/relay.json",), relay_table),
    Block("docs/drafts.md", "vocabulary", ("lab/results/vocabulary.json",), page_blocks.vocabulary),
    Block("docs/drafts.md", "drafts", ("lab/results/drafts.json",), page_blocks.drafts),
    Block("docs/drafts.md", "rereading", _REREADING, page_blocks.rereading),
    Block("docs/planning.md", "prediction", ("lab/results/prediction.json",), prediction_tables),
    Block("docs/faults.md", "faults", ("lab/results/faults.json",), page_blocks.faults),
    Block("docs/lossless.md", "invariance", ("lab/results/invariance.json",), page_blocks.invariance),
    Block("docs/lossless.md", "lossless", _LOSSLESS, page_blocks.lossless),
    Block(
        "docs/lossless.md",
        "lossless-drafts",
        ("bench/results/lossless-drafts.json",),
        page_blocks.lossless_drafts,
    ),
    Block("docs/benchmarks.md", "soak", ("lab/results/soak.json",), page_blocks.soak),
    Block("docs/gpus.md", "h100-conformance", (f"{_H100}/conformance.json",), gpu_blocks.conformance),
    Block("docs/gpus.md", "h100-lossless", (f"{_H100}/lossless.json",), gpu_blocks.lossless),
    Block("docs/gpus.md", "h100-kernels", (f"{_H100}/kernels.json",), gpu_blocks.kernels),
    Block("docs/gpus.md", "h100-forwards", (f"{_H100}/forwards.json",), forwards_table),
    Block("docs/gpus.md", "h100-modes", _H100_MODES, gpu_blocks.modes),
    Block("docs/speculation.md", "governor", ("lab/results/governor.json",), page_blocks.governor),
)
BLOCKS = tuple(each for each in _BLOCKS if all((ROOT / file).exists() for file in each.files))
"""Those whose files are there: a result that is withdrawn until it is measured again is shown nowhere."""


def main() -> int:
    """Write every block."""
    for block in BLOCKS:
        replace_block(ROOT / block.page, block.name, block.made())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, "python -m lab.pages"))
