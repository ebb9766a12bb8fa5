"""Shapes of messages belong to a protocol version, which refuses processes of other versions."""

import ast
import hashlib
import inspect
from types import ModuleType

from ssd_serve.base import draft_messages, messages

SHAPES = {5: "aa392d55cccfe365", 6: "0ad3ce217928ac00", 7: "63b096b7ac1df0af"}
"""Digest of all messages by protocol version. Another shape needs another version, and its line here."""


def _statements(module: ModuleType) -> list[ast.stmt]:
    return ast.parse(inspect.getsource(module)).body


def shape() -> str:
    """Names and types of all fields of all messages, without words and defaults, in short."""
    lines: list[str] = []
    for node in (node for module in (messages, draft_messages) for node in _statements(module)):
        if isinstance(node, ast.ClassDef):
            lines.append(node.name)
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            lines += [f"{ast.unparse(each.target)}: {ast.unparse(each.annotation)}" for each in fields]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def test_messages_of_another_shape_have_another_version() -> None:
    assert {draft_messages.PROTOCOL_VERSION: shape()}.items() <= SHAPES.items(), (
        "raise PROTOCOL_VERSION unless it was raised since the last release, and write down the new shape"
    )
