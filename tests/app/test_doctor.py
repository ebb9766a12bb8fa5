"""Tests of `ssd doctor`: its checks, and exit code 1 only if the server could not serve."""

import json
import pwd
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_serve.app.cli.main import main
from ssd_serve.app.doctor import checks as doctor
from ssd_serve.app.doctor import checks as doctor_checks
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

CPU = Settings()


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is replaced because its start takes seconds."""
    monkeypatch.setattr(doctor_checks, "ray_view", lambda: RayView(4, 0))


def found(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_this_machine_can_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["would serve"]["state"] == "ok"
    assert "largest error by heads 4/4: " in rows["sdpa, float32"]["found"]
    assert rows["torch"]["found"].startswith(torch.__version__)
    assert "GPU" in rows["triton, float32"]["advice"]


@pytest.mark.slow
def test_a_backend_that_cannot_run_here_is_a_problem_when_it_was_asked_for() -> None:
    checks = examine(Settings(tree_decode_backend="triton"), lambda text: None)
    problem = found(checks, "would serve")
    assert problem.state is State.PROBLEM
    assert "it needs a GPU" in problem.advice
    assert [check.name for check in checks if check.state is State.PROBLEM] == ["would serve"]


@pytest.mark.slow
def test_problem_sets_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--tree-decode-backend", "triton"]) == 1
    assert "would serve" in capsys.readouterr().out


@pytest.mark.slow
def test_without_compiled_kernels_torch_serves(tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    for settings in (Settings(native_kernels=False), Settings(cache_dir=blocked / "cache")):
        checks = examine(settings, lambda text: None)
        assert found(checks, "compiled kernels").state is State.NOTE
        assert found(checks, "would serve").found.startswith("sdpa")


def told_of(make: Maker, monkeypatch: pytest.MonkeyPatch) -> Check:
    one = [Candidate("tried", "", make)]
    monkeypatch.setattr(doctor, "candidates", lambda *given: one)
    return found(examine(CPU, lambda text: None), "tried, float32")


def test_a_backend_that_does_not_have_the_dtype_is_not_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(cache: KVCache, heads: int) -> AttentionBackend[Any]:
        raise UserError("no kernels for float32: use bfloat16")

    told = told_of(refuse, monkeypatch)
    assert told.state is State.OK
    assert told.found.startswith("not for this dtype")
    assert told.advice == "no kernels for float32: use bfloat16"


def test_failing_backend_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cache: KVCache, heads: int) -> AttentionBackend[Any]:
        raise RuntimeError("no kernel image\nand a long trace")

    told = told_of(fail, monkeypatch)
    assert (told.state, told.found) == (State.NOTE, "RuntimeError: no kernel image")
    assert "report it" in told.advice


class Doubled(SdpaAttention):
    """Backend with outputs twice as large as the right ones."""

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        return 2 * super().run(layer, queries, plan)


def test_wrong_backend_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told = told_of(Doubled, monkeypatch)
    assert told.state is State.NOTE
    assert "heads of 128 in float32: off by" in told.found
    assert "results are wrong" in told.advice


def test_a_right_backend_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(cache: KVCache, heads: int) -> AttentionBackend[Any]:
        made.append(heads)
        return SdpaAttention(cache, heads)

    assert told_of(make, monkeypatch).state is State.OK
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
def test_attention_is_chosen_in_the_targets_dtype_and_on_its_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, expected: torch.dtype
) -> None:
    settings = Settings(target_device="cuda:1", dtype=dtype)
    assert asked_of_attention(settings, monkeypatch, "cuda:1").layout.dtype is expected


def test_attention_on_cores_is_float32_for_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "devices", lambda settings: [])
    monkeypatch.setattr(doctor_checks, "collectives", list[Check])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = Settings(target_device="cpu:0", dtype="int8")
    assert asked_of_attention(settings, monkeypatch).layout.dtype is torch.float32


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
def test_settings_that_this_machine_cannot_serve_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, reason: str
) -> None:

    def native_and_broken(*given: Any, **named: Any) -> list[Candidate]:
        return [Candidate("native", "", SdpaAttention), Candidate("sdpa", "", Doubled)]

    monkeypatch.setattr(backends, "candidates", native_and_broken)
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(cores=(0,), gpus=2))
    told = found(examine(settings, lambda text: None), "would serve")
    assert told.state is State.PROBLEM
    assert reason in told.advice


@pytest.mark.slow
def test_checking_backend_is_reported() -> None:
    told = found(examine(Settings(tree_decode_check="sdpa"), lambda text: None), "would serve")
    assert told.state is State.OK
    assert "checked by sdpa" in told.found


def test_broken_gpu_is_reported_without_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> KVCache:
        raise RuntimeError("CUDA error: unknown error\nCompile with more flags")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    monkeypatch.setattr(doctor, "KVCache", broken)
    monkeypatch.setattr(doctor_checks, "collectives", list[Check])
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


def test_advice_stands_below_its_line() -> None:
    checks = [Check("a", State.OK, "fine"), Check("longer", State.PROBLEM, "bad", "do this")]
    assert as_table(checks).splitlines() == [
        "a       ok       fine",
        "longer  problem  bad",
        "                 do this",
    ]
