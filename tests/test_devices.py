"""How a process binds itself to its device."""

import pytest
import torch

from ssd_serve import devices
from ssd_serve.devices import parse_device, pin


@pytest.mark.parametrize(("cores", "gpus", "threads"), [(64, 8, 8), (64, 1, 64), (4, 8, 1)])
def test_processes_beside_several_gpus_share_the_cores(
    cores: int, gpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(devices, "_available_cores", lambda: tuple(range(cores)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    pin(parse_device("cuda:3"))
    assert told == ["cuda:3", threads]
