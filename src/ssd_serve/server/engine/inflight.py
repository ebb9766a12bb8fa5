"""State of the requests that run on an engine: enough to submit them again to the next one.

The next engine continues behind the tokens received so far; shared noise makes it produce the tokens that
the lost engine would have produced. Knows messages, no channel.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from ssd_serve.base.errors import EngineDeadError
from ssd_serve.base.messages import Choice, Committed, Finished, Refused, Submit, SubmitChoices

MAX_CRASHES = 3
"""A request is poison after so many crashes in a row without a token, alone in the engine at the last."""

MAX_TOKENS = 1 << 21
"""Most tokens of one message: at five bytes each it stays well below the largest frame."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The engine died; another one continues the request. Its statistics cover the last engine only."""


Report = Committed | Interrupted | Finished | Refused | EngineDeadError
"""Reports of one request, in order. Only `Committed` and `Interrupted` are followed by another."""

Deliver = Callable[[Report], None]


@dataclass(slots=True, eq=False)
class InflightRequest:
    """A request from its submission to its end.

    `submit.output` is what the client has from an earlier response; nothing of it is reported again.
    """

    submit: Submit
    deliver: Deliver
    tokens: list[int] = field(init=False)
    """Output so far."""
    scored: int = 0
    """Number of prompt tokens with received log-probabilities."""
    finishing: bool = False
    """The server has found a stop string; only statistics are missing."""
    interrupted: bool = False
    progressed: bool = False
    """The current engine has reported something about it."""
    sent: bool = False
    """The current engine was given it."""
    crash_count: int = 0
    """Engines in a row that died with it and had reported nothing about it."""

    def __post_init__(self) -> None:
        self.tokens = list(self.submit.output)

    @property
    def number(self) -> int:
        """The engine's number of the request."""
        return self.submit.request

    @property
    def is_suspect(self) -> bool:
        """True where the request may have killed the engines: the next engine gets it first, alone."""
        return self.crash_count == MAX_CRASHES - 1

    @property
    def is_poison(self) -> bool:
        """True where engines die of this request."""
        return self.crash_count >= MAX_CRASHES

    def receive(self, report: Committed) -> None:
        """Keep the tokens of a report, and deliver it."""
        self.tokens.extend(report.tokens)
        self.scored += len(report.prompt_logprobs)
        self.progressed = True
        self.deliver(report)

    def interrupt(self, alone: bool) -> None:
        """Count a crash of the engine; `alone`: it had no other request."""
        if self.progressed:
            self.crash_count = 0
        elif self.sent and (alone or not self.is_suspect):
            self.crash_count += 1
        self.progressed, self.interrupted = False, True

    def resubmission(self) -> Submit:
        """Return the request for a new engine, behind the tokens received so far."""
        return msgspec.structs.replace(self.submit, output=tuple(self.tokens), scored=self.scored)


def interrupt_all(running: Mapping[int, InflightRequest]) -> None:
    """Count the crash of an engine for all of its requests."""
    alone = sum(each.sent for each in running.values()) == 1
    for each in running.values():
        each.interrupt(alone)


class Quarantine:
    """Orders the requests of a dead engine for the next one: suspects first, one at a time.

    Only a request that was alone in an engine is ever blamed for its death. `running` is read, never changed.
    """

    def __init__(self, running: Mapping[int, InflightRequest]) -> None:
        self._running = running
        self._suspects = deque(number for number, each in running.items() if each.is_suspect)
        self._trial: InflightRequest | None = None
        self.over = False
        """True once no suspect is left: new requests are sent at once."""

    def next_requests(self) -> list[InflightRequest]:
        """Return the requests to send now; ask again after each report of the engine."""
        trial = self._trial
        if self.over or (trial is not None and not trial.progressed and trial.number in self._running):
            return []
        while self._suspects:
            self._trial = self._running.get(self._suspects.popleft())
            if self._trial is not None:
                return [self._trial]
        self.over = True
        return [each for each in self._running.values() if not each.sent]


def group_choices(submits: Iterable[Submit]) -> list[Submit | SubmitChoices]:
    """Join neighbours that share a prompt into one message each, of at most `MAX_TOKENS` tokens."""
    groups: list[list[Submit]] = []
    room = 0
    for each in submits:
        if groups and len(each.output) <= room and _same_prompt(groups[-1][-1], each):
            groups[-1].append(each)
        else:
            groups.append([each])
            room = MAX_TOKENS - len(each.prompt)
        room -= len(each.output)
    return [_message(group) for group in groups]


def _same_prompt(one: Submit, other: Submit) -> bool:
    if one.prompt is not other.prompt or one.options != other.options:
        return False
    return one.parameters is other.parameters or one.parameters == other.parameters


def _message(group: list[Submit]) -> Submit | SubmitChoices:
    first = group[0]
    if len(group) == 1:
        return first
    choices = tuple([Choice(each.request, each.seed, each.output, each.scored) for each in group])
    return SubmitChoices(first.prompt, first.parameters, choices, first.options)
