"""Thinking budget: after this number of tokens only the end mark of the thoughts is allowed.

A budget acts as a grammar, alone or in front of another one. The marks are those of Qwen 3 and DeepSeek.
This module knows tokens, no templates.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from ssd_serve.base.errors import GrammarError
from ssd_serve.base.messages import SamplingParameters, ThinkingBudget
from ssd_serve.sampling.grammar import ANY, Grammars, Mask, Masks, MatcherState


class _Position(NamedTuple):
    """Position of a text. `seen`: number of tokens of the expected mark that came last."""

    tokens: int = 0
    begun: bool = False
    over: bool = False
    seen: int = 0


class ThinkingState:
    """Position of one output in its thoughts, and in the grammar that follows them; see `MatcherState`."""

    def __init__(self, budget: ThinkingBudget, words: int, inner: MatcherState | None = None) -> None:
        """`words`: mask words of a row; `inner`: a grammar that the output must match too."""
        self._budget = budget
        self._words = words
        self._inner = inner
        self._position = _Position(begun=not budget.begin)

    def copy(self) -> "ThinkingState":
        other = ThinkingState(self._budget, self._words, self._inner and self._inner.copy())
        other._position = self._position
        return other

    @property
    def error(self) -> str:
        return self._inner.error if self._inner is not None else ""

    def consume(self, tokens: Sequence[int]) -> int:
        allowed = len(tokens) if self._inner is None else self._inner.consume(tokens)
        for index, token in enumerate(tokens[:allowed]):
            if self._forced(self._position) not in (None, token):
                return index
            self._position = self._next(self._position, token)
        return allowed

    def masks(
        self,
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        wanted: Collection[int] | None = None,
    ) -> Masks:
        if self._inner is None:
            masks = np.full((1 + len(tokens), self._words), ANY, dtype=np.int32)
        else:
            masks = self._inner.masks(tokens, parents, wanted)
        positions = [self._position]
        for token, parent in zip(tokens, parents, strict=True):
            positions.append(self._next(positions[1 + parent], token))
        for row, position in enumerate(positions):
            forced = self._forced(position)
            if forced is not None:
                _allow_only(masks[row], forced)
        return masks

    def _forced(self, position: _Position) -> int | None:
        """The only token allowed; None: no restriction."""
        if position.over or not position.begun or position.tokens < self._budget.tokens:
            return None
        return self._budget.end[position.seen]

    def _next(self, position: _Position, token: int) -> _Position:
        if position.over:
            return position
        mark = self._budget.end if position.begun else self._budget.begin
        seen = position.seen + 1 if token == mark[position.seen] else int(token == mark[0])
        if not position.begun:
            if seen <= position.seen:  # no thinking
                return position._replace(over=True)
            return _Position(begun=seen == len(mark), seen=seen % len(mark))
        return _Position(position.tokens + 1, True, seen == len(mark), seen % len(mark))


def output_state(
    parameters: SamplingParameters, output: Sequence[int], vocabulary: int, grammars: Grammars | None
) -> MatcherState | None:
    """Matcher state after `output`; None without grammar and budget. Raises `GrammarError` if the grammar
    does not compile or match."""
    budget, inner = parameters.thinking_budget, None
    if parameters.grammar:
        if grammars is None:
            raise GrammarError("this engine follows no grammars")
        inner = grammars.start(parameters.grammar, () if budget else output)
    if budget is None:
        return inner
    state = ThinkingState(budget, -(-vocabulary // 32), inner)
    if state.consume(output) < len(output):
        raise GrammarError("the output so far does not match")
    return state


def _allow_only(mask: Mask, token: int) -> None:
    mask[:] = 0
    mask.view(np.uint32)[token >> 5] = 1 << (token & 31)


BEGIN, END = "<think>", "</think>"


def starts_in_thinking(prompt: str) -> bool:
    """True if the prompt ends inside the model's thoughts."""
    return prompt.rfind(BEGIN) > prompt.rfind(END)


def make_thinking_budget(most: int, thinking: bool, encode: Callable[[str], Sequence[int]]) -> ThinkingBudget:
    """Budget of `most` thinking tokens, for an output that begins inside the thoughts (`thinking`) or not.
    `encode` tokenizes a mark."""
    return ThinkingBudget(most, () if thinking else tuple(encode(BEGIN)), tuple(encode(END)))
