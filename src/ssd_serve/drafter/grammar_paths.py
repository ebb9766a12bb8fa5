"""The tokens that grammars allow after the nodes of a tree.

The target chooses among these only, so other candidates are wasted. A grammar is compiled in a thread; until
it is ready every token is allowed, since losslessness never depends on it. Knows grammars and nodes, not
sources.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from ssd_serve.base.errors import GrammarError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.drafter.sources.contract import Branch, NodeRequest
from ssd_serve.sampling.grammar import Grammars, Mask, MatcherState
from ssd_serve.sampling.thinking import output_state


class _Output:
    __slots__ = ("compiling", "output", "parameters", "state")

    def __init__(
        self, parameters: SamplingParameters, output: list[int], compiling: Future[None] | None
    ) -> None:
        self.parameters = parameters
        self.compiling = compiling
        self.output = output
        """Tokens until `state` is made."""
        self.state: MatcherState | None = None


class GrammarPaths:
    """Follows the outputs of open requests."""

    def __init__(self, grammars: Grammars, compiler: Executor | None = None) -> None:
        """`compiler` compiles grammars (default: one thread)."""
        self._grammars = grammars
        self._compiler = compiler or ThreadPoolExecutor(1, thread_name_prefix="draft-grammars")
        self._texts: dict[int, _Output] = {}

    def open(self, request: int, parameters: SamplingParameters, output: Sequence[int]) -> None:
        """Start a request, or restart it."""
        self.close(request)
        if parameters.grammar or parameters.thinking_budget:
            named = parameters.grammar
            compiling = self._compiler.submit(self._grammars.compile, named) if named else None
            self._texts[request] = _Output(parameters, list(output), compiling)

    def commit(self, request: int, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        text = self._texts.get(request)
        if text is None:
            return
        if text.state is None:
            text.output.extend(tokens)
        elif text.state.consume(tokens) < len(tokens):
            self.close(request)  # the output has ended, or takes too long to follow

    def close(self, request: int) -> None:
        """Free a request; unknown ones are ignored."""
        self._texts.pop(request, None)

    def with_allowed(self, requests: list[NodeRequest]) -> list[NodeRequest]:
        """The node requests with the tokens that are allowed after each node, if known."""
        if not self._texts:
            return requests
        found = list(requests)
        places: dict[int, list[int]] = {}
        for place, pick in enumerate(requests):
            places.setdefault(pick.request, []).append(place)
        for request, own in places.items():
            state = self._state(request)
            if state is None:
                continue
            paths = _Paths()
            rows = [paths.row(requests[place].tokens) for place in own]
            masks = state.masks(paths.tokens, paths.parents, set(rows))
            for place, row in zip(own, rows, strict=True):
                found[place] = requests[place]._replace(allowed=masks[row])
        return found

    def branches(self, request: int, above: Sequence[int], branches: Sequence[Branch]) -> Sequence[Branch]:
        """The branches of a subtree without forbidden candidates; `above`: the path from the root to its top."""
        state = self._state(request)
        if state is None:
            return branches
        paths = _Paths()
        rows = [paths.row([*above, *branch.path]) for branch in branches]
        masks = state.masks(paths.tokens, paths.parents, set(rows))
        return [_restricted(branch, masks[row]) for branch, row in zip(branches, rows, strict=True)]

    def _state(self, request: int) -> MatcherState | None:
        """The grammar state of a request; None while it is unknown or without a grammar."""
        text = self._texts.get(request)
        if text is None or (text.compiling is not None and not text.compiling.done()):
            return None
        if text.state is None:
            try:
                if text.compiling is not None:
                    text.compiling.result()
                vocabulary = self._grammars.vocabulary
                text.state = output_state(text.parameters, text.output, vocabulary, self._grammars)
            except GrammarError:
                self.close(request)
                return None
        return text.state


class _Paths:
    """A tree of paths in the layout of `OutputState.masks`; row 0 is its root."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._rows: dict[tuple[int, int], int] = {}

    def row(self, tokens: Sequence[int]) -> int:
        here = 0
        for token in tokens:
            row = self._rows.get((here, token))
            if row is None:
                self.tokens.append(token)
                self.parents.append(here - 1)
                row = self._rows[here, token] = len(self.tokens)
            here = row
        return here


def _restricted(branch: Branch, allowed: Mask) -> Branch:
    tokens, values = only(allowed, branch.tokens, branch.log_probabilities)
    scores = only(allowed, branch.tokens, branch.scores)[1] if branch.scores else ()
    return branch._replace(tokens=tokens, log_probabilities=values, scores=scores)


def only(allowed: Mask, tokens: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """The allowed tokens with their values."""
    kept = [place for place, token in enumerate(tokens) if int(allowed[token >> 5]) >> (token & 31) & 1]
    return [tokens[place] for place in kept], [values[place] for place in kept]
