"""Compiling the kernels: once for a folder, and a clear reason where it is not possible."""

from pathlib import Path

import pytest

from ssd_serve.kernels.native.build import NativeError, build
from ssd_serve.kernels.native.library import INT, NativeLibrary, load_native, native_library
from ssd_serve.settings import Settings


@pytest.mark.usefixtures("native")
def test_a_second_start_uses_what_the_first_compiled(tmp_path: Path) -> None:
    path = build(tmp_path)
    written = path.stat().st_mtime_ns
    assert build(tmp_path) == path
    assert path.stat().st_mtime_ns == written
    assert [file.name for file in tmp_path.glob("*.so")] == [path.name]


def test_the_reason_names_the_compilers_that_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="no C compiler \\(nothing-here\\)"):
        build(tmp_path, ["nothing-here"])
    assert load_native(tmp_path, compilers=["nothing-here"]) is None


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'out of registers' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(NativeError, match="out of registers"):
        build(tmp_path / "cache", [str(broken)])
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeError, match=str(tmp_path / "file")):
        build(tmp_path / "file" / "cache", ["sh"])


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "native.so").write_text("text")
    with pytest.raises(NativeError, match="cannot be loaded"):
        NativeLibrary(tmp_path / "native.so")


@pytest.mark.usefixtures("native")
def test_settings_can_switch_the_kernels_off(tmp_path: Path) -> None:
    assert native_library(Settings(cache_dir=tmp_path, native_kernels=False)) is None
    assert not list(tmp_path.iterdir())
    found = native_library(Settings(cache_dir=tmp_path))
    assert found is not None
    assert found.function("ssd_can_multiply_bf16", result=INT)() in (0, 1)
