"""Peers are asked how they were built, and what does not answer is left blank."""

import sys
from pathlib import Path

import pytest

from ssd_serve.bench.peers.builds import log_of, peer_builds
from ssd_serve.bench.peers.ways import LLAMA, TRANSFORMERS, VLLM, Pair, Peers, Place, Way

SYSTEM = "system_info: n_threads = 2 | CPU : AVX512_BF16 = 1 | OPENMP = 1"


def program(folder: Path, name: str, body: str) -> Path:
    """A Python program that can be called by its path."""
    file = folder / name
    file.write_text(f"#!{sys.executable}\n{body}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def place(folder: Path, peers: Peers) -> Place:
    return Place(peers, Pair(folder / "target", folder / "draft"), (0, 1), folder)


def test_version_flags_and_variables_are_told(tmp_path: Path) -> None:
    told = f"0.00.1 I main: loading\\n0.00.2 I {SYSTEM} | \\nno model"
    says = (
        "import sys\n"
        "told = 'version: 1 (abc)\\nbuilt with ' + sys.argv[1]\n"
        f"print('{told}' if '-m' in sys.argv else told, file=sys.stderr)"
    )
    peers = Peers(
        llama_server=program(tmp_path, "llama-server", says),
        vllm_python=program(tmp_path, "vllm-python", "print('PyTorch built with:\\n - GCC 13')"),
        transformers_python=program(tmp_path, "python", "print('PyTorch built with: - MKL')"),
    )
    here = place(tmp_path, peers)
    (tmp_path / "CMakeCache.txt").write_text(
        "# made\nCMAKE_BUILD_TYPE:STRING=Release\nGGML_NATIVE:BOOL=ON\nCMAKE_AR:FILEPATH=/usr/bin/ar\n",
        encoding="utf-8",
    )
    found = peer_builds(here)
    assert found[LLAMA] == {
        "version": "version: 1 (abc) built with --version",
        "build": "-DCMAKE_BUILD_TYPE:STRING=Release -DGGML_NATIVE:BOOL=ON",
        "system_info": SYSTEM,
    }
    assert found[VLLM]["torch"] == "PyTorch built with: - GCC 13"
    assert found[VLLM]["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert not any(value.startswith("/") for value in found[VLLM].values()), "no folders of this machine"
    assert found[TRANSFORMERS] == {"torch": "PyTorch built with: - MKL"}


@pytest.mark.parametrize("body", [None, "raise SystemExit('no')"])
def test_what_cannot_be_asked_is_blank_or_says_why(tmp_path: Path, body: str | None) -> None:
    server = tmp_path / "llama-server" if body is None else program(tmp_path, "llama-server", body)
    found = peer_builds(place(tmp_path, Peers(llama_server=server)))
    assert found == {LLAMA: {"version": "" if body is None else "no", "build": "", "system_info": ""}}


def test_every_server_has_its_own_log(tmp_path: Path) -> None:
    here = place(tmp_path, Peers())
    logs = {log_of(Way(LLAMA, "draft", length), here) for length in (1, 2)}
    assert [log.parent for log in logs] == [tmp_path, tmp_path]
    assert len(logs) == 2
