"""Grammars: the tokens that may follow, as a mask for each row of a request's tree.

A node's mask is that of its own path: the matcher of each node is a copy of its parent's, so that nothing is
matched twice. Matching is llguidance's, an optional dependency. This module knows tokens and grammar text;
no logits and no requests.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ssd_serve.base.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Masks = npt.NDArray[np.int32]
"""int32 [rows, vocabulary / 32, rounded up]: bit `token % 32` of word `token // 32` is set if the token is
allowed."""

Mask = npt.NDArray[np.int32]
"""A single row of `Masks`."""

_MAX_RULES = 1_500
"""Rules of a grammar: the compiler recurses along chains of rules, and its stack fits somewhat more."""
_MAX_DEPTH = 1_000
"""Nesting of a schema, if each reference led to one as deep as the whole schema."""
_MAX_ERROR_CHARACTERS = 400
"""Characters of an error message; the library repeats the whole grammar in it."""
_CACHE_SIZE = 64
"""Compiled grammars in the cache; the least recently used is dropped."""
ANY = -1
"""A mask word that allows all of its tokens."""


class MatcherState(Protocol):
    """Position of one output in the format that it must match."""

    def copy(self) -> "MatcherState":
        """An independent copy."""
        ...

    @property
    def error(self) -> str:
        """Reason why matching cannot continue; empty if it can."""
        ...

    def consume(self, tokens: Sequence[int]) -> int:
        """Advance by output tokens; returns how many of them matched."""
        ...

    def masks(
        self,
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        wanted: Collection[int] | None = None,
    ) -> Masks:
        """Masks of the next token, and of the token after each node of a tree below it.

        `parents` are indices among the nodes, parents first, -1 for the first row. A node that is not
        allowed itself gets a mask that allows everything: it cannot be accepted. `wanted`: the rows to
        compute, 0 being the first; None: all rows.
        """
        ...


class GrammarState:
    """Position of one output in its grammar; see `MatcherState`."""

    def __init__(self, matcher: "LLMatcher", words: int, ends: Collection[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._stop_tokens = ends
        self._failed: dict[tuple[int, ...], str] = {}
        """Paths of the last tree for which no mask could be computed, with the reason."""
        self._error = ""

    def copy(self) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy(), self._words, self._stop_tokens)

    @property
    def error(self) -> str:
        return self._error or self._matcher.get_error()

    def consume(self, tokens: Sequence[int]) -> int:
        """Advance by output tokens; returns how many matched. The token that ends the text counts as
        matched."""
        if self._failed:
            paths = (tuple(tokens[:length]) for length in range(1, len(tokens)))
            self._error = next((self._failed[path] for path in paths if path in self._failed), "")
        taken = self._matcher.try_consume_tokens(list(tokens))
        if taken == len(tokens) - 1 and tokens[taken] in self._stop_tokens and self._matcher.is_accepting():
            return taken + 1  # a matcher that is at its end takes no more, not even that
        return taken

    def masks(
        self,
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        wanted: Collection[int] | None = None,
    ) -> Masks:
        masks = np.full((1 + len(tokens), self._words), ANY, dtype=np.int32)
        # Each node has a matcher of its own: one that was rolled back may answer with another path's mask.
        matchers: list[LLMatcher | None] = [self._matcher, *[None] * len(tokens)]
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
            above = matchers[1 + parent]
            if above is not None:
                here = above.deep_copy()
                matchers[node] = here if here.try_consume_tokens([token]) else None
        self._failed.clear()
        for row, matcher in enumerate(matchers):
            if matcher is not None and (wanted is None or row in wanted):
                matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
                if row and matcher.is_error():
                    self._failed[_path(row - 1, tokens, parents)] = matcher.get_error()
        return masks


def _path(node: int, tokens: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    while node >= 0:
        found.append(tokens[node])
        node = parents[node]
    return tuple(reversed(found))


class Grammars:
    """Compiles and caches grammars for one model. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], str], vocabulary: int, ends: Sequence[int]) -> None:
        """`tokenizer` returns the content of tokenizer.json. `vocabulary` counts the model's ids, perhaps
        more than the tokenizer's. `ends` are the tokens allowed where a text may end."""
        self._tokenizer_json = tokenizer
        self.vocabulary = vocabulary
        self._stop_tokens = list(ends)
        self._tokenizer: LLTokenizer | None = None
        self._compiled_states: OrderedDict[str, GrammarState] = OrderedDict()
        self._lock = Lock()

    def prepare(self) -> None:
        """Load the tokenizer if llguidance is installed: a large one blocks all threads for half a second,
        too long for the first request."""
        if find_spec("llguidance") is not None:
            self._loaded()
            self._tokenizer_json = str  # frees the tokenizer: nobody asks for its JSON again

    def start(self, grammar: str, output: Sequence[int] = ()) -> GrammarState:
        """Matcher state after `output`. Raises `GrammarError` if the grammar does not compile, does not
        match the output, or llguidance is missing."""
        state = self._state(grammar).copy()
        if state.consume(output) < len(output):
            raise GrammarError("the output so far does not match the grammar")
        return state

    def _state(self, grammar: str) -> GrammarState:
        self.compile(grammar)
        with self._lock:
            known = self._compiled_states.get(grammar)
        return known or self._compiled(grammar)  # others may have come since

    def is_compiled(self, grammar: str) -> bool:
        """True if the compiled grammar is in the cache, where it becomes the most recently used."""
        with self._lock:
            known = grammar in self._compiled_states
            if known:
                self._compiled_states.move_to_end(grammar)
            return known

    def compile(self, grammar: str) -> None:
        """Compile into the cache, which may take some milliseconds. Raises as `start` does."""
        if self.is_compiled(grammar):
            return
        state = self._compiled(grammar)
        with self._lock:
            self._compiled_states[grammar] = state
            while len(self._compiled_states) > _CACHE_SIZE:
                self._compiled_states.popitem(last=False)

    def _loaded(self) -> "LLTokenizer":
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            self._tokenizer = LLTokenizer(
                self._tokenizer_json(), n_vocab=self.vocabulary, eos_token=self._stop_tokens or None
            )
        return self._tokenizer

    def _compiled(self, grammar: str) -> GrammarState:
        _require_llguidance()
        _check_depth(grammar)
        from llguidance import LLMatcher

        matcher = LLMatcher(self._loaded(), grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(_user_message(matcher.get_error()))
        state = GrammarState(matcher, -(-self.vocabulary // 32), self._stop_tokens)
        state.masks()
        if state.error:
            raise GrammarError("no text matches it")
        return state


def check_grammar(grammar: str) -> None:
    """Validate a grammar without a tokenizer. Raises as `Grammars.start` does."""
    _require_llguidance()
    _check_depth(grammar)
    from llguidance import LLMatcher

    message = LLMatcher.validate_grammar(grammar, limits=_limits())
    if message:
        raise GrammarError(_user_message(message))


def _user_message(message: str) -> str:
    """Replace library messages that name internal settings by an advice for users."""
    if "limits." in message or "fuel" in message:
        return (
            "following it takes too long; make it smaller, with fewer parts that may be left out or repeated"
        )
    if "coerce_one_of" in message:
        return "oneOf whose cases might match the same text; write anyOf instead"
    return message if len(message) <= _MAX_ERROR_CHARACTERS else f"{message[:_MAX_ERROR_CHARACTERS]} ..."


def _check_depth(grammar: str) -> None:
    """Raise if the compiler could overflow the stack, which would end this process."""
    depth = deepest = 0
    for sign in grammar:
        depth += (sign in "{[(") - (sign in ")]}")
        deepest = max(deepest, depth)
    references = grammar.count("$ref")
    if (1 + references) * deepest > _MAX_DEPTH:
        raise GrammarError(
            f"{deepest} levels of brackets, {references} references ($ref): too deeply nested, as each "
            "reference may lead to all of them"
        )
    try:
        parts = json.loads(grammar)["grammars"]
        rules = sum(part.get("lark_grammar", "").count(":") for part in parts)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise GrammarError("no grammar as llguidance reads it") from None
    if rules > _MAX_RULES:
        raise GrammarError(f"{rules} rules, or colons; at most {_MAX_RULES} are allowed")


def _limits() -> "LLParserLimits":
    """Bounds of the work for compiling a grammar and for each token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=200_000,  # about 14 ms
        step_max_items=10_000,  # half a millisecond
        max_lexer_states=50_000,  # about 75 MB
        max_grammar_size=5_000,
        verbose_errors=False,
    )


def _require_llguidance() -> None:
    if find_spec("llguidance") is None:
        raise GrammarError(
            "structured output needs llguidance where the server runs: pip install 'ssd-serve[structured]'"
        )


GrammarPart = dict[str, object]
"""A grammar as llguidance reads it."""
ANY_OBJECT: Mapping[str, object] = {"type": "object"}
"""The schema of JSON objects."""
_WHITE_SPACE = r" ?(\n[ \t]{0,24})?"
"""White space between the parts of JSON: a blank, or a line break and an indent. Weak models would write
nothing else."""


def from_json_schema(schema: Mapping[str, object], compact: bool = False) -> GrammarPart:
    """Grammar of JSON that matches a schema; `compact`: no white space between its parts."""
    spaces = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITE_SPACE}
    given = schema.get("x-guidance")
    own: Mapping[str, object] = given if isinstance(given, dict) else {}
    return {"json_schema": {**schema, "x-guidance": {**spaces, **own}}}


def from_regex(regex: str) -> GrammarPart:
    """Grammar of texts that match a whole regular expression."""
    found, escaped = list[str](), False
    for sign in regex:  # slashes end an expression in Lark
        found.append("\\/" if sign == "/" and not escaped else sign)
        escaped = sign == "\\" and not escaped
    return from_lark(f"start: /{''.join(found)}/")


def from_choices(texts: Sequence[str]) -> GrammarPart:
    """Grammar that allows exactly these texts."""
    return from_lark(f"start: {' | '.join(map(json.dumps, texts))}")


def from_rules(rules: str) -> GrammarPart:
    """Grammar from Lark, as llguidance reads it, or GBNF. Raises `GrammarError`."""
    if "::=" not in rules:
        return from_lark(rules)
    try:
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
    except ImportError:
        return from_lark(rules)  # the check reports the missing package
    try:
        return from_lark(gbnf_to_lark(rules))
    except (GbnfToLarkError, RecursionError) as error:
        raise GrammarError(f"this GBNF cannot be read: {error}") from error


def from_lark(lark: str) -> GrammarPart:
    return {"lark_grammar": lark}


def named_part(name: str, part: GrammarPart) -> GrammarPart:
    """Name a grammar; others refer to it as `@name`."""
    return {"name": name, **part}


def serialize_parts(*parts: GrammarPart) -> str:
    """JSON of all parts; the first may refer to the others by name. Raises `GrammarError`."""
    try:
        return json.dumps({"grammars": parts})
    except RecursionError:
        raise GrammarError("too deeply nested") from None
