"""Drafters in the verifier's own process: a draft on its device for synchronous speculation, and lookup.

They have the channel interface of a drafter process. An inline draft step runs whenever the verifier waits. A
lookup needs hardly any time and replies at once, so the next round finds its draft tokens without waiting; it works
together with a drafter of any kind.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Close,
    DrafterMessage,
    Features,
    Growth,
    Heartbeat,
    Hello,
    Message,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.base.engine_config import SUFFIX, EngineConfig
from ssd_serve.base.names import as_label
from ssd_serve.base.seeds import mix
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.grammar_paths import GrammarPaths
from ssd_serve.drafter.sources.contract import Branch
from ssd_serve.drafter.sources.lookup import LEAST_REACH, MatchAccuracy, SharedHistory, TokenIndex, branches
from ssd_serve.drafter.step_time import StepTime
from ssd_serve.sampling.grammar import Grammars

if TYPE_CHECKING:
    import torch


class InProcessChannel(ABC):
    """The verifier's side of a channel to a drafter in the same thread, without a socket.

    Messages are processed one by one, and nothing is queued.
    """

    def __init__(self, hello: Hello) -> None:
        self._inbox: list[DrafterMessage] = [hello]
        self._closed = False

    @abstractmethod
    def handle(self, message: DrafterMessage) -> list[DrafterMessage]:
        """Process a message of the verifier; return the replies."""

    def send(self, message: Message) -> bool:
        """Process the message now; False if the channel is closed."""
        if isinstance(message, Open | Outcome | Features | Close | Resync | Pause):
            self._inbox += self.handle(message)
        return not self._closed

    def receive(self) -> list[Message]:
        """Messages of the drafter since the last call."""
        messages, self._inbox = self._inbox, []
        return list[Message](messages)

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for messages; False if there are none."""

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def pending(self) -> int:
        return 0

    def post(self, message: Message) -> bool:
        return self.send(message)

    def flush(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._closed = True


class InlineChannel(InProcessChannel):
    """A channel to a core with a draft model or head."""

    def __init__(
        self, core: DrafterCore, hello: Hello, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(hello)
        self._core = core
        self._clock = clock
        self._step_time = StepTime(hello.step_ms / 1e3)
        self.steps = 0

    def handle(self, message: DrafterMessage) -> list[DrafterMessage]:
        return self._core.handle(message)

    def give(self, message: Features, features: "torch.Tensor") -> bool:
        """Send features as they are, instead of as the message's bytes."""
        self._core.read(message, features)
        return not self._closed

    def wait(self, timeout_s: float) -> bool:
        """Run one draft step, unless messages are waiting."""
        del timeout_s
        if self._inbox:
            return True
        started = self._clock()
        growth = self.draft()
        self._inbox.extend(growth)
        if growth:
            self.steps += 1
            if not self._core.is_warmup_step:
                self._step_time.observe(self._clock() - started)
            self._inbox.append(Heartbeat(step_ms=1e3 * self._step_time.seconds, nodes=self._core.nodes))
        return bool(growth)

    def draft(self) -> list[Growth]:
        """Run one draft step, with all prefills before it."""
        growth = self._core.step()
        while not growth and self._core.prefilling:
            growth = self._core.step()
        return growth


_FAN_OUT = 4
Path = tuple[int, ...]
_Drafted = tuple[int, frozenset[int]]
"""The length of a match and the tokens that were drafted below it."""
_NOTHING: _Drafted = (0, frozenset())


@dataclass(slots=True)
class _LookedUp:
    """A request of a lookup; its last token is the root named `root`."""

    opening: Open
    text: TokenIndex
    root: int
    drafted: dict[Path, _Drafted] = field(default_factory=dict[Path, _Drafted])
    """By path from the root."""
    sequence: int = 0


class LookupChannel(InProcessChannel):
    """A channel to a lookup over its requests' tokens; the lookup itself runs in `receive`. No tree is kept here:
    only subtrees that the replica does not have yet are sent."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        verifier: Hello,
        ends: Collection[int],
        grammars: Grammars | None = None,
        price: Callable[[], float] | None = None,
    ) -> None:
        """`verifier` is the `Hello` of the verifier; `ends` are EOS ids. `price`: reach above which a node pays."""
        # A step time of 0 marks a source that needs no waiting.
        hello = replace(verifier, name=name, source=as_label(name), step_ms=0.0, prefill_ms=0.0)
        super().__init__(replace(hello, instance=secrets.randbits(63)))
        self._name = name
        self._history = (
            SharedHistory(config.suffix_shared) if name == SUFFIX and config.suffix_shared else None
        )
        self._accuracy = MatchAccuracy()
        self._fan_out = min(_FAN_OUT, config.draft_fan_out)
        self._depth = 2 * config.draft_depth  # chains without branches
        self._context = verifier.context
        self._ends = frozenset(ends)
        self._paths = None if grammars is None else GrammarPaths(grammars)
        self._price = price
        self._requests: dict[int, _LookedUp] = {}
        self._moved: dict[int, _LookedUp] = {}

    def handle(self, message: DrafterMessage) -> list[DrafterMessage]:
        """Follow the text of a request. Lookups have no use for the other messages."""
        if isinstance(message, Outcome):
            return self._outcome(message)
        if isinstance(message, Open):
            held = _LookedUp(message, TokenIndex(message.prompt + message.output), message.root)
            self._requests[message.request] = self._moved[message.request] = held
            if self._paths is not None:
                self._paths.open(message.request, message.parameters, message.output)
        elif isinstance(message, Close):
            self._close(message.request)
        elif isinstance(message, Resync) and message.request in self._requests:
            held = self._moved[message.request] = self._requests[message.request]
            held.drafted.clear()
        return []

    def receive(self) -> list[Message]:
        """Messages, with draft tokens of the requests that have moved since the last call."""
        found = [each for each in self._moved.values() if each.text.repeats or self._history is not None]
        if found:
            # Half of the price: accuracy and costs are estimates.
            least = LEAST_REACH if self._price is None else max(LEAST_REACH, min(0.5, self._price() / 2))
            for held in found:
                self._inbox += self._growth(held, least)
        self._moved.clear()
        return super().receive()

    def wait(self, timeout_s: float) -> bool:
        """True if there is anything to receive; waiting adds nothing."""
        del timeout_s
        return bool(self._inbox or self._moved)

    def _close(self, request: int) -> None:
        held = self._requests.pop(request, None)
        self._moved.pop(request, None)
        if held is not None and self._history is not None:
            self._history.add(held.opening.salt, held.text.tokens)
        if self._paths is not None:
            self._paths.close(request)

    def _outcome(self, message: Outcome) -> list[DrafterMessage]:
        held, tokens = self._requests.get(message.request), message.tokens
        if held is None or message.epoch != held.opening.epoch or message.position != len(held.text):
            return [Resync(message.request, message.epoch)]
        if held.drafted:
            self._observe(held, tokens)
        held.text.extend(tokens)
        held.root = message.root
        self._moved[message.request] = held
        if self._paths is not None:
            self._paths.commit(message.request, tokens)
        return []

    def _observe(self, held: _LookedUp, committed: Path) -> None:
        """Learn from the committed tokens, and keep what was drafted below them."""
        for length, token in enumerate(committed):
            shared, followers = held.drafted.get(committed[:length], _NOTHING)
            if not followers:
                break
            self._accuracy.observe(held.opening.parameters.temperature, shared, token in followers)
        past = len(committed)
        held.drafted = {
            found[past:]: guess for found, guess in held.drafted.items() if found[:past] == committed
        }

    def _growth(self, held: _LookedUp, least: float) -> list[Growth]:
        """The continuations of the longest matches, without what is drafted already; own tokens win ties against
        the history."""
        opening, text = held.opening, held.text
        end = min(len(opening.prompt) + opening.parameters.max_tokens - 1, self._context + 1)
        depth = min(self._depth, end - len(text))
        match = text.match(depth) if depth > 0 else None
        if self._history is not None and depth > 0:
            found = self._history.match(opening.salt, text.tokens, depth)
            if found is not None and (match is None or found.length > match.length):
                match = found
        if match is None:
            return []
        share = partial(self._accuracy.share, opening.parameters.temperature)
        subtree: Sequence[Branch] = branches(match, share, self._fan_out, depth, least)
        if self._paths is not None:
            subtree = self._paths.branches(opening.request, (), subtree)
        expansions = self._new(held, subtree, match.length)
        if not expansions:
            return []
        held.sequence += 1
        place = opening.request, opening.epoch, held.sequence - 1
        return [pack(*place, expansions, self._name, snapshot=False)]

    def _new(self, held: _LookedUp, subtree: Sequence[Branch], length: int) -> list[Expansion]:
        """Expansions of the branches that the replica does not have, parents first, none below an end of the text."""
        parameters, drafted = held.opening.parameters, held.drafted
        ends = frozenset(parameters.stop_token_ids)
        if not parameters.ignore_eos:
            ends |= self._ends
        names: dict[Path, int] = {(): held.root}
        made: list[Expansion] = []
        for path, tokens, values, *_ in subtree:
            parent, step = path[:-1], path[-1] if path else ROOT_STEP
            above = names.get(parent)
            if above is None or not tokens:
                continue
            if path:
                if step in ends or step not in drafted.get(parent, _NOTHING)[1]:
                    continue
                names[path] = mix(above, step)
            known = drafted.get(path, _NOTHING)[1]
            if not known.issuperset(tokens):
                drafted[path] = length + len(path), known.union(tokens)
                made.append(Expansion(above, step, tokens, values))
        return made
