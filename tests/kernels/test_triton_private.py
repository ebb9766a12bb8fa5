"""Tests of Triton's cache folder: machine code is loaded only from a folder that other users cannot write."""

import os
from pathlib import Path

import pytest
from triton import knobs

from ssd_serve.base.trusted_files import make_folder, weakness
from ssd_serve.kernels.triton import keep_private


def test_a_folder_of_this_users_alone_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "triton"
    make_folder(mine)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(mine))
    monkeypatch.setattr(knobs.cache, "dir", str(mine))
    keep_private()
    assert knobs.cache.dir == str(mine)


def test_a_folder_that_others_write_to_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "triton"
    make_folder(shared)
    shared.chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared))
    monkeypatch.setattr(knobs.cache, "dir", str(shared))
    keep_private()
    assert weakness(Path(knobs.cache.dir)) == ""
    assert os.environ["TRITON_CACHE_DIR"] == knobs.cache.dir, "also for the processes of this one"
    assert "TRITON_CACHE_DIR" in caplog.text
