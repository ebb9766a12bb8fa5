"""Tests of the FlashInfer adapter: arguments and abilities of upstream's package and of AMD's port."""

import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.flashinfer.adapter import MakeWrapper, describe, import_package, natural
from ssd_serve.kernels.flashinfer.installation import installed_versions
from tests.kernels.flashinfer_double import Doubles
from tests.kernels.flashinfer_signatures import ALL, PORT, RESET, UPSTREAM, Recorded, signature

RECORDED = pytest.mark.parametrize("recorded", ALL, ids=str)


@RECORDED
def test_package_capabilities(recorded: Recorded) -> None:
    package = describe(recorded.name, recorded.version, cast(MakeWrapper, Doubles(recorded)))
    assert package.indices_on_device == (recorded is not UPSTREAM)
    assert package.can_fix_splits == (recorded is UPSTREAM)  # the port's main branch refuses it
    assert torch.float32 not in package.dtypes


def test_a_package_without_a_needed_argument_is_refused() -> None:
    def plan(self: object, qo_indptr: object, causal: bool = False, custom_mask: object = None) -> None: ...

    foreign: Any = Doubles(UPSTREAM)
    foreign.plan = plan
    with pytest.raises(UserError, match="no kv_data_type, q_data_type, sm_scale, window_left"):
        describe("flashinfer-python", "9.9.9", foreign)


def test_logarithms_to_base_2_become_natural() -> None:
    assert torch.allclose(natural(torch.tensor([0.0, 1.0, 10.0])), torch.tensor([1.0, 2.0, 1024.0]).log())


def test_import_takes_the_wrapper_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles = Doubles(PORT)
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = doubles
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    package = import_package(PORT.name, PORT.version)
    wrapper: Any = package.wrapper(torch.zeros(4, dtype=torch.uint8))
    assert doubles.made == [wrapper]


def test_failed_import_error_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", cast(ModuleType, None))  # as if it could not be imported
    with pytest.raises(
        UserError, match=r"flashinfer-python 0\.7\.2 is installed but cannot be imported: .*halted"
    ):
        import_package("flashinfer-python", "0.7.2")


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed here")
@pytest.mark.filterwarnings("ignore")
def test_the_installed_package_is_as_recorded() -> None:
    name, version = next(iter(installed_versions().items()))
    package = import_package(name, version)
    known = {str(recorded): recorded for recorded in ALL}.get(f"{name} {version}")
    if known is None:
        pytest.skip(f"{name} {version} is not recorded; `describe` found all it needs")
    make: Any = package.make
    for method, text in (
        ("__init__", known.init),
        ("plan", known.plan),
        ("run", known.run),
        ("reset_workspace_buffer", RESET),
    ):
        found = inspect.signature(getattr(make, method)).parameters.values()
        assert [(each.name, each.default) for each in found] == [
            (each.name, each.default) for each in signature(text).parameters.values()
        ]
