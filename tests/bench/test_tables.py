"""Tables keep every figure: in Markdown as they are, for terminals in columns."""

from ssd_serve.bench.tables import markdown_table, text_table


def test_markdown_has_a_row_a_line_and_nothing_is_padded() -> None:
    assert markdown_table(("a", "b"), [(1, "x | y"), ("", None)]) == (
        "| a | b |\n|---|---|\n| 1 | x | y |\n|  | None |"
    )


def test_columns_are_aligned_figures_to_the_right_and_nothing_is_cut_or_read_as_markup() -> None:
    long = "[bold]" + "x" * 120
    lines = text_table(("kind", "ms"), [("a", 1.5), (long, 120)]).splitlines()
    assert [line.split() for line in lines[1:]] == [["a", "1.5"], [long, "120"]]
    assert len({len(line) for line in lines}) == 1
