"""Tables of results: in Markdown for documents, aligned for terminals. Knows text, not what was measured."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_WIDTH = 200
"""Wider than any of our tables: neither a narrow terminal nor a pipe may cut figures off."""


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A row a line. By hand, because rich pads every cell: one longer name would change all lines of a
    document."""
    return "\n".join([_line(head), "|" + "---|" * len(head), *map(_line, rows)])


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def text_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns, figures to the right."""
    body = [[str(cell) for cell in cells] for cells in rows]
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(head):
        figures = all(cells[place][:1] in "+-0123456789" for cells in body)
        table.add_column(name, justify="right" if figures else "left", no_wrap=True)
    for cells in body:
        table.add_row(*cells)
    console = Console(width=_WIDTH, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
