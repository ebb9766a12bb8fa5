"""Graph capture orders its stream with the one that inputs are written on and results are read from."""

from collections.abc import Callable

import pytest
import torch

from ssd_serve.base.errors import CaptureError
from ssd_serve.kernels.device import DeviceGraphCapture
from tests.pretended_device import DEVICE, pretended_device


def warm_up_and_read(work_of: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Write inputs on the current stream, warm up on the capture's, and read results on the current one."""
    with pretended_device():
        inputs, results = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
        inputs.fill_(3)
        DeviceGraphCapture(torch.device(DEVICE)).warm_up(lambda: results.copy_(work_of(inputs)))
        return results.sum().item()


def test_warm_up_waits_for_inputs_and_is_waited_for() -> None:
    assert warm_up_and_read(lambda inputs: 2 * inputs) == 24


def test_capture_runs_on_its_own_stream_and_a_failure_restores_the_current_one() -> None:
    with pretended_device():
        capture, inputs = DeviceGraphCapture(torch.device(DEVICE)), torch.ones(4, device=DEVICE)
        capture.warm_up(lambda: inputs + 1)
        before = torch.cuda.current_stream()
        _, used = capture.capture(torch.cuda.current_stream)
        assert used is not before

        def fails() -> None:
            raise RuntimeError("not permitted while a stream is capturing")

        with pytest.raises(CaptureError, match="not permitted"):
            capture.capture(fails)
        assert torch.cuda.current_stream() is before
