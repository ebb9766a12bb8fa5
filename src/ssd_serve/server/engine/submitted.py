"""What the server keeps of a request that runs: enough to begin it again behind the tokens that it has.

Shared noise makes that possible: another verifier gives the tokens that this one would have given. Knows
messages, no channel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ssd_serve.base.errors import EngineDeadError, RequestError
from ssd_serve.base.messages import (
    Choice,
    Committed,
    Finished,
    Refused,
    RequestOptions,
    SamplingParameters,
    Submit,
    SubmitChoices,
)

MAX_LOSSES = 3
"""A request that was there at so many deaths in a row, at the last one alone, and was given no token between
them, is their cause."""


MAX_TOKENS = 1 << 21
"""Most of one message: at five bytes each it stays well below the largest frame."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The engine died; another one will go on with the request. Figures will be the last one's alone."""


Report = Committed | Interrupted | Finished | Refused | EngineDeadError
"""What a submitter is told about its request. Only after Committed and Interrupted something follows."""

Deliver = Callable[[Report], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for the engine. Its output begins with `output`, of which nothing is reported."""

    prompt: tuple[int, ...]
    parameters: SamplingParameters
    seed: int
    deliver: Deliver
    output: tuple[int, ...] = ()


@dataclass(slots=True)
class Submitted:
    """One request as it was first submitted, and how far it has come."""

    first: Submit
    deliver: Deliver
    tokens: list[int] = field(default_factory=list[int])
    scored: int = 0
    """Tokens of the prompt whose log-probabilities have come."""
    finishing: bool = False
    """The server has found its end; only figures are missing."""
    interrupted: bool = False
    fed: bool = False
    """Its engine has given something."""
    sent: bool = False
    """The present engine was given it."""
    losses: int = 0
    """Engines in a row that died while they had it, and gave it nothing."""

    @property
    def suspect(self) -> bool:
        """It may be what the engines died of: the next one is given it first."""
        return self.losses == MAX_LOSSES - 1

    @property
    def guilty(self) -> bool:
        """Engines die of it."""
        return self.losses >= MAX_LOSSES

    def take(self, report: Committed) -> None:
        """More of it has come."""
        self.tokens.extend(report.tokens)
        self.scored += len(report.prompt_logprobs)
        self.fed = True

    def interrupt(self, alone: bool) -> None:
        """Its engine has died, `alone`: which had nothing else to do."""
        if self.fed:
            self.losses = 0
        elif self.sent and (alone or not self.suspect):
            self.losses += 1
        self.fed, self.interrupted = False, True

    def again(self) -> Submit:
        """The request for an engine that knows nothing of it."""
        first = self.first
        return msgspec.structs.replace(first, output=tuple(self.tokens), scored=self.scored)


def submissions(wanted: Sequence[Wanted], options: RequestOptions, numbers: Iterator[int]) -> list[Submitted]:
    """Requests as they are told to an engine. Raises `RequestError` for what no message may hold."""
    if any(len(each.prompt) + len(each.output) > MAX_TOKENS for each in wanted):
        raise RequestError(f"a prompt and its output have more than {MAX_TOKENS} tokens", "prompt")
    made: list[Submitted] = []
    for each in wanted:
        message = Submit(
            next(numbers), each.prompt, each.parameters, each.seed, each.output, options=options
        )
        made.append(Submitted(message, each.deliver, list(each.output)))
    return made


def together(submits: Iterable[Submit]) -> list[Submit | SubmitChoices]:
    """The same requests, in order, with a prompt that several of them share told once a message."""
    groups: list[list[Submit]] = []
    room = 0
    for each in submits:
        before = groups[-1][-1] if groups else None
        fits = len(each.output) <= room
        if before is not None and fits and _alike(before, each):
            groups[-1].append(each)
        else:
            groups.append([each])
            room = MAX_TOKENS - len(each.prompt)
        room -= len(each.output)
    return [_message(group) for group in groups]


def _alike(one: Submit, other: Submit) -> bool:
    """Whether they are choices of one prompt."""
    if one.prompt is not other.prompt or one.options != other.options:
        return False
    return one.parameters is other.parameters or one.parameters == other.parameters


def _message(group: list[Submit]) -> Submit | SubmitChoices:
    first = group[0]
    if len(group) == 1:
        return first
    choices = tuple([Choice(each.request, each.seed, each.output, each.scored) for each in group])
    return SubmitChoices(first.prompt, first.parameters, choices, first.options)
