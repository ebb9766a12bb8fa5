"""What the target's features cost on their way to a drafter beside it, of a target of real size.

A verifier's link speaks with a process that only reads: prompts at full speed, then rounds of many requests,
between which the verifier waits for its device as it does in a forward. Knows links and channels; no models.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.channels.feature_reader import VOCABULARY, hello_of
from ssd_serve.cluster.channels.listener import Listener
from ssd_serve.cluster.channels.polling import poll
from ssd_serve.errors import SsdError
from ssd_serve.messages import SamplingParameters, Submit
from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.features import FeatureStore, RequestFeatures
from ssd_serve.verifier.request import Request, accept, share

LAYERS = (2, 40, 77)
WAYS = {"unix socket": "socket", "shared memory": "shared"}
_READER = Path(__file__).with_name("feature_reader.py")
_PATIENCE_S = 60.0
_SLOTS_A_REQUEST = 32
_LATER_S = 0.001


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """The size of it: by default of a target of 70B parameters, whose forward takes 19 ms on a large GPU."""

    hidden: int = 8192
    requests: int = 32
    tokens: int = 4
    rounds: int = 40
    forward_s: float = 0.019
    prompt: int = 8192
    chunk: int = 512

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        return 2 * len(LAYERS) * self.hidden


@dataclass(slots=True)
class _Sender:
    """A verifier's drafters, of which one has joined, and requests with features."""

    drafters: Drafters
    plan: FeaturePlan
    store: FeatureStore
    requests: dict[int, Request] = field(default_factory=dict[int, Request])

    def begin(self, number: int, prompt: int, slots: range) -> Request:
        submit = Submit(number, (1,) * prompt, SamplingParameters(max_tokens=1 << 19, ignore_eos=True), 7)
        request = accept(submit, share(submit, ()), 64, VOCABULARY)
        request.features = RequestFeatures(self.store, request)
        width = len(LAYERS) * self.plan.hidden
        rows = torch.randn((len(slots), width)).to(torch.bfloat16)
        self.store.keep(np.array(slots, dtype=np.int64), rows)
        self.requests[number] = request
        return request

    def wait(self, until: float) -> None:
        """As in a forward of the device: what comes is taken, and what is pending is sent."""
        while (rest := until - time.monotonic()) > 0:
            poll(self.drafters.channels, rest)
            self.drafters.drain(self.requests)


def measured_features(plan: FeaturePlan) -> dict[str, object]:
    """Of rounds and of a prompt, by each way that rows go on one machine."""
    torch.set_num_threads(1)
    found = {name: {"rounds": _rounds(plan, way), "prompt": _prompt(plan, way)} for name, way in WAYS.items()}
    return {"benchmark": "features", "plan": asdict(plan), "ways": found}


def _rounds(plan: FeaturePlan, way: str) -> dict[str, float]:
    """How long a round holds the verifier, what both ends compute for it, and when all its rows are there."""
    rows = plan.requests * plan.tokens * plan.rounds
    ended: list[float] = []
    held: list[float] = []
    with _joined(plan, plan.requests * _SLOTS_A_REQUEST, rows, way) as (sender, peer):
        for number in range(plan.requests):
            first = number * _SLOTS_A_REQUEST
            request = sender.begin(number, 1, range(first, first + _SLOTS_A_REQUEST))
            sender.drafters.open(request)
        began_cpu = time.thread_time()
        for turn in range(plan.rounds):
            began = time.thread_time()
            for request in sender.requests.values():
                _commit(request, plan.tokens, turn)
                sender.drafters.outcome(request)
            sender.drafters.flush()
            ended.append(time.monotonic())
            held.append(time.thread_time() - began)
            sender.wait(ended[-1] + plan.forward_s)
        cpu_s = _spent(sender, began_cpu)
        found = _answer(peer)
    late = [
        max(when for _, end, when in found["arrived"] if end == plan.tokens * (turn + 1)) - ended[turn]
        for turn in range(plan.rounds)
        if sum(end == plan.tokens * (turn + 1) for _, end, _ in found["arrived"]) >= plan.requests
    ]
    return {
        "rounds": plan.rounds,
        "mb": round(plan.requests * plan.tokens * plan.row_bytes / 1e6, 2),
        "held_ms": round(1e3 * statistics.median(held), 3),
        "verifier_cpu_ms": round(1e3 * cpu_s / plan.rounds, 3),
        "reader_cpu_ms": round(1e3 * found["cpu_s"] / plan.rounds, 3),
        "read_whole": sum(each < plan.forward_s for each in late),
        "read_after_ms": round(1e3 * statistics.median(late), 3) if late else -1.0,
        "rows_read": found["rows"],
        "rows": rows,
        "told_again": found["opens"] - plan.requests,
    }


def _prompt(plan: FeaturePlan, way: str) -> dict[str, float]:
    """Of a prompt that is computed in chunks faster than they can be sent."""
    with _joined(plan, plan.prompt, plan.prompt, way) as (sender, peer):
        request = sender.begin(0, plan.prompt + 1, range(plan.prompt))
        sender.drafters.open(request)
        began, began_cpu = time.monotonic(), time.thread_time()
        for start in range(0, plan.prompt, plan.chunk):
            request.slots.extend(range(start, min(start + plan.chunk, plan.prompt)))
            sender.drafters.read(request)
            sender.drafters.flush()
        cpu_s = _spent(sender, began_cpu, request)
        found = _answer(peer)
    took = max(when for _, _, when in found["arrived"]) - began
    size = plan.prompt * plan.row_bytes
    return {
        "mb": round(size / 1e6, 1),
        "seconds": round(took, 3),
        "gb_per_s": round(size / took / 1e9, 2),
        "verifier_cpu_s": round(cpu_s, 3),
        "reader_cpu_s": round(found["cpu_s"], 3),
        "rows_read": found["rows"],
    }


def _commit(request: Request, tokens: int, turn: int) -> None:
    """A round's tokens, whose rows are where others were: nobody reads what they say."""
    first = request.number * _SLOTS_A_REQUEST
    request.slots.extend([first + (turn * tokens + place) % _SLOTS_A_REQUEST for place in range(tokens)])
    request.tokens.extend(range(tokens))
    if request.replica is not None:
        request.replica.advance(tuple(range(tokens)))


def _spent(sender: _Sender, began_cpu: float, request: Request | None = None) -> float:
    """What this thread has computed until the reader hangs up, because it has read all or waits in vain."""
    deadline = time.monotonic() + _PATIENCE_S
    while sender.drafters.alive:
        if time.monotonic() > deadline:
            raise SsdError("the process that reads does not end")
        sender.wait(time.monotonic() + _LATER_S)
        if request is not None:
            sender.drafters.read(request)
            sender.drafters.flush()
    return time.thread_time() - began_cpu


def _answer(peer: "subprocess.Popen[str]") -> dict[str, Any]:
    """What the reader prints."""
    if peer.stdout is None:
        raise SsdError("the process that reads has no pipe")
    answer: dict[str, Any] = json.loads(peer.stdout.read())
    return answer


@contextmanager
def _joined(
    plan: FeaturePlan, slots: int, rows: int, way: str
) -> Generator[tuple[_Sender, "subprocess.Popen[str]"]]:
    """A verifier's side, which the reader has joined."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        listener = Listener.unix(Path(folder, "s"))
        layers = ",".join(map(str, LAYERS))
        command = [sys.executable, str(_READER), listener.address, layers, str(rows), way]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
            drafters = Drafters(hello_of(LAYERS), time.perf_counter)
            drafters.admission.offer(LAYERS)
            sender = _Sender(drafters, plan, FeatureStore(LAYERS, slots * plan.row_bytes, slots))
            try:
                channel = listener.await_peer(_PATIENCE_S)
                if channel is None:
                    raise SsdError("the process that reads does not come")
                drafters.connect(channel)
                while not drafters.alive:
                    sender.wait(time.monotonic() + _LATER_S)
                yield sender, peer
            finally:
                peer.terminate()
                for each in drafters.channels:
                    each.close()
                listener.close()
