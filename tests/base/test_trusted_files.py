"""Files that only this user can change, and the fallback if others can."""

import grp
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from ssd_serve.base import trusted_files
from ssd_serve.base.trusted_files import cache_folder, is_own_file, make_folder, open_lock, read_own, weakness

OTHER_USER = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder of this user's alone."""
    folder = tmp_path / "above" / "cache"
    make_folder(folder)
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_new_folders_are_private(mine: Path) -> None:
    previous = os.umask(0)
    try:
        make_folder(mine / "a" / "b")
    finally:
        os.umask(previous)
    assert [(mine / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]
    assert weakness(mine / "a" / "b") == ""


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702, 0o1777])
def test_folder_that_others_can_write_is_weak(mine: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted_files, "_is_private_group", lambda _number: False)
    mine.chmod(mode)
    assert weakness(mine) == f"others may write to {mine}"


def test_parent_folder_that_others_can_write_is_weak(mine: Path) -> None:
    mine.parent.chmod(0o777)
    assert weakness(mine) == f"others may write to {mine.parent}"
    mine.parent.chmod(0o1777)  # with the sticky bit they can add, not replace
    assert weakness(mine) == ""


def test_links_are_judged_by_their_target(mine: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(mine)
    assert weakness(link) == ""
    assert cache_folder(link) == mine
    mine.chmod(0o777)
    assert weakness(link) == f"others may write to {mine}"


def test_private_group_counts_as_this_user(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.chmod(0o775)
    user = type("User", (), {"pw_gid": mine.stat().st_gid, "pw_name": "me"})
    group = type("Group", (), {"gr_name": "me", "gr_mem": list[str]()})
    monkeypatch.setattr(pwd, "getpwuid", lambda _number: user)
    monkeypatch.setattr(grp, "getgrgid", lambda _number: group)
    assert weakness(mine) == ""
    for attribute, value in (("gr_mem", ["me", "you"]), ("gr_name", "staff")):
        with monkeypatch.context() as other:
            other.setattr(group, attribute, value)
            assert weakness(mine) == f"others may write to {mine}"


@as_root
def test_folder_of_another_user_is_refused(mine: Path) -> None:
    os.chown(mine, OTHER_USER, -1)
    assert weakness(mine) == f"{mine} belongs to another user"
    os.chown(mine, 0, -1)
    os.chown(mine.parent, OTHER_USER, -1)
    assert weakness(mine) == f"{mine.parent} belongs to another user"


def test_only_own_regular_files_are_read(mine: Path) -> None:
    file, link = mine / "file", mine / "link"
    assert not is_own_file(file)
    file.write_bytes(b"x")
    link.symlink_to(file)
    assert is_own_file(file)
    assert read_own(file) == b"x"
    assert not is_own_file(link)
    assert not is_own_file(mine)
    for path, why in ((link, "symbolic"), (mine, "directory"), (mine / "nothing", "nothing")):
        with pytest.raises(OSError, match=why):
            read_own(path)
    file.chmod(0o602)
    assert not is_own_file(file)
    with pytest.raises(PermissionError, match="alone"):
        read_own(file)


def test_pipe_in_place_of_a_file_does_not_block(mine: Path) -> None:
    os.mkfifo(mine / "pipe")
    with pytest.raises(PermissionError):
        read_own(mine / "pipe")
    assert not is_own_file(mine / "pipe")


def test_lock_is_not_opened_through_a_link(mine: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    (mine / "lock").symlink_to(precious)
    with pytest.raises(OSError, match="lock"):
        open_lock(mine / "lock")
    assert precious.read_text() == "x"
    os.close(open_lock(mine / "other"))
    os.close(open_lock(mine / "other"))


def test_private_cache_folder_is_made(mine: Path) -> None:
    lines: list[str] = []
    assert cache_folder(mine / "new", lines.append) == mine / "new"
    assert (mine / "new").is_dir()
    assert not lines


def test_weak_cache_folder_is_replaced_with_one_warning(mine: Path, elsewhere: Path) -> None:
    mine.chmod(0o777)
    lines: list[str] = []
    found = cache_folder(mine, lines.append)
    assert found == elsewhere / f"ssd-serve-{os.getuid()}"
    assert weakness(found) == ""
    (line,) = lines
    assert f"others may write to {mine}" in line
    assert "SSD_CACHE_DIR" in line
    assert cache_folder(found, lines.append) == found  # as the workers are told it
    assert cache_folder(mine) == found
    assert len(lines) == 1


@pytest.mark.parametrize("kind", ["a link", "open to all", pytest.param("another user's", marks=as_root)])
def test_planted_fallback_folder_is_not_used(mine: Path, elsewhere: Path, kind: str) -> None:
    mine.chmod(0o777)
    planted = elsewhere / f"ssd-serve-{os.getuid()}"
    if kind == "a link":
        planted.symlink_to(mine)
    else:
        planted.mkdir()
        planted.chmod(0o777)
        os.chown(planted, OTHER_USER if kind == "another user's" else -1, -1)
    found = cache_folder(mine)
    assert found != planted
    assert found.parent == elsewhere
    assert weakness(found) == ""


def test_cache_folder_of_a_user_without_a_home(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(_path: Path) -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    lines: list[str] = []
    assert cache_folder(Path("~/.cache/ssd-serve"), lines.append).parent == elsewhere
    assert "no home folder" in lines[0]


def test_folder_that_cannot_be_made_is_returned(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    assert cache_folder(tmp_path / "file" / "cache", lines.append) == tmp_path / "file" / "cache"
    assert not lines
