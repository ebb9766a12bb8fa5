"""Requests that wait until the grammar of their output is compiled, in a thread: rounds go on meanwhile.

Knows messages and grammars; nothing of the engine that takes them afterwards.
"""

from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor

from ssd_serve.base.messages import ServerMessage, Submit, SubmitChoices
from ssd_serve.sampling.grammar import Grammars


class HeldRequests:
    """Messages that the engine takes later, in the order in which they came. What they say of other requests
    does not wait."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._held: deque[tuple[ServerMessage, Future[None] | None]] = deque()
        self._numbers: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, message: ServerMessage) -> bool:
        """Whether this one waits: its grammar is compiled, or its request waits for that."""
        numbers, compiling = _numbers(message), None
        if isinstance(message, Submit | SubmitChoices):
            grammar = message.parameters.grammar
            if not grammar or self._grammars is None or self._grammars.is_compiled(grammar):
                return False
            compiling = self._thread.submit(self._grammars.compile, grammar)
        elif not any(self._numbers[number] for number in numbers):
            return False
        self._held.append((message, compiling))
        self._numbers.update(numbers)
        return True

    def released(self) -> list[ServerMessage]:
        """Those that need not wait any more. What could not be compiled is for the engine to refuse."""
        found: list[ServerMessage] = []
        while self._held and (self._held[0][1] is None or self._held[0][1].done()):
            message, _ = self._held.popleft()
            self._numbers.subtract(_numbers(message))
            found.append(message)
        self._numbers = +self._numbers
        return found


def _numbers(message: ServerMessage) -> list[int]:
    if isinstance(message, SubmitChoices):
        return [each.request for each in message.choices]
    return [message.request]
