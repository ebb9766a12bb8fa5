"""Requests of the load benchmarks: prompts of many lengths, some of which begin alike. Knows prompts and
lengths, not servers."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.bench.load.client import Wanted
from ssd_serve.bench.load.trace import Arrival
from ssd_serve.bench.prompts import Prompt, held_out_prompts
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.settings import EMBEDDED

_PREFIXES = 4


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests are like: prompts of `shortest` to `longest` tokens (evenly on a logarithmic scale), and
    `tokens` new ones.

    A share `shared` of the prompts begins with one of a few texts of `prefix` tokens, or as much of it as is
    half of the prompt.
    """

    shortest: int
    longest: int
    tokens: int
    shared: float = 0.0
    prefix: int = 256


def held_out_texts(name: str, count: int, mix: Mix) -> list[str]:
    """Prompts as texts, for servers with any tokenizer; lengths are in the embedded pair's tokens."""
    folder = resolve_model(EMBEDDED, "target")
    tokenizer = Tokenizer(folder)
    maker = RequestMaker(held_out_prompts(folder, tokenizer, mix.longest))
    return [tokenizer.decode(maker.prompt(f"{name}:{index}", index, mix)) for index in range(count)]


class RequestMaker:
    """Makes requests from held-out prompts: the same ones for every mode, and no two alike."""

    def __init__(self, pool: Sequence[Prompt]) -> None:
        self._pool = pool

    def burst(self, name: str, count: int, mix: Mix) -> list[Wanted]:
        """Requests of one burst; texts, lengths and seeds follow from its name."""
        start = _number(name)
        return [
            Wanted(self.prompt(own, start + index, mix), mix.tokens, _number(own))
            for index, own in enumerate(f"{name}:{number}" for number in range(count))
        ]

    def replay(self, arrivals: Sequence[Arrival]) -> list[Wanted]:
        """Requests of a trace: held-out prefixes one after another, cut at the wanted length."""
        return [
            Wanted(
                self._text(_number(f"trace:{index}"), arrival.context_tokens),
                arrival.generated_tokens,
                _number(f"trace-seed:{index}"),
                arrival.at_s,
            )
            for index, arrival in enumerate(arrivals)
        ]

    def prompt(self, name: str, start: int, mix: Mix) -> tuple[int, ...]:
        """One prompt of the mix, from the text at `start` on; its length follows from its name."""
        length = round(mix.shortest * (mix.longest / mix.shortest) ** _share(f"length:{name}"))
        begin: tuple[int, ...] = ()
        if _share(f"shared:{name}") < mix.shared:
            begin = self._text(_number(f"prefix:{start % _PREFIXES}"), min(mix.prefix, length // 2))
        return begin + self._text(start, length - len(begin))

    def _text(self, start: int, length: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while len(tokens) < length:
            tokens.extend(self._pool[start % len(self._pool)].tokens)
            start += 1
        return tuple(tokens[-length:]) if length else ()


def _share(name: str) -> float:
    """Between 0 and 1, from the name."""
    return _number(name) / 2**32


def _number(name: str) -> int:
    """32 bits that follow from the name."""
    return int.from_bytes(hashlib.sha256(f"load:{name}".encode()).digest()[:4], "big")
