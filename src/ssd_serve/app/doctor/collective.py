"""A check that GPUs can sum tensors together, as ranks of a target do, and that this can be captured.

NCCL and RCCL can hang or end a process without an exception, so each rank is a process that may be killed. It
has not run with several GPUs yet.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ssd_serve.base.errors import in_a_line
from ssd_serve.base.resources import ProbeResult, probe

_TIMEOUT_S = 90.0
_PROGRAM = (sys.executable, "-m", "ssd_serve.app.doctor.collective")
_CAPTURED, _RANK = "--captured", "--rank"
_REPLAYS = 3


def failure(
    devices: Sequence[str],
    *,
    captured: bool = False,
    timeout_s: float = _TIMEOUT_S,
    program: Sequence[str] = _PROGRAM,
) -> str:
    """Reason why sums over ranks fail on these `devices` (torch's names), captured or not; empty if they
    work."""
    ended = _ranks(devices, captured, timeout_s, program)
    return next((outcome.failure for _, outcome in ended if outcome.failure), "")


def _ranks(
    devices: Sequence[str], captured: bool, timeout_s: float, program: Sequence[str]
) -> list[tuple[int, ProbeResult]]:
    """Results of the ranks in the order in which they ended: the first failure makes others fail."""
    with (
        tempfile.TemporaryDirectory(prefix="ssd-collective-") as folder,
        ThreadPoolExecutor(len(devices)) as ranks,
    ):
        shared = [str(len(devices)), str(Path(folder) / "store"), *([_CAPTURED] if captured else [])]
        commands = [[*program, _RANK, device, str(rank), *shared] for rank, device in enumerate(devices)]
        running = {ranks.submit(probe, command, timeout_s): rank for rank, command in enumerate(commands)}
        return [(running[ended], ended.result()) for ended in as_completed(running)]


def sums(device: str, rank: int, size: int, store: Path, captured: bool = False) -> bool:
    """True if one rank gets the sum over all. Raises the library's errors."""
    import torch

    from ssd_serve.models.parallel import Parallel, join_group

    group = join_group(store, Parallel(rank, size), device)
    numbers = torch.empty(4, device=device)

    def work() -> torch.Tensor:
        return group.add(numbers.copy_(torch.arange(4, device=device)).add_(rank))

    expected = [float(size * number + sum(range(size))) for number in range(4)]
    if not captured:
        return bool(work().tolist() == expected)
    from ssd_serve.kernels.device import DeviceGraphCapture

    capture = DeviceGraphCapture(torch.device(device))
    capture.warm_up(work)
    group.quiesce()
    graph, total = capture.capture(work)
    for _ in range(_REPLAYS):
        total.zero_()
        graph.replay()
        if total.tolist() != expected:
            return False
    return True


def main(arguments: Sequence[str]) -> int:
    """`[--captured] DEVICE...`: a rank on each. 1 where something is wrong; with what the library printed."""
    captured, rest = _CAPTURED in arguments, [each for each in arguments if each != _CAPTURED]
    if rest[:1] == [_RANK]:
        device, rank, size, store = rest[1:]
        try:
            wrong = "" if sums(device, int(rank), int(size), Path(store), captured) else "the sum is wrong"
        except Exception as error:
            wrong = in_a_line(error)
        print(wrong, file=sys.stderr, flush=True)
        # The library would wait for its graphs to be forgotten, or for ranks that do not come.
        os._exit(int(bool(wrong)))
    ended = sorted(_ranks(rest or ["cuda:0"], captured, _TIMEOUT_S, _PROGRAM), key=lambda each: each[0])
    for number, outcome in ended:
        print(outcome.printed + f"rank {number}: {outcome.failure or 'right'}")
    return int(any(outcome.failure for _, outcome in ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
