"""The doubles refuse what the packages refuse, and what kernels would read as garbage."""

from typing import Any

import pytest
import torch

from tests.kernels.flashinfer_double import INDICES, Doubles, WrapperDouble
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


def attend(double: WrapperDouble, **changed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of 0 and values that name their slot: a row's output is the mean of the slots that it sees."""
    pools = {
        "keys": torch.zeros((5, 2, 1, 2)),
        "values": torch.arange(10.0).repeat_interleave(2).view(5, 2, 1, 2),
    }
    pools |= {name: pool for name, pool in changed.items() if name in pools}
    queries = changed.get("queries", torch.zeros((2, 1, 2)))
    result: tuple[torch.Tensor, torch.Tensor] = double.run_return_lse(
        queries, (pools["keys"], pools["values"])
    )
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


@pytest.mark.parametrize(
    ("mask", "text"),
    [([True] * 9, "shape"), ([True] * 11, "11 entries"), ([True] * 5 + [False] * 5, "sees nothing")],
)
def test_masks_that_do_not_fit(mask: list[bool], text: str) -> None:
    double = wrapper(PORT)
    double.plan(**arguments(mask))
    with pytest.raises((ValueError, RuntimeError), match=text):
        attend(double)


@pytest.mark.parametrize(
    "changed",
    [
        {"queries": torch.zeros((2, 1, 2), dtype=torch.bfloat16)},
        {"queries": torch.zeros((3, 1, 2))},
        {"queries": torch.zeros((2, 1, 2, 2))[..., 0]},
        {"keys": torch.zeros((10, 1, 1, 2))},
        {"keys": torch.zeros((5, 2, 2, 2))[:, :, :1]},
    ],
    ids=["dtype", "rows", "head in pieces", "page size", "strides"],
)
def test_tensors_that_do_not_fit(changed: dict[str, torch.Tensor]) -> None:
    double = wrapper(UPSTREAM)
    double.plan(**arguments(None))
    with pytest.raises((TypeError, ValueError), match=r"planned|strides|one piece"):
        attend(double, **changed)


@pytest.mark.parametrize("named", [{"backend": "auto"}, {"backend": "fa2", "use_cuda_graph": True}], ids=str)
def test_other_backends_and_graphs_are_not_doubled(named: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError):
        Doubles(UPSTREAM)(torch.zeros(1), "NHD", **named)
