"""A stand-in for grammars: what may come next follows from the sum of the output."""

from collections.abc import Collection, Sequence

import numpy as np

from ssd_serve.base.errors import GrammarError
from ssd_serve.sampling.grammar import Grammars, GrammarState, Masks
from tests.fakes import EOS, VOCABULARY

WORDS = -(-VOCABULARY // 32)
TIRED = "tired"
"""A grammar that can be followed for a while only."""


def may_come(output: Sequence[int]) -> set[int]:
    some = {token for token in range(1, VOCABULARY) if (5 * token + sum(output)) % 3 == 0}
    return some | ({EOS} if len(output) > 6 else set())


class Counting(GrammarState):
    """Knows its whole output, so that nothing can be forgotten."""

    def __init__(self, output: Sequence[int], patience: int) -> None:
        self.output = list(output)
        self._patience = patience

    @property
    def error(self) -> str:
        return "too tired" if len(self.output) > self._patience else ""

    def consume(self, tokens: Sequence[int]) -> int:
        for place, token in enumerate(tokens):
            if token not in may_come(self.output):
                return place
            self.output.append(token)
        return len(tokens)

    def masks(
        self,
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        wanted: Collection[int] | None = None,
    ) -> Masks:
        outputs = [self.output]
        for token, parent in zip(tokens, parents, strict=True):
            outputs.append([*outputs[1 + parent], token])
        masks = np.zeros((len(outputs), WORDS), dtype=np.uint32)
        for mask, output in zip(masks, outputs, strict=True):
            for token in may_come(output):
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        return masks.view(np.int32)


class CountingGrammars(Grammars):
    def __init__(self) -> None:
        super().__init__(str, VOCABULARY, (EOS,))

    def compile(self, grammar: str) -> None:
        if grammar == "wrong":
            raise GrammarError("this is no grammar")

    def start(self, grammar: str, output: Sequence[int] = ()) -> GrammarState:
        self.compile(grammar)
        state = Counting((), patience=9 if grammar == TIRED else 1000)
        if state.consume(output) < len(output):
            raise GrammarError("the output so far does not match")
        return state
