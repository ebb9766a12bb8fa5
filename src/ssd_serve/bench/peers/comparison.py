"""`ssd bench peers`: this engine and llama.cpp's server, on the same GGUF file and cores.

The modes of llama.cpp are tuned. Then all engines run at the same time, and every prompt goes to each of them
in a random order. A request is sent only when all engines are idle.
"""

import hashlib
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import msgspec

from ssd_serve.base.errors import UserError
from ssd_serve.bench.client import LoadRequest
from ssd_serve.bench.peers.engines import (
    LLAMA,
    LONGEST_PROMPT,
    OURS,
    PLAIN,
    PeerAnswer,
    PeerMode,
    PeerServer,
    Place,
    await_idle,
    disturbing,
    launched,
    shapes_to_try,
)
from ssd_serve.bench.peers.figures import AnswerRow, figures
from ssd_serve.bench.peers.questions import Question, read_kind
from ssd_serve.bench.peers.record import Record, Tuned, open_record
from ssd_serve.bench.prompts import named_seed, repeated_share
from ssd_serve.bench.report import machine, provenance, usable_cores
from ssd_serve.bench.statistics import interleave
from ssd_serve.models.text.tokenizer import Tokenizer

_WARM_UP_TOKENS, _BUSY_TOKENS = 32, 24
"""Tokens of a first request, and of one that tunes on a busy machine, where some shapes take seconds a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersPlan:
    """The size of a sitting. `prompts`: of each kind and temperature; `deadline_s`: no question begins later."""

    kinds: Sequence[str]
    temperatures: Sequence[float]
    modes: Sequence[str]
    llama_modes: Sequence[str]
    prompts: int
    tokens: int
    busy: str
    data: Path
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """Questions of one kind that are asked together, one by each user."""

    temperature: float
    questions: tuple[Question, ...]

    @property
    def name(self) -> str:
        """The same for the same questions."""
        first = self.questions[0]
        return f"{len(self.questions)} x {first.kind} {first.name}, temperature {self.temperature:g}"


@dataclass(slots=True)
class Sitting:
    """One run of the command tunes what is not tuned yet, and asks what is not answered yet."""

    place: Place
    plan: PeersPlan
    record: Record
    file: Path | None
    say: Callable[[str], None]
    started: float = field(default_factory=time.monotonic)
    tokenizer: Tokenizer = field(init=False)
    _first_answers: dict[Question, str] = field(default_factory=dict[Question, str])

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer(self.place.file)

    def run(self) -> None:
        """Measure; the file is written after every group."""
        peers = self.plan.llama_modes
        ours = [PeerMode(OURS, mode) for mode in self.plan.modes]
        names = [mode.name for mode in (*ours, *(PeerMode(LLAMA, mode) for mode in peers))]
        groups = [
            group for group in self._groups() if not self.record.answered(group.name, self.plan.busy, names)
        ]
        self.say(f"{len(groups) * len(names)} requests of {self.place.users} users to come")
        if not groups:
            return
        with disturbing(self.plan.busy, usable_cores()):
            plain = self._known(PLAIN) or self._tuned(PLAIN, usable_cores())
            shapes = [plain, *(self._shape(mode, plain.cores) for mode in peers if mode != PLAIN)]
            with ExitStack() as stack:
                engines = {mode: self._started(stack, mode) for mode in (*ours, *shapes)}
                self._ask_all(engines, groups)

    def _groups(self) -> list[Group]:
        """Return all groups; the kinds and temperatures alternate, so that a run that ends early has some of each."""
        users = self.place.users
        kinds = [list(islice(self._short(kind), self.plan.prompts)) for kind in self.plan.kinds]
        return [
            Group(temperature, tuple(questions[start : start + users]))
            for start in range(0, self.plan.prompts, users)
            for questions in kinds
            for temperature in self.plan.temperatures
            if len(questions) >= start + users
        ]

    def _short(self, kind: str) -> Iterator[Question]:
        """Yield the questions of a kind that fit, but for the last ones, which tune."""
        for question in read_kind(kind, self.plan.data)[:-2]:
            if len(self.tokenizer.encode("".join(question.turns))) <= LONGEST_PROMPT - self.plan.tokens:
                yield question

    def _shape(self, mode: str, cores: int) -> PeerMode:
        """Return the shape that was tuned, also on the idle machine, else tune it."""
        idle = self._known(mode, "none")
        if idle is not None:
            idle = replace(idle, cores=cores, draft_cores=cores if idle.draft_cores else 0)
        return self._known(mode) or idle or self._tuned(mode, cores)

    def _known(self, mode: str, busy: str = "") -> PeerMode | None:
        wanted = (self.place.users, busy or self.plan.busy, f"{LLAMA} {mode}")
        return next(
            (one.best for one in self.record.tuned if (one.users, one.busy, one.name) == wanted), None
        )

    def _tuned(self, mode: str, threads: int) -> PeerMode:
        """Return the fastest shape for half of the tokens after a question of each kind, temperatures in turn."""
        temperatures = self.plan.temperatures
        groups = [
            Group(
                temperatures[place % len(temperatures)],
                (read_kind(kind, self.plan.data)[-2],) * self.place.users,
            )
            for place, kind in enumerate(self.plan.kinds)
        ]
        with ExitStack() as stack:
            engines = {each: self._started(stack, each) for each in shapes_to_try(mode, threads)}
            tokens = self.plan.tokens // 2 if self.plan.busy == "none" else _BUSY_TOKENS
            found = interleave(
                engines, groups, lambda each, group, _: self._ask(engines, each, group, tokens)[1]
            )
        tried = {each: _speed(answers) for each, answers in found.items()}
        best = max(tried, key=tried.__getitem__)
        shapes = {each.shape: round(speed, 2) for each, speed in tried.items()}
        self.say(f"  {best.name}: {best.shape} of {shapes} tokens/s")
        self.record.tuned.append(
            Tuned(users=self.place.users, busy=self.plan.busy, name=best.name, best=best, tried=shapes)
        )
        self.record.write(self.file)
        return best

    def _started(self, stack: ExitStack, mode: PeerMode) -> PeerServer:
        """Start an engine and send it two short requests."""
        engine = stack.enter_context(launched(mode, self.place))
        prompt = tuple(self.tokenizer.encode("def add(a, b):\n    return"))
        for seed in range(2):
            engine.ask(LoadRequest(prompt, _WARM_UP_TOKENS, seed), 0.0)
        return engine

    def _ask_all(self, engines: dict[PeerMode, PeerServer], groups: Sequence[Group]) -> None:
        began = time.monotonic()
        self.record.sittings[-1]["engines"] = [mode.name for mode in engines]
        for number, group in enumerate(groups):
            if time.monotonic() - self.started > self.plan.deadline_s:
                self.say(f"the time is over: {len(groups) - number} of {len(groups)} groups are left")
                return
            order = list(engines)
            random.Random(named_seed(group.name)).shuffle(order)
            rows: list[AnswerRow] = []
            for place, mode in enumerate(order):
                waited, answers = self._ask(engines, mode, group, self.plan.tokens)
                rows += self._rows(group, mode, place, waited, answers)
            self.record.answers.extend(rows)
            self.record.write(self.file)
            left = (time.monotonic() - began) / (number + 1) * (len(groups) - number - 1)
            self.say(f"{number + 1} of {len(groups)}: {group.name}; about {left / 60:.0f} minutes left")

    def _ask(
        self, engines: dict[PeerMode, PeerServer], mode: PeerMode, group: Group, tokens: int
    ) -> tuple[float, list[PeerAnswer]]:
        """Send the questions of all users at once, when all engines are idle."""
        requests = [
            LoadRequest(self._prompt(question, engines), tokens, (question.seed + user) % 2**31)
            for user, question in enumerate(group.questions)
        ]
        waited = await_idle(list(engines.values()))
        with ThreadPoolExecutor(len(requests)) as users:
            answers = users.map(lambda request: engines[mode].ask(request, group.temperature), requests)
            return waited, list(answers)

    def _prompt(self, question: Question, engines: dict[PeerMode, PeerServer]) -> tuple[int, ...]:
        """Return the prompt's tokens. Earlier turns were answered by plain decoding of llama.cpp, for all engines."""
        if not question.chat:
            return tuple(self.tokenizer.encode(question.turns[0]))
        messages: list[dict[str, str]] = []
        for turn in range(len(question.turns)):
            messages.append({"role": "user", "content": question.turns[turn]})
            if turn + 1 < len(question.turns):
                earlier = replace(question, turns=question.turns[: turn + 1])
                if earlier not in self._first_answers:
                    self._first_answers[earlier] = self._first_answer(earlier, engines)
                messages.append({"role": "assistant", "content": self._first_answers[earlier]})
        text = self.tokenizer.apply_chat_template(messages)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _first_answer(self, question: Question, engines: dict[PeerMode, PeerServer]) -> str:
        plain = min(engines, key=lambda mode: (mode.engine != LLAMA, mode.mode != PLAIN))
        request = LoadRequest(self._prompt(question, engines), self.plan.tokens, 0)
        return engines[plain].ask(request, 0.0, exact=False).text

    def _rows(
        self, group: Group, mode: PeerMode, place: int, waited: float, answers: Sequence[PeerAnswer]
    ) -> Iterator[AnswerRow]:
        for user, (question, answer) in enumerate(zip(group.questions, answers, strict=True)):
            yield AnswerRow(
                sitting=len(self.record.sittings) - 1,
                users=self.place.users,
                busy=self.plan.busy,
                kind=question.kind,
                prompt=question.name,
                temperature=group.temperature,
                group=group.name,
                order=place,
                engine=mode.engine,
                mode=mode.mode,
                shape=mode.shape,
                seed=(question.seed + user) % 2**31,
                prompt_tokens=answer.timed.prompt_tokens or 0,
                waited_s=round(waited, 3),
                first_s=round(answer.timed.ttft_s, 6),
                whole_s=round(answer.timed.latency_s, 6),
                tokens=answer.timed.tokens,
                repeated=round(repeated_share(self.tokenizer.encode(answer.text)), 3),
                text=hashlib.sha256(answer.text.encode()).hexdigest()[:16],
            )


def _speed(answers: Sequence[Sequence[PeerAnswer]]) -> float:
    """Return the tokens a second of whole requests."""
    some = [answer.timed for each in answers for answer in each]
    return sum(one.tokens for one in some) / sum(one.latency_s for one in some)


def run_peers(
    place: Place, plan: PeersPlan, file: Path | None, say: Callable[[str], None]
) -> dict[str, object]:
    """Measure what the file does not have yet, and return its content with the figures of all sittings."""
    record = open_record(file, _setup(place, plan))
    record.sittings.append(provenance() | {"machine": machine()})
    Sitting(place, plan, record, file, say).run()
    return {**msgspec.to_builtins(record), **figures(record.answers)}


def _setup(place: Place, plan: PeersPlan) -> dict[str, object]:
    """Return what has to be the same in all sittings of a file."""
    if not place.file.is_file():
        raise UserError(f"{place.model} is no GGUF file, which is what llama.cpp reads")
    version = subprocess.run([place.llama_server, "--version"], capture_output=True, text=True, check=False)
    return {
        "model": place.file.name,
        "sha256": hashlib.sha256(place.file.read_bytes()).hexdigest(),
        "llama_draft": place.llama_draft and place.llama_draft.name,
        "llama_cpp": (version.stdout + version.stderr).strip().splitlines()[:1],
        "llama_flags": list(place.llama_flags),
        "tokens": plan.tokens,
        "cores": usable_cores(),
    }
