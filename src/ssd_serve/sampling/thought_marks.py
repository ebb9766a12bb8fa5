"""Marks that stand around what a model thinks, as Qwen 3 and DeepSeek write them."""

from collections.abc import Callable, Sequence

from ssd_serve.base.messages import ThinkingBudget

BEGIN, END = "<think>", "</think>"


def begins_in_thought(prompt: str) -> bool:
    """Whether a prompt leaves the model thinking."""
    return prompt.rfind(BEGIN) > prompt.rfind(END)


def budget_of(most: int, thinking: bool, encode: Callable[[str], Sequence[int]]) -> ThinkingBudget:
    """At most so many tokens of thoughts, for an output that begins among them (`thinking`) or not. `encode`
    makes tokens of a mark."""
    return ThinkingBudget(most, () if thinking else tuple(encode(BEGIN)), tuple(encode(END)))
