"""A tokenizer that remembers what its chat template was given."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.server.fakes import ByteTokenizer


class TemplateReader(ByteTokenizer):
    def __init__(self, source: str = "") -> None:
        self.template = source
        self.entries: list[Mapping[str, Any]] = []
        self.variables: dict[str, Any] = {}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        /,
        **variables: object,
    ) -> str:
        self.entries += messages
        self.variables = variables
        return super().apply_chat_template(messages, add_generation_prompt, **variables)
