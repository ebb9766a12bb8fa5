"""Hook of mkdocs: links to files outside docs/ become plain text, because the site has pages of docs/ only."""

import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_page: object) -> str:
    return _OUTSIDE.sub(r"\1 (`\2`)", markdown)
