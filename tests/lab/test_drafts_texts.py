"""Texts for drafts: what is copied, changed, listed and told."""

import json

from lab.drafts.texts import KINDS, prompt_of, prompts_of

FILE = "import os\n\n\ndef read_lines(path):\n    names = []\n    count = 0\n" + "".join(
    f"    names.append(path + '{place}' * {place})\n" for place in range(30)
)


def test_a_copy_begins_again_after_the_whole() -> None:
    prompt = prompt_of("copying", FILE)
    assert prompt is not None
    begun = "def read_lines(path):\n    names = []\n    count = 0\n"
    assert prompt.startswith(begun)
    assert prompt.endswith("\n\n" + begun)
    assert "import os" not in prompt


def test_an_edit_has_another_name_from_its_beginning_on() -> None:
    prompt = prompt_of("editing", FILE)
    assert prompt is not None
    first, _, second = prompt.rpartition("\n\n")
    assert "_value" not in first
    assert second.count("_value") >= 1


def test_data_goes_on_with_another_record() -> None:
    prompt = prompt_of("data", FILE)
    assert prompt is not None
    records = json.loads(prompt.removesuffix(",\n    {\n") + "\n]")
    assert [record["name"] for record in records][:3] == ["def", "read_lines", "path"]


def test_short_files_give_nothing_and_no_more_are_given_than_asked_for() -> None:
    assert all(prompt_of(kind, "def f():\n    pass\n") is None for kind in KINDS)
    assert all(prompt_of(kind, "x = 1\n" * 500) is None for kind in KINDS)
    assert len([*prompts_of("code", [FILE, "", FILE, FILE], 2)]) == 2


def test_prose_is_the_first_half_of_the_longest_comment() -> None:
    comment = [f"# This sentence number {place} is part of a long comment.\n" for place in range(10)]
    text = "# short\n\n" + "".join(comment) + "\n\n" + FILE
    assert prompt_of("prose", text) == "".join(comment[:5])
    assert prompt_of("prose", FILE) is None
