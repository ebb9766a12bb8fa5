"""Both libraries behind the same few calls. Knows their interfaces; measures nothing."""

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer as Backend

Schema = dict[str, Any]


class Matcher(Protocol):
    """Follows one text."""

    def fill(self, row: torch.Tensor) -> None:
        """Write what may come next into int32 [words]."""
        ...

    def accept(self, token: int) -> bool:
        """The text goes on, if it may."""
        ...

    def back(self, count: int) -> None:
        """Take tokens back."""
        ...


class Library(Protocol):
    """Compiles schemas for one tokenizer."""

    def begin(self, schema: Schema) -> Matcher:
        """Compile it and begin. Raises `ValueError` or `RuntimeError` for what it does not like."""
        ...


class _WithLlguidance:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, row: torch.Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), 4 * len(row))

    def accept(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]))

    def back(self, count: int) -> None:
        self._matcher.rollback(count)


class Llguidance:
    """Its matchers."""

    def __init__(self, tokenizer: Backend, end: int) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=end)

    def begin(self, schema: Schema) -> Matcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return _WithLlguidance(matcher)


class _WithXgrammar:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, row: torch.Tensor) -> None:
        self._matcher.fill_next_token_bitmask(row[None], 0)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def back(self, count: int) -> None:
        self._matcher.rollback(count)


class Xgrammar:
    """Its matchers; nothing compiled before is kept, as every request may bring another schema."""

    def __init__(self, tokenizer: Backend, end: int) -> None:
        xgrammar: Any = import_module("xgrammar")  # nothing else of the project needs it
        self._xgrammar = xgrammar
        names = sorted(tokenizer.get_vocab(True).items(), key=lambda each: each[1])
        info = xgrammar.TokenizerInfo(
            [name for name, _ in names], xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[end]
        )
        self._compiler: Any = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def begin(self, schema: Schema) -> Matcher:
        compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=True)
        return _WithXgrammar(self._xgrammar.GrammarMatcher(compiled, max_rollback_tokens=64))


def allowed(row: torch.Tensor, vocabulary: int) -> Sequence[int]:
    """The tokens whose bits are set."""
    bits = np.unpackbits(row.numpy().view(np.uint8), count=vocabulary, bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found
