"""Tests of `ssd doctor`: its checks, and exit code 1 only if the server could not serve."""

import json
import pwd
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_serve.app.cli.main import main
from ssd_serve.app.doctor import checks as doctor
from ssd_serve.app.doctor.checks import Check, State, examine
from ssd_serve.app.doctor.command import as_table
from ssd_serve.base.devices import Device, Machine, parse_device
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import Settings
from ssd_serve.cache.kv import KVCache, KVLayout
from ssd_serve.cluster.ray.cluster import RayView
from ssd_serve.kernels.attention import backends
from ssd_serve.kernels.attention.backends import AttentionOptions, Candidate, ChosenAttention
from ssd_serve.kernels.attention.contract import AttentionBackend, Maker
from ssd_serve.kernels.attention.sdpa import SdpaAttention, SdpaPlan
from ssd_serve.kernels.attention.self_test import RATIOS, SMALL
from ssd_serve.models.roof import Roof

CPU = Settings(dtype="fp32")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray and the measurement of the cores are replaced because they take seconds."""
    monkeypatch.setattr(doctor, "ray_view", lambda: RayView(4, 0))
    monkeypatch.setattr(doctor, "cpu_roofs", lambda *_: [Roof(2, "packed", {1: 1e-10}, 2e12)])


def found(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


@pytest.mark.slow
def test_doctor_of_this_machine_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--dtype", "fp32"]) == 0
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["would serve"]["state"] == "ok"
    assert "largest error by heads 4/4: " in rows["sdpa, float32"]["found"]
    assert rows["torch"]["found"].startswith(torch.__version__)
    assert rows["speed of 2 core(s)"]["found"] == "10.0 GB/s of weights, 2 TFLOPS in packed"
    assert "GPU" in rows["triton, float32"]["advice"]


@pytest.mark.slow
def test_requested_backend_that_cannot_run_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--tree-decode-backend", "triton"]) == 1
    rows = json.loads(capsys.readouterr().out)
    (problem,) = (row for row in rows if row["state"] == "problem")
    assert problem["check"] == "would serve"
    assert "it needs a GPU" in problem["advice"]


@pytest.mark.slow
def test_torch_serves_without_compiled_kernels(tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    for settings in (Settings(native_kernels=False), Settings(cache_dir=blocked / "cache")):
        checks = examine(settings, lambda text: None)
        assert found(checks, "compiled kernels").state is State.NOTE
        assert found(checks, "would serve").found.startswith("sdpa")


def tried(make: Maker, monkeypatch: pytest.MonkeyPatch) -> Check:
    one = [Candidate("tried", "", make)]
    monkeypatch.setattr(doctor, "candidates", lambda *given: one)
    return found(examine(CPU, lambda text: None), "tried, float32")


@pytest.mark.parametrize(
    ("error", "state", "found", "advice"),
    [
        (UserError("no kernels for float32"), State.OK, "not for this dtype", "no kernels for float32"),
        (RuntimeError("no image\nand a trace"), State.NOTE, "RuntimeError: no image", "report it"),
    ],
)
def test_backend_that_cannot_be_built_is_reported_in_one_line(
    error: Exception, state: State, found: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cache: KVCache, heads: int) -> AttentionBackend[Any]:
        raise error

    check = tried(fail, monkeypatch)
    assert check.state is state
    assert check.found.startswith(found)
    assert "\n" not in check.found
    assert advice in check.advice


class Doubled(SdpaAttention):
    """Backend with outputs twice as large as the right ones."""

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        return 2 * super().run(layer, queries, plan)


def test_wrong_backend_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told = tried(Doubled, monkeypatch)
    assert told.state is State.NOTE
    assert "heads of 128 in float32: off by" in told.found
    assert "results are wrong" in told.advice


def test_working_backend_is_tested_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(cache: KVCache, heads: int) -> AttentionBackend[Any]:
        made.append(heads)
        return SdpaAttention(cache, heads)

    assert tried(make, monkeypatch).state is State.OK
    assert len(made) == len(RATIOS) * len(SMALL)


def asked_of_attention(settings: Settings, monkeypatch: pytest.MonkeyPatch, kind: str = "cpu") -> KVCache:
    """The cache that the target's attention was chosen for, all on the device that torch names `kind`."""
    caches: list[KVCache] = []

    def choose(wish: AttentionOptions, cache: KVCache, *rest: Any) -> ChosenAttention:
        caches.append(cache)
        return ChosenAttention("sdpa", SdpaAttention(cache, 4))

    def place(layout: KVLayout, slots: int, device: str) -> KVCache:
        assert device == kind
        return KVCache(layout, slots, "cpu")

    monkeypatch.setattr(doctor, "attention_for", choose)
    monkeypatch.setattr(doctor, "KVCache", place)
    monkeypatch.setattr(doctor, "candidates", lambda *given: [])
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(cores=(0,), gpus=2))
    current: list[Device] = []
    monkeypatch.setattr(doctor, "pin", current.append)
    assert found(examine(settings, lambda text: None), "would serve").state is State.OK
    assert current == ([] if kind == "cpu" else [parse_device(kind)])  # kernels start on the current GPU
    return caches[0]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_attention_is_chosen_for_dtype_and_gpu_of_the_target(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, expected: torch.dtype
) -> None:
    settings = Settings(target_device="cuda:1", dtype=dtype)
    assert asked_of_attention(settings, monkeypatch, "cuda:1").layout.dtype is expected


@pytest.mark.parametrize(
    ("compiled", "expected"), [(object(), torch.bfloat16), (None, torch.float32)], ids=["compiled", "torch"]
)
def test_cache_on_cores_is_narrow_where_compiled_attention_reads_it(
    monkeypatch: pytest.MonkeyPatch, compiled: object, expected: torch.dtype
) -> None:
    monkeypatch.setattr(doctor, "load_native", lambda folder: compiled)
    monkeypatch.setattr(doctor, "compiled", lambda settings: [])
    monkeypatch.setattr(doctor, "devices", lambda settings: [])
    monkeypatch.setattr(doctor, "collectives", list[Check])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = Settings(target_device="cpu:0", dtype="int8")
    assert asked_of_attention(settings, monkeypatch).layout.dtype is expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings(target_device="cuda:7"), "target_device is cuda:7, but this machine has 2 GPU(s)"),
        (Settings(target_device="cuda:1", dtype="int8"), "dtype int8 is not built for cuda:1"),
        (Settings(target_device="cpu:5"), "only the cores 0"),
        (Settings(target_device="cpu:0", tree_decode_check="sdpa"), "'sdpa' cannot be used here"),
    ],
)
def test_settings_that_cannot_be_served_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, reason: str
) -> None:

    def native_and_broken(*given: Any, **named: Any) -> list[Candidate]:
        return [Candidate("native", "", SdpaAttention), Candidate("sdpa", "", Doubled)]

    monkeypatch.setattr(backends, "candidates", native_and_broken)
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(cores=(0,), gpus=2))
    told = found(examine(settings, lambda text: None), "would serve")
    assert told.state is State.PROBLEM
    assert reason in told.advice


def test_broken_gpu_is_reported_without_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> KVCache:
        raise RuntimeError("CUDA error: unknown error\nCompile with more flags")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    monkeypatch.setattr(doctor, "KVCache", broken)
    monkeypatch.setattr(doctor, "collectives", list[Check])
    checks = examine(CPU, lambda text: None)
    assert found(checks, "cores").state is State.OK
    for name, state in (("devices", State.NOTE), ("tree attention", State.PROBLEM)):
        assert found(checks, name).state is state
        assert found(checks, name).found.endswith("RuntimeError: CUDA error: unknown error")
        assert "report" in found(checks, name).advice


def test_missing_home_folder_error_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    checks = examine(CPU, lambda text: None)
    for name, state in (("compiled kernels", State.NOTE), ("tree attention", State.PROBLEM)):
        assert found(checks, name).state is state
        assert "SSD_CACHE_DIR" in found(checks, name).advice


def test_table_shows_advice_below_the_check() -> None:
    checks = [Check("a", State.OK, "fine"), Check("longer", State.PROBLEM, "bad", "do this")]
    assert as_table(checks).splitlines() == [
        "a       ok       fine",
        "longer  problem  bad",
        "                 do this",
    ]
