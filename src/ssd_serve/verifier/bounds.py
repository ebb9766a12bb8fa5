"""What an engine can do at all for a request, whatever else is running."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Fixed bounds of the engine's requests. `context`: most tokens of prompt and output together;
    `tree_nodes`: most candidates in a replica."""

    context: int
    vocabulary: int
    eos: tuple[int, ...]
    tree_nodes: int

    def impossible(self, prompt: Sequence[int], max_tokens: int) -> tuple[str, str] | None:
        """What is wrong with a prompt and so many tokens behind it, and in which field."""
        if not prompt:
            return "the prompt is empty", "prompt"
        if not self.known(prompt):
            return self.unknown, "prompt"
        if len(prompt) + max_tokens > self.context:
            text = f"prompt ({len(prompt)} tokens) + max_tokens ({max_tokens})"
            return f"{text} exceed the context of {self.context} tokens", "max_tokens"
        if max_tokens < 1:
            return "max_tokens must be at least 1", "max_tokens"
        return None

    def known(self, tokens: Sequence[int]) -> bool:
        """Whether the vocabulary has all of them."""
        return not tokens or (min(tokens) >= 0 and max(tokens) < self.vocabulary)

    @property
    def unknown(self) -> str:
        """What is wrong with tokens that the vocabulary does not have."""
        return f"token ids must lie in 0..{self.vocabulary - 1}"
