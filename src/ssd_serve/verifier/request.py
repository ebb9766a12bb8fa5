"""State of one request in the verifier: tokens, committed slots, replica and figures.

Also the limits that requests must keep. Knows no scheduling and no text.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import overload

from ssd_serve.base.draft_messages import Open
from ssd_serve.base.messages import Figures, RequestOptions, SamplingParameters, Submit
from ssd_serve.base.seeds import root_name
from ssd_serve.cache.prefix import PrefixHandle, common_length
from ssd_serve.cache.replica import Replica
from ssd_serve.cache.slots import SlotTable
from ssd_serve.sampling.grammar import MatcherState
from ssd_serve.sampling.overrides import LogitOverrides
from ssd_serve.sampling.parameters import needs_counts, needs_overrides
from ssd_serve.sampling.processors import TokenCounts
from ssd_serve.verifier.acceptance import Acceptance, DraftedLevels
from ssd_serve.verifier.tracing import RequestTrace


class TokenSequence(Sequence[int]):
    """Tokens that only grow."""

    __slots__ = ("_length", "output", "prompt")

    def __init__(self, prompt: Sequence[int], output: Iterable[int] = ()) -> None:
        self.prompt = prompt
        self.output = list(output)
        self._length = len(prompt)

    def __len__(self) -> int:
        return self._length + len(self.output)

    def __iter__(self) -> Iterator[int]:
        return chain(self.prompt, self.output)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenSequence | list | tuple):
            return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        split = self._length
        if isinstance(at, int):
            at = at + len(self) if at < 0 else at
            if at < 0:
                raise IndexError(at)
            return self.prompt[at] if at < split else self.output[at - split]
        start, stop, step = at.indices(len(self))
        if step != 1:
            return list(self)[at]
        if start >= split:
            return self.output[start - split : max(stop - split, 0)]
        found = list(self.prompt[start : min(stop, split)])
        return found + self.output[: stop - split] if stop > split else found

    def extend(self, tokens: Iterable[int]) -> None:
        """Append output."""
        self.output.extend(tokens)


@dataclass(slots=True, eq=False)
class Request:
    """A request from `Submit` to `Finished`.

    `tokens` is prompt + output; the first `len(slots)` of them are in the KV cache. The root is the last
    token and is never in the cache: `pending` is 1 while decoding, more while the prompt is being read.
    """

    number: int
    parameters: SamplingParameters
    seed: int
    prompt_length: int
    tokens: TokenSequence
    stop_token_ids: frozenset[int]
    """Ids that end the text once `min_tokens` are out."""
    counts: TokenCounts | None
    limit: int
    """Most nodes in the replica."""
    vocabulary: int
    overrides: LogitOverrides | None = None
    """Changes of single logits by the parameters, if any."""
    grammar: MatcherState | None = None
    """State of the grammar that the output must match, if any."""
    slots: SlotTable = field(default_factory=SlotTable)
    options: RequestOptions = field(default_factory=RequestOptions)
    handle: PrefixHandle | None = None
    first_scheduled_at: float | None = None
    """Time at which it first left the queue."""
    epoch: int = 0
    replica: Replica | None = None
    figures: Figures = field(default_factory=Figures)
    acceptance: Acceptance = field(default_factory=Acceptance)
    levels: DraftedLevels = field(default_factory=DraftedLevels)
    trace: RequestTrace | None = None
    """Recorder of its rounds, where traced."""
    scored: int = 0
    """Number of prompt tokens, from the second on, with reported log-probabilities."""
    _common: dict[int, int] = field(default_factory=dict[int, int])
    """Known common length with other requests, by number."""

    def common_length(self, other: "Request", end: int) -> int:
        """Return how many of the first `end` tokens equal those of another request. Texts only grow, so no
        token is compared twice."""
        known = self._common.get(other.number, 0)
        if known < end and other.tokens[known] == self.tokens[known]:
            known += common_length(other.tokens[known:end], self.tokens, known, end)
            self._common[other.number] = known
        return known

    @property
    def unscored(self) -> range:
        """Positions of the prompt with a next token that still needs its log-probability."""
        asked = self.parameters.prompt_logprobs is not None
        return range(self.scored, self.prompt_length - 1) if asked else range(0)

    @property
    def drafted(self) -> bool:
        """True if drafts are allowed for it."""
        return self.options.max_nodes != 0

    @property
    def pending(self) -> int:
        """Tokens that are not in the KV cache yet, the root included."""
        return len(self.tokens) - len(self.slots)

    @property
    def decoding(self) -> bool:
        """True if only the root is pending."""
        return self.pending == 1

    @property
    def generated(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - self.prompt_length

    def ended(self, token: int, left: int) -> str:
        """Return why the output ends with this token, or an empty text; `left` more tokens may follow."""
        if token in self.stop_token_ids:
            return "stop"
        return "length" if left <= 0 else ""

    @property
    def remaining_tokens(self) -> int:
        """Output tokens that may still come."""
        return self.parameters.max_tokens - self.generated

    def open(self) -> Replica:
        """Begin a new epoch, with a fresh replica."""
        self.epoch += 1
        root = root_name(self.number, self.epoch, len(self.tokens) - 1)
        self.replica = Replica(self.number, self.epoch, root, self.limit, self.vocabulary)
        return self.replica

    def opened(self, salted: bool = False) -> Open:
        """Return the `Open` message for a drafter, with the request's salt if `salted`; begin an epoch if there
        is no replica."""
        replica = self.replica if self.replica is not None else self.open()
        prompt, output = tuple(self.tokens.prompt), tuple(self.tokens.output)
        root = replica.tree.root.name
        salt = self.options.salt if salted else b""
        return Open(self.number, self.epoch, prompt, output, self.parameters, self.seed, root, salt)


@dataclass(frozen=True, slots=True)
class SharedPromptState:
    """State that the choices of a prompt share besides the prompt."""

    stop_token_ids: frozenset[int]
    overrides: LogitOverrides | None
    counts: TokenCounts | None
    """Counts of the prompt's tokens."""


def shared_state(message: Submit, eos: tuple[int, ...]) -> SharedPromptState:
    """Return the state that this request shares with other choices of its prompt."""
    parameters = message.parameters
    counted = () if parameters.ignore_eos else eos
    return SharedPromptState(
        frozenset((*parameters.stop_token_ids, *counted)),
        LogitOverrides(parameters, counted) if needs_overrides(parameters, 0) else None,
        TokenCounts(message.prompt) if needs_counts(parameters) else None,
    )


def create_request(
    message: Submit, shared: SharedPromptState, bounds: "RequestLimits", grammar: MatcherState | None = None
) -> Request:
    """Return the state of a request that was just submitted."""
    return Request(
        number=message.request,
        parameters=message.parameters,
        seed=message.seed,
        prompt_length=len(message.prompt),
        tokens=TokenSequence(message.prompt, message.output),
        stop_token_ids=shared.stop_token_ids,
        counts=shared.counts.fork(message.output) if shared.counts is not None else None,
        limit=bounds.tree_nodes,
        vocabulary=bounds.vocabulary,
        overrides=shared.overrides,
        grammar=grammar,
        scored=message.scored,
        options=message.options,
    )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Fixed bounds of the engine's requests. `context`: most tokens of prompt and output together;
    `tree_nodes`: most candidates in a replica."""

    context: int
    vocabulary: int
    eos: tuple[int, ...]
    tree_nodes: int

    def impossible(self, prompt: Sequence[int], max_tokens: int) -> tuple[str, str] | None:
        """Return an error and its field for an impossible prompt or `max_tokens`, else None."""
        if not prompt:
            return "the prompt is empty", "prompt"
        if not self.known(prompt):
            return self.unknown, "prompt"
        if len(prompt) + max_tokens > self.context:
            text = f"prompt ({len(prompt)} tokens) + max_tokens ({max_tokens})"
            return f"{text} exceed the context of {self.context} tokens", "max_tokens"
        if max_tokens < 1:
            return "max_tokens must be at least 1", "max_tokens"
        return None

    def known(self, tokens: Sequence[int]) -> bool:
        return not tokens or (min(tokens) >= 0 and max(tokens) < self.vocabulary)

    @property
    def unknown(self) -> str:
        """Error message for tokens outside the vocabulary."""
        return f"token ids must lie in 0..{self.vocabulary - 1}"
