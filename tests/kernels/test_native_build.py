"""Compiling the kernels: once for a folder, and a clear reason where it is not possible."""

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.kernels.native import library
from ssd_serve.kernels.native.library import (
    INT,
    SOURCES,
    NativeError,
    NativeLibrary,
    build,
    load_native,
    native_library,
)


@pytest.mark.parametrize(
    "kind",
    [
        "x86-64",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("haswell", "skylake-avx512", "cooperlake")),
        "sapphirerapids",
    ],
)
def test_sources_compile_for_other_processors(kind: str) -> None:
    compiler = shutil.which("gcc")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no GCC for x86-64")
    words = [compiler, "-std=gnu11", "-Wno-psabi", "-fsyntax-only", f"-march={kind}"]
    done = subprocess.run([*words, *sorted(SOURCES.glob("*.c"))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_missing_compiler_error_names_the_compilers(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="no C compiler \\(nothing-here\\)"):
        build(tmp_path, ["nothing-here"])
    assert load_native(tmp_path, compilers=["nothing-here"]) is None


def test_compiler_error_is_quoted_and_leaves_no_file(tmp_path: Path) -> None:
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


@pytest.fixture
def compiler(tmp_path: Path) -> list[str]:
    script = tmp_path / "fast-cc"
    script.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nrm "$2"; umask 0; echo compiled > "$2"\n'
    )
    script.chmod(0o755)
    return [str(script)]


def test_compiled_library_is_reused_at_the_next_start(tmp_path: Path, compiler: list[str]) -> None:
    folder = tmp_path / "cache"
    path = build(folder, compiler)
    written = path.stat().st_ino, path.stat().st_mtime_ns
    assert build(folder, compiler) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == written
    assert [file.name for file in folder.glob("*.so")] == [path.name]


@pytest.mark.parametrize("planted", ["link", "open to all"])
def test_a_planted_library_is_compiled_over(tmp_path: Path, compiler: list[str], planted: str) -> None:
    folder, evil = tmp_path / "cache", tmp_path / "evil.so"
    path = build(folder, compiler)
    evil.write_text("evil")
    path.unlink()
    if planted == "link":
        path.symlink_to(evil)
    else:
        path.write_text("evil")
        path.chmod(0o666)
    assert build(folder, compiler).read_text() == "compiled\n"
    assert not path.is_symlink()
    assert not path.stat().st_mode & 0o077
    assert evil.read_text() == "evil"


def test_folder_writable_by_others_is_not_used(
    tmp_path: Path, compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shared"
    planted = folder / build(tmp_path / "mine", compiler).name
    folder.mkdir()
    folder.chmod(0o777)
    planted.write_text("evil")
    with pytest.raises(NativeError, match=f"others may write to {folder}"):
        build(folder, compiler)
    loaded: list[Path] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(library, "NativeLibrary", lambda path, _log: loaded.append(path))
    load_native(folder, compilers=compiler)
    assert loaded == [tmp_path / f"ssd-serve-{os.getuid()}" / planted.name]
    assert planted.read_text() == "evil"
    assert list(folder.iterdir()) == [planted]


def test_lock_that_is_a_symbolic_link_disables_the_kernels(tmp_path: Path, compiler: list[str]) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "native.lock").symlink_to(precious)
    with pytest.raises(NativeError, match=r"native\.lock"):
        build(tmp_path / "cache", compiler)
    assert load_native(tmp_path / "cache", compilers=compiler) is None
    assert precious.read_text() == "x"


@pytest.mark.usefixtures("native")
def test_settings_can_switch_the_kernels_off(tmp_path: Path, cache_dir: Path) -> None:
    assert native_library(EngineConfig(cache_dir=tmp_path, native_kernels=False)) is None
    assert not list(tmp_path.iterdir())
    found = native_library(EngineConfig(cache_dir=cache_dir))
    assert found is not None
    assert found.path.parent == cache_dir
    assert found.function("ssd_can_multiply_bf16", result=INT)() in (0, 1)
