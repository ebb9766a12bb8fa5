"""Requests of the load benchmarks: prompts of many lengths, some of which begin alike. Knows prompts and
lengths, not servers."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ssd_serve.base.engine_settings import EMBEDDED
from ssd_serve.bench.load.client import LoadRequest
from ssd_serve.bench.load.trace import Arrival
from ssd_serve.bench.prompts import Prompt, held_out_prompts
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer

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


Candidates = Callable[[int], LoadRequest]
"""The n-th request of those that can be sent in the same place: another text of the same length."""


def held_out_texts(name: str, count: int, mix: Mix) -> list[str]:
    """Prompts as texts, for servers with any tokenizer; lengths are in the embedded pair's tokens."""
    folder = resolve_model(EMBEDDED, "target")
    tokenizer = Tokenizer(folder)
    maker = RequestMaker(held_out_prompts(folder, tokenizer, mix.longest))
    return [tokenizer.decode(maker.prompt(f"{name}:{index}", index, mix).tokens) for index in range(count)]


class RequestMaker:
    """Makes requests from held-out prompts: the same ones for every mode, and no two alike."""

    def __init__(self, pool: Sequence[Prompt]) -> None:
        self._pool = pool

    def burst(self, name: str, count: int, mix: Mix) -> list[LoadRequest]:
        """The first candidates."""
        return [candidates(0) for candidates in self.candidates(name, count, mix)]

    def candidates(self, name: str, count: int, mix: Mix) -> list[Candidates]:
        """Requests of one burst; texts, lengths and seeds follow from its name."""
        start = _number(name)
        return [partial(self._request, f"{name}:{index}", start + index, mix) for index in range(count)]

    def replay(self, arrivals: Sequence[Arrival]) -> list[Candidates]:
        """Requests of a trace: held-out prefixes one after another, cut at the wanted length."""
        return [partial(self._arriving, f"trace:{index}", arrival) for index, arrival in enumerate(arrivals)]

    def prompt(self, name: str, start: int, mix: Mix, attempt: int = 0) -> Prompt:
        """One prompt of the mix, in the first attempt from the text at `start` on; its length follows from
        its name."""
        length = round(mix.shortest * (mix.longest / mix.shortest) ** _share(f"length:{name}"))
        begin: tuple[int, ...] = ()
        if _share(f"shared:{name}") < mix.shared:
            begin, _ = self._text(_number(f"prefix:{start % _PREFIXES}"), min(mix.prefix, length // 2))
        own = _attempt(name, attempt)
        rest, path = self._text(_number(own) if attempt else start, length - len(begin))
        return Prompt(path, begin + rest, _number(own))

    def _request(self, name: str, start: int, mix: Mix, attempt: int) -> LoadRequest:
        prompt = self.prompt(name, start, mix, attempt)
        return LoadRequest(prompt.tokens, mix.tokens, prompt.seed, path=prompt.path)

    def _arriving(self, name: str, arrival: Arrival, attempt: int) -> LoadRequest:
        own = _attempt(name, attempt)
        text, path = self._text(_number(own), arrival.context_tokens)
        return LoadRequest(text, arrival.generated_tokens, _number(f"seed:{own}"), arrival.at_s, path)

    def _text(self, start: int, length: int) -> tuple[tuple[int, ...], str]:
        """So many tokens, and the file that they end in."""
        tokens: list[int] = []
        path = ""
        while len(tokens) < length:
            place = self._pool[start % len(self._pool)]
            tokens.extend(place.tokens)
            path, start = place.path, start + 1
        return tuple(tokens[-length:]) if length else (), path


def _attempt(name: str, attempt: int) -> str:
    return f"{name}:{attempt}" if attempt else name


def _share(name: str) -> float:
    """Between 0 and 1, from the name."""
    return _number(name) / 2**32


def _number(name: str) -> int:
    """32 bits that follow from the name."""
    return int.from_bytes(hashlib.sha256(f"load:{name}".encode()).digest()[:4], "big")
