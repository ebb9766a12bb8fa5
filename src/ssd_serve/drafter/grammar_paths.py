"""Which tokens may follow the nodes of trees whose texts must match a grammar.

The target chooses among these only, so other guesses are wasted. What is not known yet, as a grammar is
compiled beside the loop, is left open: losslessness never depends on it. Knows grammars and nodes; neither
models nor who is asked for guesses.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from ssd_serve.base.errors import GrammarError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.node import Node
from ssd_serve.drafter.sources.contract import Branch, NodeRequest
from ssd_serve.sampling.grammar import Grammars, Mask, MatcherState
from ssd_serve.sampling.thinking import output_state


class _Text:
    """An output that must match a grammar."""

    __slots__ = ("compiling", "output", "parameters", "state")

    def __init__(
        self, parameters: SamplingParameters, output: list[int], compiling: Future[None] | None
    ) -> None:
        self.parameters = parameters
        self.compiling = compiling
        self.output = output
        """Until there is a state."""
        self.state: MatcherState | None = None


class GrammarPaths:
    """Follows the outputs of open requests, by their numbers."""

    def __init__(self, grammars: Grammars, compiler: Executor | None = None) -> None:
        """`compiler` runs what takes long; None: a thread."""
        self._grammars = grammars
        self._compiler = compiler or ThreadPoolExecutor(1, thread_name_prefix="draft-grammars")
        self._texts: dict[int, _Text] = {}

    def open(self, request: int, parameters: SamplingParameters, output: Sequence[int]) -> None:
        """Begin with a request, or begin it again."""
        self.close(request)
        if parameters.grammar or parameters.thinking_budget:
            named = parameters.grammar
            compiling = self._compiler.submit(self._grammars.compile, named) if named else None
            self._texts[request] = _Text(parameters, list(output), compiling)

    def commit(self, request: int, tokens: Sequence[int]) -> None:
        """The output goes on."""
        text = self._texts.get(request)
        if text is None:
            return
        if text.state is None:
            text.output.extend(tokens)
        elif text.state.consume(tokens) < len(tokens):
            self.close(request)  # it is over, or takes too long to follow

    def close(self, request: int) -> None:
        """Forget a request; unknown ones are ignored."""
        self._texts.pop(request, None)

    def followed(self, picks: list[NodeRequest]) -> list[NodeRequest]:
        """The same picks, with what may follow them."""
        if not self._texts:
            return picks
        found = list(picks)
        places: dict[int, list[int]] = {}
        for place, pick in enumerate(picks):
            places.setdefault(pick.request, []).append(place)
        for request, own in places.items():
            state = self._state(request)
            if state is None:
                continue
            paths = _Paths()
            rows = [paths.row(picks[place].tokens) for place in own]
            masks = state.masks(paths.tokens, paths.parents, set(rows))
            for place, row in zip(own, rows, strict=True):
                found[place] = picks[place]._replace(allowed=masks[row])
        return found

    def branches(self, request: int, top: Node, branches: Sequence[Branch]) -> Sequence[Branch]:
        """Of a subtree below a node, what can come."""
        state = self._state(request)
        if state is None:
            return branches
        above = NodeRequest(request, top).tokens
        paths = _Paths()
        rows = [paths.row([*above, *branch.path]) for branch in branches]
        masks = state.masks(paths.tokens, paths.parents, set(rows))
        return [
            branch._replace(tokens=tokens, log_probabilities=values)
            for branch, row in zip(branches, rows, strict=True)
            for tokens, values in [only(masks[row], branch.tokens, branch.log_probabilities)]
        ]

    def _state(self, request: int) -> MatcherState | None:
        """Where a request's output stands, once that is known."""
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
    """A tree of paths, as `GrammarState.masks` reads it. Row 0 is where they begin."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._rows: dict[tuple[int, int], int] = {}

    def row(self, tokens: Sequence[int]) -> int:
        """The row behind these tokens."""
        here = 0
        for token in tokens:
            row = self._rows.get((here, token))
            if row is None:
                self.tokens.append(token)
                self.parents.append(here - 1)
                row = self._rows[here, token] = len(self.tokens)
            here = row
        return here


def only(allowed: Mask, tokens: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """The tokens that a mask allows, with their values."""
    kept = [place for place, token in enumerate(tokens) if int(allowed[token >> 5]) >> (token & 31) & 1]
    return [tokens[place] for place in kept], [values[place] for place in kept]
