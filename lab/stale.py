"""`python -m lab.stale`: which results are older than the code that they measure?

A result names its commit and the paths of the code that it measures. It is stale when these paths hold
something else now: by content, so that a rebased commit still counts. Knows git and where results lie, not
what they say.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ssd_serve.bench.document import read_file
from ssd_serve.bench.provenance import ROOT, code_of, commits_since
from ssd_serve.bench.tables import text_table
from ssd_serve.cli.main import exit_code

_FOLDERS = ("bench/results", "bench/results/h100", "lab/results")
_NOT_RUN = {
    f"bench/results/h100/{name}.json": "kernels/native" for name in ("conformance", "forwards", "kernels")
}
"""Code below the measured paths that a result did not run: attention and forwards on a GPU, what is compiled
for cores. A drafter on a core beside the GPU runs it."""
_ABBREVIATED = 9


class _Provenance(msgspec.Struct, frozen=True):
    commit: str = ""
    dirty: bool = False
    measures: list[str] = []
    code: str = ""
    started: str = ""


class _Result(msgspec.Struct, frozen=True):
    provenance: _Provenance = _Provenance()


@dataclass(frozen=True, slots=True)
class Judged:
    """A result file; `why` it is stale, or nothing."""

    file: str
    commit: str
    measured: str
    why: str


def judge_results(root: Path) -> Iterator[Judged]:
    """Every result file of a clone against its HEAD."""
    for folder in _FOLDERS:
        for file in sorted((root / folder).glob("*.json")):
            found = read_file(_Result, file, "a benchmark").provenance
            commit, day = found.commit[:_ABBREVIATED], found.started.partition("T")[0]
            name = file.relative_to(root).as_posix()
            yield Judged(name, commit, day, _why(root, found, _NOT_RUN.get(name, "")))


def _why(root: Path, found: _Provenance, not_run: str) -> str:
    if not found.commit:
        return "names no commit"
    if found.dirty:
        return "its code was in no commit"
    if code_of(root, "HEAD", found.measures) == found.code:
        return ""
    if not_run and code_of(root, found.commit, found.measures) == found.code:
        then, now = (code_of(root, commit, found.measures, not_run) for commit in (found.commit, "HEAD"))
        if then == now:
            return ""
    commits = commits_since(root, found.commit, found.measures)
    return f"{commits} commits since" if commits else "its code differs, its commit is not in this history"


def main(root: Path = ROOT) -> int:
    """Print a table of all results; 1 when any is stale."""
    judged = [*judge_results(root)]
    rows = [(each.file, each.commit, each.measured, each.why or "as new as its code") for each in judged]
    print(text_table(("result", "commit", "measured", ""), rows))
    return int(any(each.why for each in judged))


if __name__ == "__main__":
    sys.exit(exit_code(main, "python -m lab.stale"))
