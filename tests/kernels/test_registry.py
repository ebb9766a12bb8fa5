"""Tests of the table of tree attention backends: construction, missing requirements, and settings."""

import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from ssd_serve.base.attention_backends import AUTO, BACKENDS, Where, choices, names
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.backends import candidates
from ssd_serve.kernels.attention.contract import AttentionFactory


def test_auto_is_no_backend() -> None:
    assert AUTO not in names()
    assert set(names()) == {name for where in Where for name in names(where)}


@pytest.mark.parametrize("name", BACKENDS)
def test_every_factory_is_there(name: str) -> None:
    assert isinstance(resolve_name(BACKENDS[name].factory), AttentionFactory)


def test_every_backend_is_a_candidate_and_some_run_anywhere(tmp_path: Path) -> None:
    cache = KVCache(KVLayout((LayerKV(2, 16),), torch.float32), 16, "cpu")
    found = candidates(cache, None, tmp_path)
    assert tuple(each.name for each in found) == names()
    assert {each.name for each in found if not each.missing} == set(names(Where.ANY))
    told = {each.name: each.missing for each in found}
    assert told["triton"] == f"it needs a GPU; use SSD_TREE_DECODE_BACKEND={choices(Where.CPUS)}"
    words = choices(Where.CPUS).replace(" or ", ", ").split(", ")
    assert words == [AUTO, *names(Where.CPUS, Where.ANY)]


@pytest.mark.parametrize("name", [AUTO, *names()])
def test_every_backend_name_is_a_valid_setting(name: str) -> None:
    assert Settings(tree_decode_backend=name).tree_decode_backend == name


def test_unknown_backend_is_a_settings_error() -> None:
    with pytest.raises(SettingsError) as error:
        resolve({"tree_decode_backend": "fast"})
    assert "input should be 'auto', 'native', 'flashinfer', 'triton'" in str(error.value)


def test_settings_need_no_torch() -> None:
    said = "import sys, ssd_serve.base.settings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
