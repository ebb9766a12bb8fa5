"""Tests of the API keys file: line format, errors and reloading."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.base.errors import SettingsError
from ssd_serve.server.access.keys import Holder, Keyring, KeysFile, KnownKey, parse_keys, read_keys
from tests.server.test_rates import Clock

ANNA, BEN = "a" * 32, "b" * 32
WORD = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.chmod(0o600)
    new.replace(path)


def test_keys_file_line_format() -> None:
    text = f"""
    # who may come in
    anna  {ANNA}   # since May
    ben@example.org\t{BEN} tokens_per_minute=5000 requests_per_minute=60
    """
    assert parse_keys(text) == [
        KnownKey(ANNA, Holder("anna")),
        KnownKey(BEN, Holder("ben@example.org", 60, 5000)),
    ]


def test_keys_file_several_keys_of_one_name() -> None:
    found = parse_keys(f"anna {ANNA}\nanna {BEN}\n")
    assert {entry.holder for entry in found} == {Holder("anna")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no key in it"),
        ("# only words\n", "there is no key in it"),
        ("\nanna\n", "line 2: a line is: name key"),
        (f"an/na {ANNA}", "line 1: a name has"),
        (f"default {ANNA}", "that of SSD_API_KEY"),
        ("anna schlüssel-mit-umlaut", "ASCII"),
        (f"anna {ANNA} limit=5", "line 1: behind the key stand only"),
        (f"anna {ANNA} tokens_per_minute=0", "behind the key stand only"),
        (f"anna {ANNA} tokens_per_minute=-1", "behind the key stand only"),
        (f"anna {ANNA}\nben {ANNA}", "line 2: this key is that of anna already"),
        (f"anna {ANNA}\nanna {BEN} tokens_per_minute=5", "line 2: anna has other limits above"),
        ("\n".join(f"n{i} key-number-{i}" for i in range(1001)), "line 1001: more than 1000 keys"),
    ],
)
def test_keys_file_error_names_the_line_but_no_key(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        parse_keys(text)
    assert ANNA not in str(caught.value)
    assert BEN not in str(caught.value)


@given(st.lists(WORD, min_size=1, max_size=8, unique=True), WORD)
def test_keyring_finds_the_holder_of_a_key(keys: list[str], other: str) -> None:
    ring = Keyring([KnownKey(key, Holder(f"holder {number}")) for number, key in enumerate(keys)])
    for number, key in enumerate(keys):
        assert ring.holder(f" {key}\n".encode()) == Holder(f"holder {number}")
    if other not in keys:
        assert ring.holder(other.encode()) is None
    assert ring.holder(b"") is None


@pytest.mark.parametrize("content", [b"anna \xff\xfe", b"x" * (1024 * 1024 + 1)])
def test_invalid_keys_file_is_a_settings_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    for wrong in (path, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SettingsError, match="SSD_API_KEYS_FILE"):
            read_keys(wrong)


def test_keys_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(SettingsError, match="no file of keys"):
        read_keys(tmp_path / "keys")


def test_keys_file_is_reloaded_when_it_changes(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, f"anna {ANNA}")
    found = KeysFile(path, [], clock)
    write(path, f"anna {ANNA}\nben {BEN}")
    assert not found.changed()
    clock.now += 1
    assert found.changed()
    assert [entry.holder.name for entry in found.entries] == ["anna", "ben"]
    clock.now += 1
    assert not found.changed()


@pytest.mark.parametrize("content", ["", "anna", f"anna {ANNA} oops", None])
def test_invalid_keys_file_keeps_the_old_keys(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, f"anna {ANNA}")
    found = KeysFile(path, [], clock)
    if content is None:
        path.unlink()
    else:
        write(path, content)
    for _ in range(3):
        clock.now += 1
        assert not found.changed()
    assert found.entries == [KnownKey(ANNA, Holder("anna"))]
    (told,) = [record.getMessage() for record in caplog.records]
    assert "the old keys stay in force" in told
    assert ANNA not in told
    write(path, f"ben {BEN}")
    clock.now += 1
    assert found.changed()


def test_warnings_of_short_keys_and_readable_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    write(path, f"anna {ANNA}\nben sesame\n")
    path.chmod(0o644)
    KeysFile(path)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "the key of ben is shorter than 16 characters" in told[0]
    assert "every user of this machine may read" in told[1]
    assert "sesame" not in caplog.text
