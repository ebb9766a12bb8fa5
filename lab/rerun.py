"""`python -m lab.rerun`: measures committed results again that are stale, one after the other.

Each command has a log of its own. One that fails is told and the others go on, so that it can run over night
and be started again. Knows commands and files, not what they measure.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.stale import judge_results
from ssd_serve.bench.document import make_output_folder
from ssd_serve.bench.emulated import emulating
from ssd_serve.bench.provenance import ROOT
from ssd_serve.cli.main import exit_code


def _of_lab(name: str, *words: str) -> tuple[str, ...]:
    return ("-m", f"lab.{name}", *words)


def _of_bench(name: str, *words: str) -> tuple[str, ...]:
    return ("-m", "ssd_serve", "bench", name, *words)


def _of_peers(dtype: str, *temperatures: str) -> tuple[str, ...]:
    return _of_bench("peers", "--dtype", dtype, "--temperatures", *temperatures)


_LOAD = ("--ballast", "--waves", "1", "--launches", "2", "--learning", "2")
_DRAFTS = ("ngram", "suffix", "self:2", "embedded,ngram", "self:2,suffix", "embedded,self:2,ngram")
COMMANDS: dict[str, tuple[str, ...]] = {
    "bench/results/modes.json": _of_bench("modes"),
    "bench/results/pair.json": _of_lab("pair"),
    "bench/results/quality.json": _of_bench("quality"),
    "bench/results/lossless.json": _of_bench("lossless"),
    "bench/results/lossless-torch.json": _of_bench("lossless", "--quick"),
    "bench/results/lossless-batch-invariant.json": _of_bench("lossless", "--quick"),
    "bench/results/lossless-drafts.json": _of_bench(
        "lossless", "--quick", *(word for draft in _DRAFTS for word in ("--draft", draft))
    ),
    "bench/results/kernels.json": _of_bench("kernels"),
    "lab/results/packed.json": _of_lab("packed"),
    "lab/results/host-drafter.json": _of_lab("host", "--drafter-only"),
    "lab/results/host.json": _of_lab("host"),
    "lab/results/channels.json": _of_lab("channels"),
    "lab/results/features.json": _of_lab("channels", "--features"),
    "lab/results/bodies.json": _of_lab("bodies"),
    "lab/results/front.json": _of_lab(
        *("front", "--rates", "20000", "40000", "80000", "--seconds", "5"),
        *("--loop", "asyncio", "uvloop", "--parser", "h11", "httptools"),
    ),
    "lab/results/relay.json": _of_lab("relay"),
    "lab/results/clients.json": _of_lab("clients"),
    "lab/results/invariance.json": _of_lab("invariance"),
    "lab/results/drafts.json": _of_lab(
        "drafts", "--num-prompts", "10", "--tokens", "64", "--temperatures", "0.6", "1"
    ),
    "lab/results/rereading.json": _of_lab("rereading"),
    "lab/results/rereading-inline.json": _of_lab("rereading", "--layout", "inline"),
    "lab/results/vocabulary.json": _of_lab("vocabulary"),
    "lab/results/grammars.json": _of_lab("grammars"),
    "lab/results/grammar-drafts.json": _of_lab("grammar_drafts"),
    "lab/results/ablate.json": _of_lab("ablate"),
    "lab/results/calibration.json": _of_lab("calibration", "--plot", "lab/results/calibration.svg"),
    "lab/results/drafters.json": _of_lab("drafters", "--real", "1", "2", "4"),
    "lab/results/governor.json": _of_lab("governor"),
    "lab/results/prediction.json": _of_lab("prediction"),
    "lab/results/faults.json": _of_lab("faults", "--ray"),
    "bench/results/load.json": _of_bench(
        *("load", "--devices", "all", *_LOAD, "--pairs", "4"),
        *("--offered", "0.5", "0.9", "1.2", "--open-requests", "16", "--open-runs", "4"),
        *("--plot", "bench/results/load.svg"),
    ),
    "bench/results/load-few.json": _of_bench(
        *("load", "--devices", "all", *_LOAD, "--pairs", "24", "--concurrency", "1", "2", "4", "--offered")
    ),
    "bench/results/load-same.json": _of_bench(
        *("load", "--devices", "same", *_LOAD, "--pairs", "8"),
        *("--concurrency", "1", "2", "4", "8", "16", "32", "--offered"),
    ),
    "bench/results/trace.json": _of_bench(
        *("load", "--model-wrapper", emulating("mi300x-70b-1b*2"), "--devices", "same", "--no-closed-loop"),
        *("--offered", "--trace", "azure_llm_trace_code.csv", "--trace-seconds", "480"),
        *("--time-scale", "2", "--length-scale", "0.25"),
    ),
    **{f"bench/results/peers-temperature-{each}.json": _of_peers("bf16", each) for each in ("0", "0.6", "1")},
    "bench/results/peers-int8.json": _of_peers("int8", "0", "0.6", "1"),
    "lab/results/soak.json": _of_lab("soak", "--minutes", "30"),
}
"""What writes each result, in the order in which they are measured; it is told where by `--json`."""
_H100 = ("--device", "cuda:0")
_H100_MODES = (*("big", "models/embedded/draft", *_H100, "--draft-device", "cpu:2"), "--num-prompts", "24")
"""`big` is the embedded target by `ssd recipe ballast --hidden 4096 --layers 32 --intermediate 14336`."""
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "bench/results/peers-avx2.json": _of_peers("bf16", "0.6"),
    "bench/results/h100/conformance.json": _of_bench("conformance", *_H100),
    "bench/results/h100/lossless.json": _of_bench("lossless", "--quick", *_H100),
    "bench/results/h100/kernels.json": _of_bench("kernels", *_H100),
    "bench/results/h100/forwards.json": _of_lab(
        *("forwards", "--attention", "triton", "flashinfer"),
        *("--rows", "1", "8", "16", "64", "--contexts", "128", "1024", "4096", *_H100),
    ),
    "bench/results/h100/modes.json": _of_bench("modes", *_H100_MODES, "--temperatures", "0.6"),
    "bench/results/h100/modes-temperature-1.json": _of_bench("modes", *_H100_MODES, "--temperatures", "1"),
}
"""The same of results that need the processor or GPU that their name says: measured when they are named."""
VARIABLES = {
    "bench/results/lossless-torch.json": {"SSD_NATIVE_KERNELS": "false"},
    "lab/results/invariance.json": {"SSD_NATIVE_KERNELS": "false"},
    "bench/results/lossless-batch-invariant.json": {
        "SSD_NATIVE_KERNELS": "false",
        "SSD_BATCH_INVARIANT": "true",
    },
}


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one result; `code` is its command's exit code."""

    file: str
    code: int
    minutes: float


Runner = Callable[[Sequence[str], dict[str, str], Path], int]
"""Runs words of Python with more variables, into a log; returns the exit code."""


def stale(root: Path) -> list[str]:
    """Results that are not there or older than their code, in the order of `COMMANDS`."""
    fresh = {each.file for each in judge_results(root) if not each.why}
    return [file for file in COMMANDS if file not in fresh]


def rerun(
    files: Sequence[str], logs: Path, run: Runner, say: Callable[[str], None], clock: Callable[[], float]
) -> list[_Outcome]:
    """Measure these again. Raises `UserError` where `logs` cannot be a folder to write to."""
    outcomes: list[_Outcome] = []
    make_output_folder(logs, "--logs")
    commands = {**COMMANDS, **ELSEWHERE}
    for file in files:
        log = logs / f"{file.removesuffix('.json').replace('/', '-')}.log"
        say(f"{file}: python {' '.join(commands[file])}; log {log}")
        began = clock()
        code = run([*commands[file], "--json", file], VARIABLES.get(file, {}), log)
        outcomes.append(_Outcome(file, code, (clock() - began) / 60))
        say(f"  {'measured' if code == 0 else f'ended with {code}'} after {outcomes[-1].minutes:.1f} minutes")
    return outcomes


def _run(words: Sequence[str], variables: dict[str, str], log: Path) -> int:
    with log.open("w", encoding="utf-8") as output:
        environment = {**os.environ, **variables}
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=output, stderr=output, check=False
        )
    return done.returncode


def main(argv: Sequence[str] | None = None) -> int:
    """1 when any command failed."""
    parser = argparse.ArgumentParser(prog="python -m lab.rerun", description="measure stale results again")
    parser.add_argument("files", nargs="*", metavar="FILE", help="these only, stale or not")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "rerun", metavar="FOLDER")
    args = parser.parse_args(argv)
    known = (*COMMANDS, *ELSEWHERE)
    if unknown := [file for file in args.files if file not in known]:
        parser.error(f"nothing is known of {', '.join(unknown)}; known are {', '.join(known)}")
    outcomes = rerun(
        args.files or stale(ROOT), args.logs, _run, lambda line: print(line, flush=True), time.monotonic
    )
    return int(any(each.code for each in outcomes))


if __name__ == "__main__":
    sys.exit(exit_code(main, "python -m lab.rerun"))
