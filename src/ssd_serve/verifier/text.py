"""A request's text: the prompt, which choices share, and the output behind it. Knows nothing else."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import overload


class RequestText(Sequence[int]):
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
        if isinstance(other, RequestText | list | tuple):
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
