"""Two states of the code for `ssd bench check`: this checkout, and an earlier commit in its own worktree.

Each runs `probe.py` in a process that imports its own sources with the Python of this one. The worktree
and all files go away whatever happens. Knows git and processes, not what is measured.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import ssd_serve
from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.bench.check.comparison import MODES, Code

_PROBES = ("bench/check/probe.py", "bench/check_probe.py")
"""Where codes have their probe, the newest place first. Each brings its own: it knows where its parts lie."""
_CHOSEN, _PROMPTS = 8, 2
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Codes:
    """Both codes, ready to measure, and what the old one is called."""

    new: Code
    old: Code
    name: str


@dataclass(frozen=True, slots=True)
class Base:
    """The commit to compare with, and why it is that one."""

    commit: str
    name: str


def repository() -> Path:
    """The checkout that this code runs from."""
    root = Path(ssd_serve.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        raise UserError(f"{root} is no git checkout; bench check compares this code with an earlier commit")
    return root


def find_base(root: Path, wanted: str | None) -> Base:
    """`wanted`, else the last release, else the first parent of the commit that is checked out."""
    if wanted:
        return Base(_git(root, "rev-parse", "--verify", f"{wanted}^{{commit}}"), wanted)
    with contextlib.suppress(UserError):
        tag = _git(root, "describe", "--tags", "--abbrev=0", "--match", "v*")
        return Base(_git(root, "rev-parse", f"{tag}^{{commit}}"), f"{tag}, the last release")
    commit = _git(root, "rev-parse", "--verify", "HEAD^")
    return Base(commit, f"{commit[:10]}, the parent of the last commit, because there is no release yet")


@contextlib.contextmanager
def worktree(root: Path, commit: str, path: Path) -> Generator[Path]:
    """The commit's files below `path`, for as long as this lasts."""
    _git(root, "worktree", "add", "--detach", str(path), commit)
    try:
        yield path
    finally:
        _git(root, "worktree", "remove", "--force", str(path))


def find_probe(tree: Path) -> Path:
    """The script of a code that measures it."""
    for each in _PROBES:
        if (tree / each).is_file():
            return tree / each
    raise UserError(f"the code in {tree} is older than this check; name a later commit: BASE=COMMIT")


@contextlib.contextmanager
def both_codes(wanted: str | None, say: Say) -> Generator[Codes]:
    """Both codes over the same pair and prompts. Ends their processes and removes the worktree."""
    root = repository()
    base = find_base(root, wanted)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminated_like_interrupted())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssd-check-")))
        say(f"comparing with {base.name}")
        old = stack.enter_context(worktree(root, base.commit, folder / "old"))
        job = _write_job(folder, say)
        codes: list[Code] = []
        for number, (name, tree) in enumerate((("this checkout", root), (base.name, old))):
            say(f"starting {name}")
            # Out of its tree: beside it, a script would find rooms under a second name.
            probe = Path(shutil.copy(find_probe(tree), folder / f"probe{number}.py"))
            codes.append(stack.enter_context(started(tree, probe, job)))
        yield Codes(codes[0], codes[1], base.name)


class Probe:
    """A code in its process: a line in for every pass, a line of JSON back."""

    def __init__(self, popen: "subprocess.Popen[str]", tree: Path) -> None:
        self._popen = popen
        self._tree = tree

    def measure(self, turn: int) -> Mapping[str, float]:
        """One pass."""
        self.tell(str(turn))
        answer = self.answer()
        return {mode: float(answer[mode]) for mode in MODES}

    def tell(self, line: str) -> None:
        """Send a line; what a dead process does not read is noticed by the answer."""
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.write(line + "\n")
                self._popen.stdin.flush()

    def answer(self) -> dict[str, str]:
        """The next line that begins an object."""
        for line in self._popen.stdout or ():
            if line.startswith("{"):
                found: dict[str, str] = json.loads(line)
                return found
        raise SsdError(
            f"the code in {self._tree} cannot run this check (see above); name a later commit: BASE=COMMIT"
        )


@contextlib.contextmanager
def started(tree: Path, probe: Path, job: Path) -> Generator[Probe]:
    """The sources below `tree`, loaded and ready."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    popen = subprocess.Popen(
        [sys.executable, str(probe), str(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=probe.parent,
    )
    try:
        code = Probe(popen, tree)
        source = Path(code.answer()["source"]).resolve()
        if not source.is_relative_to(tree.resolve()):
            raise SsdError(f"{tree} was to be measured, but Python imported {source}")
        yield code
    finally:
        for pipe in (popen.stdin, popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(10.0)
        popen.kill()
        popen.wait()


def _write_job(folder: Path, say: Say) -> Path:
    """The pair with ballast, and prompts that it does not continue with loops, both from this checkout."""
    from ssd_serve.base.settings import Settings
    from ssd_serve.bench.prompts import NEW_TOKENS
    from ssd_serve.bench.rig import use_cores
    from ssd_serve.bench.stage import CORES
    from ssd_serve.bench.workload import ballast_pair, choose_prompts

    use_cores(str(CORES.target))  # as the codes do, and where others work two threads wait for one another
    pair = ballast_pair(folder)
    chosen = choose_prompts(Settings.model_validate(pair), (0.0,), _CHOSEN, say)[0.0]
    job = folder / "job.json"
    job.write_text(
        json.dumps(
            {
                **pair,
                "prompts": [asdict(prompt) for prompt in chosen.prompts],
                "prompts_of_a_pass": _PROMPTS,
                "tokens": NEW_TOKENS,
            }
        ),
        encoding="utf-8",
    )
    return job


@contextlib.contextmanager
def _terminated_like_interrupted() -> Generator[None]:
    """A request to end unwinds the stack, so that nothing is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 signal's arguments
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise UserError("bench check needs git; install it") from error
    if done.returncode:
        raise UserError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()
