"""A Jinja sandbox with limits on time, in seconds, and output, in characters.

Jinja's own sandbox keeps templates from Python's internals, but lets them loop forever and make texts of any
length. Here every loop, call, filter and operation checks the clock. The length of a text is estimated before
an operation that could make a long one. Knows nothing about chats.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, cast

from jinja2 import TemplateRuntimeError, nodes
from jinja2.environment import Template
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MAX_BITS = 4096
_MAX_NUMBER = 100_000
"""The largest number that a function may be given, such as a width."""
_MAX_INDENT = 256
_WIDE = re.compile(r"[0-9]{5}|\*")
"""Matches widths in a format that are too large, or that are read from an argument."""


class Budget:
    """Remaining time and characters of one rendering."""

    def __init__(self, seconds: float, characters: int) -> None:
        self._until = time.monotonic() + seconds
        self._characters = characters

    def tick(self) -> None:
        """Raise when the time is over."""
        if time.monotonic() > self._until:
            raise TemplateRuntimeError("it takes too long")

    def weigh(self, characters: int) -> None:
        """Raise when a text of this length is too long."""
        self.tick()
        if characters > self._characters:
            raise TemplateRuntimeError("its text grows too long")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. `compiled` once, then `rendered` with a budget each time."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, seconds: float, characters: int, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._max_characters = characters
        self._plain_filters = self.filters
        self._allow()

    def _allow(self) -> None:
        """A fresh budget; some constants are computed when a template is compiled."""
        self.budget = Budget(self._seconds, self._max_characters)
        self.filters = {name: self._bounded(name, work) for name, work in self._plain_filters.items()}

    def add_filter(self, name: str, work: Callable[..., Any]) -> None:
        """Let templates use another filter."""
        self._plain_filters[name] = work
        self._allow()

    def compiled(self, source: str) -> Any:
        """The template's code, to be rendered any number of times. Raises what is wrong with it."""
        self._allow()
        return self.compile(source)

    def rendered(self, code: Any, values: Mapping[str, object]) -> str:
        """Render once, within a budget of its own; several threads may render at a time."""
        mine = self.overlay()
        mine._allow()
        template = Template.from_code(mine, code, mine.make_globals(None))
        return mine.concat(template.generate(values))

    def concat(self, parts: Iterable[str]) -> str:
        """The text of some parts, unless it is too long."""
        found: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            self.budget.weigh(length)
            found.append(part)
        return "".join(found)

    def joined(self, *parts: object) -> str:
        """Join texts as the operator `~` does."""
        return self.concat(map(str, parts))

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop, checking the time."""
        for item in items:
            self.budget.tick()
            yield item

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Counting(self).visit(super()._parse(source, name, filename))
        return parsed

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Weigh what an operation would make."""
        self.budget.weigh(_product(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Weigh what a function would make."""
        plain = getattr(obj, "__wrapped__", obj)  # Jinja wraps `str.format`
        self._weigh_call(getattr(plain, "__name__", ""), getattr(plain, "__self__", None), args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def _weigh_call(self, name: str, value: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise where a method of a text, or a filter, would take or make too much."""
        given = [*args, *kwargs.values()]
        numbers = [abs(each) for each in given if isinstance(each, int)]
        most = _MAX_INDENT if name in ("indent", "expandtabs", "tojson") else _MAX_NUMBER
        self.budget.weigh(0)
        if any(number > most for number in numbers):
            raise TemplateRuntimeError(f"{name} is asked for too much")
        if isinstance(value, str) and name in ("format", "format_map"):
            self.budget.weigh(_formatted(value, given))
        elif isinstance(value, str) and name in ("center", "expandtabs", "indent"):
            self.budget.weigh(max([0, *numbers]) * (1 + value.count("\t") + value.count("\n")))
        elif isinstance(value, str) and name == "replace" and len(given) > 1:
            old, new = str(given[0]), str(given[1])
            self.budget.weigh(len(value) + value.count(old) * len(new))
        elif name == "join":
            self._weigh_join(value, given)

    def _weigh_join(self, value: object, given: list[Any]) -> None:
        items, separator = (given[:1], value) if isinstance(value, str) else ([value], (given or [""])[0])
        for many in items:
            if isinstance(many, list | tuple):
                total = sum(len(each) if isinstance(each, str) else 1 for each in many)
                self.budget.weigh(total + len(str(separator)) * len(many))

    def _bounded(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is weighed before and after."""
        passed = getattr(work, "jinja_pass_arg", None) is not None

        @wraps(work)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, *rest = args[passed:] or ("",)
            if name == "join" and isinstance(value, Iterator):
                value = list(self.counted(value))
                args = (*args[:passed], value, *rest)
            self._weigh_call(name, value, tuple(rest), kwargs)
            result = work(*args, **kwargs)
            self.budget.weigh(len(result) if isinstance(result, str) else 0)
            return result

        return bounded


def _product(operator: str, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        bits = {"**": left.bit_length() * abs(right), "*": left.bit_length() + right.bit_length()}
        if bits.get(operator, 0) > _MAX_BITS:
            raise TemplateRuntimeError("its numbers grow too large")
        return 0
    if operator == "*":
        times = next((each for each in (left, right) if isinstance(each, int)), 0)
        return max(0, times) * max(_length(left), _length(right))
    if operator == "%" and isinstance(left, str):
        return _formatted(left, right if isinstance(right, tuple) else [right])
    return _length(left) + _length(right)


def _formatted(text: str, values: Iterable[Any]) -> int:
    if _WIDE.search(text):
        raise TemplateRuntimeError("a format asks for too much")
    values = [
        each for value in values for each in (value.values() if isinstance(value, Mapping) else [value])
    ]
    longest = max([0, *(len(each) for each in values if isinstance(each, str))])
    return len(text) + (text.count("%") + text.count("{")) * longest


def _length(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, list | tuple) else 0


class _Counting(NodeTransformer):
    """Lets loops and the operator `~` ask the environment; templates cannot give those another meaning."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """The loop over counted items."""
        self.generic_visit(node)
        node.iter = self._asking("counted", [cast(nodes.Expr, node.iter)], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """The call that joins texts."""
        self.generic_visit(node)
        return self._asking("joined", node.nodes, node.lineno)

    def _asking(self, name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        asked = nodes.EnvironmentAttribute(name)
        call = nodes.Call(asked, arguments, [], None, None)
        for made in (asked, call):
            made.set_lineno(line)
            made.set_environment(self._environment)
        return call
