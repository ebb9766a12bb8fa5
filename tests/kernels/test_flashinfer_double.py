"""The doubles compute and refuse what the packages do: what the adapter is written around."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.flashinfer_buffers import FIXED, INDICES
from tests.kernels.flashinfer_double import Doubles, WrapperDouble
from tests.kernels.flashinfer_signatures import ALL, PORT, PORT_MAIN, UPSTREAM, Recorded


def wrapper(recorded: Recorded, device: str = "cpu") -> WrapperDouble:
    return Doubles(recorded)(torch.zeros(8, dtype=torch.uint8, device=device), "NHD", backend="fa2")


def arguments(mask: list[bool] | None) -> dict[str, Any]:
    """Two rows over a context of three pages of two slots, the last half full; one head of two numbers."""
    buffers = ([0, 2], [0, 3], [4, 0, 2], [1])
    named: dict[str, Any] = {
        name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in zip(INDICES, buffers, strict=True)
    }
    named |= {
        "num_qo_heads": 1,
        "num_kv_heads": 1,
        "head_dim_qk": 2,
        "page_size": 2,
        "q_data_type": torch.float32,
    }
    return named | {"causal": mask is None, "custom_mask": None if mask is None else torch.tensor(mask)}


def attend(double: WrapperDouble) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of 0 and values that name their slot: a row's output is the mean of the slots that it sees."""
    keys, values = torch.zeros((5, 2, 1, 2)), torch.arange(10.0).repeat_interleave(2).view(5, 2, 1, 2)
    result: tuple[torch.Tensor, torch.Tensor] = double.run_return_lse(torch.zeros((2, 1, 2)), (keys, values))
    return result


@pytest.mark.parametrize("recorded", ALL, ids=str)
def test_results_by_hand(recorded: Recorded) -> None:
    """The context is slots 8, 9, 0, 1, 4."""
    double = wrapper(recorded)
    double.plan(**arguments(None))
    out, lse = attend(double)
    assert out[:, 0, 0].tolist() == pytest.approx([18 / 4, 22 / 5])
    assert lse[:, 0].tolist() == pytest.approx([2.0, torch.tensor(5.0).log2().item()])
    double = wrapper(recorded)
    double.plan(**arguments([True, False, False, False, False, False, True, True, False, True]))
    out, lse = attend(double)
    assert out[:, 0, 0].tolist() == pytest.approx([8.0, (9 + 0 + 4) / 3])
    assert lse[0, 0].item() == pytest.approx(0.0)
    double = wrapper(recorded)
    double.plan(**arguments(None), window_left=1)
    assert attend(double)[0][:, 0, 0].tolist() == pytest.approx([1 / 2, 5 / 2])


def test_arguments_that_a_package_lacks_are_refused() -> None:
    wrapper(UPSTREAM).plan(**arguments(None), fixed_split_size=4, uniform_q_len=2)
    with pytest.raises(TypeError, match="fixed_split_size"):
        wrapper(PORT).plan(**arguments(None), fixed_split_size=4)
    with pytest.raises(NotImplementedError, match="fixed_split_size"):
        wrapper(PORT_MAIN).plan(**arguments(None), fixed_split_size=4)
    with pytest.raises(TypeError, match="variant_owns_mask"):
        Doubles(PORT)(torch.zeros(1), "NHD", backend="fa2", variant_owns_mask=True)


def test_the_port_wants_indices_on_the_device() -> None:
    wrapper(UPSTREAM, "meta").plan(**arguments(None))
    for name in INDICES:
        moved = {
            key: value.to("meta") for key, value in arguments(None).items() if key in INDICES and key != name
        }
        with pytest.raises(RuntimeError, match=f"{name} must be on meta"):
            wrapper(PORT, "meta").plan(**(arguments(None) | moved))


def test_a_masked_wrapper_stays_masked() -> None:
    double = wrapper(UPSTREAM)
    double.plan(**arguments([True] * 10))
    with pytest.raises(RuntimeError, match="stays in that mode"):
        double.plan(**arguments(None))


class Capturing:
    """A device that keeps what was launched."""

    def __init__(self) -> None:
        self.capturing = False
        self.launched: list[Callable[[], object]] = []

    def launch(self, kernel: Callable[[], object]) -> None:
        """Keep it, and run it."""
        self.launched.append(kernel)
        kernel()


def fixed(requests: int, *, masked: bool) -> dict[str, torch.Tensor]:
    """Buffers for so many requests, with room for four pages and 16 masked places."""
    sizes = (requests + 1, requests + 1, 4, requests)
    buffers = {name: torch.zeros(size, dtype=torch.int32) for name, size in zip(FIXED, sizes, strict=True)}
    if masked:
        buffers["custom_mask_buf"] = torch.zeros(2, dtype=torch.uint8)
        buffers["mask_indptr_buf"] = torch.zeros(requests + 1, dtype=torch.int32)
    return buffers


def capturable(recorded: Recorded, requests: int, device: Capturing, *, masked: bool) -> WrapperDouble:
    double = Doubles(recorded, device)(
        torch.zeros(8, dtype=torch.uint8),
        "NHD",
        use_cuda_graph=True,
        backend="fa2",
        **fixed(requests, masked=masked),
    )
    double.reset_workspace_buffer(torch.zeros(8), torch.zeros(64, dtype=torch.uint8))
    return double


@pytest.mark.parametrize("recorded", ALL, ids=str)
def test_what_is_launched_in_graph_mode_reads_what_the_buffers_hold_then(recorded: Recorded) -> None:
    """Two rows of one request and an empty one; then a row each. Keys of 0, values that name their slot."""
    mask, device = [True, False, False, False, False, False, True, True, False, True], Capturing()
    double = capturable(recorded, 2, device, masked=True)
    numbers = ([0, 2, 2], [0, 3, 3], [4, 0, 2], [1, 2])
    indices = {
        name: torch.tensor(each, dtype=torch.int32) for name, each in zip(INDICES, numbers, strict=True)
    }
    double.plan(**(arguments(mask) | indices))
    device.capturing = True
    out, _ = attend(double)
    device.capturing = False
    assert out[:, 0, 0].tolist() == pytest.approx([8.0, (9 + 0 + 4) / 3])
    [kernel] = device.launched
    numbers = ([0, 1, 2], [0, 1, 3], [3, 1, 4], [2, 1])
    indices = {
        name: torch.tensor(each, dtype=torch.int32) for name, each in zip(INDICES, numbers, strict=True)
    }
    double.plan(**(arguments([False, True, True, False, True]) | indices))
    kernel()
    assert out[:, 0, 0].tolist() == pytest.approx([7.0, (2 + 8) / 2])


def test_what_graph_mode_demands() -> None:
    device = Capturing()
    double, eager = capturable(UPSTREAM, 1, device, masked=True), wrapper(UPSTREAM)
    mask = [True] * 10
    double.plan(**arguments(mask))
    for text, changed in (
        ("stays in that mode", {"custom_mask": None}),
        ("was told to launches", {"causal": True}),
        ("was told to launches", {"window_left": 3}),
        ("fixed splits", {"fixed_split_size": 2}),
        ("exceeds that of the first", {"qo_indptr": torch.tensor([0, 3], dtype=torch.int32)}),
        ("its fixed buffer", {"paged_kv_indices": torch.zeros(5, dtype=torch.int32)}),
        ("not made for 3 requests", {name: arguments(None)[name].repeat(2) for name in INDICES}),
    ):
        with pytest.raises((ValueError, RuntimeError), match=text):
            double.plan(**(arguments(mask) | changed))
    with pytest.raises(ValueError, match="custom_mask_buf must be given"):
        capturable(UPSTREAM, 1, device, masked=False).plan(**arguments(mask))
    eager.plan(**arguments(mask))
    device.capturing = True
    with pytest.raises(RuntimeError, match="cannot be captured"):
        double.plan(**arguments(mask))
    eager = Doubles(UPSTREAM, device)(torch.zeros(8), "NHD", backend="fa2")
    with pytest.raises(RuntimeError, match="only a wrapper in graph mode"):
        attend(eager)


def test_a_schedule_of_other_requests_is_found_out() -> None:
    """Wrappers that share buffers must be planned before each run."""
    double = capturable(UPSTREAM, 1, Capturing(), masked=False)
    double.plan(**arguments(None))
    attend(double)
    assert double.fixed is not None
    double.fixed["paged_kv_indices_buf"][0] = 3
    with pytest.raises(RuntimeError, match="plan again"):
        attend(double)
