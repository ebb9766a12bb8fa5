"""Choice of the launcher, and errors if Ray is missing or cannot be reached."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest

from ssd_serve.base.devices import Machine
from ssd_serve.base.errors import NoGpuError, SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve
from ssd_serve.cluster.launch import chosen_launcher, usable_machine
from ssd_serve.cluster.ray.cluster import ray_cluster


def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "ray" else whole(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setitem(sys.modules, "ray", None)


def chosen(settings: Settings, gpus: int) -> str:
    return chosen_launcher(settings, Machine((0, 1), gpus))


def test_auto_is_ray_with_several_gpus_or_an_address() -> None:
    assert chosen(Settings(), 0) == "local"
    assert chosen(Settings(), 1) == "local"
    assert chosen(Settings(), 2) == "ray"
    assert chosen(Settings(ray_address="10.0.0.1:6379"), 0) == "ray"


def test_named_launcher_is_used() -> None:
    assert chosen(Settings(launcher="local", ray_address="auto"), 8) == "local"
    assert chosen(Settings(launcher="ray"), 0) == "ray"


def test_several_gpus_without_ray_are_for_the_local_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)
    assert chosen(Settings(), 8) == "local"


def test_unusable_gpu_is_an_error_unless_cores_are_named() -> None:
    troubled = Machine((0, 1), 0, "torch cannot use it: do this")
    with pytest.raises(NoGpuError, match=r"do this; or let cores compute with SSD_ALLOW_CPU=1") as caught:
        usable_machine(Settings(), troubled)
    assert caught.value.exit_code == 9
    with pytest.raises(NoGpuError):
        usable_machine(Settings(draft_device="cpu:0"), troubled)
    meant = Settings(allow_cpu=True), Settings(target_device="cpu:0"), Settings(ray_address="auto")
    for settings in meant:
        assert usable_machine(settings, troubled) == troubled
    for machine in (Machine((0, 1), 1), Machine((0, 1), 0)):
        assert usable_machine(Settings(), machine) == machine


def test_rays_own_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert resolve({}).ray_address == "10.0.0.1:6379"
    monkeypatch.setenv("SSD_RAY_ADDRESS", "10.0.0.2:6379")
    assert resolve({}).ray_address == "10.0.0.2:6379"


def test_missing_ray_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)
    with (
        pytest.raises(SettingsError, match=r"needs Ray: pip install 'ssd-serve\[ray\]'"),
        ray_cluster(Settings(launcher="ray")),
    ):
        pass


def test_ray_client_address_is_refused() -> None:
    with (
        pytest.raises(SettingsError, match="this process must be on a node of the cluster"),
        ray_cluster(Settings(ray_address="ray://10.0.0.1:10001")),
    ):
        pass
