"""Result files and blocks of documents: read as they are, replaced between markers, refused with a reason."""

from pathlib import Path

import msgspec
import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.bench.document import read_as, read_json, replace_block, show


class Speeds(msgspec.Struct, frozen=True):
    tokens_per_s: list[float]


def test_a_result_is_read_as_its_type(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text('{"tokens_per_s": [1.5], "other": 3}', encoding="utf-8")
    assert read_as(Speeds, read_json(file, "ssd bench modes"), "ssd bench modes") == Speeds([1.5])


def test_what_is_no_result_is_refused_with_the_benchmarks_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_json(tmp_path / "none.json", "ssd bench modes")
    (tmp_path / "text.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(UserError, match="not a result of `ssd bench modes`"):
        read_json(tmp_path / "text.json", "ssd bench modes")
    with pytest.raises(UserError, match=r"not a result of `ssd bench modes`: .*tokens_per_s"):
        read_as(Speeds, {}, "ssd bench modes")


def test_a_block_is_replaced_between_its_markers_and_nothing_else(tmp_path: Path) -> None:
    document, begin, end = tmp_path / "page.md", "<!-- load:begin -->", "<!-- load:end -->"
    document.write_text(f"a\n{begin}\nold\n{end}\nz\n", encoding="utf-8")
    for _ in range(2):
        replace_block(document, "load", "new")
        assert document.read_text(encoding="utf-8") == f"a\n{begin}\n\nnew\n\n{end}\nz\n"
    for broken in ("a", begin, end):
        document.write_text(broken, encoding="utf-8")
        with pytest.raises(UserError, match=f"no block between {begin} and {end}"):
            replace_block(document, "load", "new")


def test_a_result_is_shown_as_text_or_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show({"a": 1}, None)
    assert capsys.readouterr().out == '{\n "a": 1\n}\n'
    show({"a": 1}, None, lambda _result: "a table")
    assert capsys.readouterr().out == "a table\n"
    show({"a": 1}, tmp_path / "new" / "result.json")
    assert capsys.readouterr().out == ""
    assert read_json(tmp_path / "new" / "result.json", "it") == {"a": 1}


def test_a_result_is_written_though_its_text_cannot_be_made(tmp_path: Path) -> None:
    def text(_result: object) -> str:
        raise UserError("not a result")

    with pytest.raises(UserError, match="not a result"):
        show({"a": 1}, tmp_path / "result.json", text)
    assert read_json(tmp_path / "result.json", "it") == {"a": 1}
