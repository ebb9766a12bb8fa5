"""The pretended GPU itself: it computes, and refuses what a GPU refuses."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.pretended_device import DEVICE, MixedDevicesError, pretended_device


def test_it_computes_where_its_tensors_lie() -> None:
    with pretended_device() as reads:
        table = torch.zeros((3, 4), device=DEVICE)
        table[1, :2] = 2.0
        table.add_(torch.from_numpy(np.ones((3, 4), dtype=np.float32)).to(DEVICE))
        part = table[1]
        part.mul_(2)  # a view shares its numbers
        assert part.device == torch.device(DEVICE)
        assert not reads
        assert table.tolist() == [[1] * 4, [6, 6, 2, 2], [1] * 4]
        assert bool((torch.tensor([1, 2], device=DEVICE) > 0).all())
        assert reads == ["_to_copy", "__bool__"]
        assert table.cpu().device.type == "cpu"


MIXES: list[Callable[[torch.Tensor, torch.Tensor], object]] = [
    lambda ours, other: ours + other,
    lambda ours, other: other.add_(ours),
    lambda ours, other: ours @ other,
    lambda ours, other: torch.cat((ours, other)),
    lambda ours, other: torch.where(ours > 0, ours, other),
    lambda ours, other: ours.index_select(0, torch.arange(2)),
    lambda ours, other: other[torch.arange(2, device=DEVICE)],
    lambda ours, other: ours.__setitem__(torch.arange(2), other[:2]),
    lambda ours, other: torch.mm(other, ours, out=other),
]


@pytest.mark.parametrize("mix", MIXES)
def test_mixed_devices_are_refused(mix: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with pretended_device():
        ours, other = torch.ones((2, 2), device=DEVICE), torch.ones((2, 2))
        with pytest.raises(MixedDevicesError):
            mix(ours, other)


def test_what_gpus_allow_is_allowed() -> None:
    with pretended_device():
        ours = torch.ones((2, 2), device=DEVICE)
        assert (ours * torch.tensor(3.0)).tolist() == [[3, 3], [3, 3]]  # one number of the CPU
        assert ours[torch.tensor([1])].tolist() == [[1, 1]]  # indices of the CPU
        ours[0] = torch.tensor([5.0, 6.0])  # a copy from the CPU
        assert ours.tolist() == [[5, 6], [1, 1]]


def test_numpy_needs_a_copy() -> None:
    with pretended_device():
        ours = torch.ones(3, device=DEVICE)
        with pytest.raises((TypeError, RuntimeError), match="numpy"):
            ours.numpy()
