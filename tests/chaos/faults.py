"""Fault injection: processes that die or hang, lost messages, clients that do not read.

Every fault happens in the middle of the same streams. Their tokens must equal those of an undisturbed run.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec
import psutil  # type: ignore[import-untyped]

from ssd_serve.base.errors import SsdError
from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.base.settings import Settings
from ssd_serve.bench.client import Events, open_client, stream
from ssd_serve.bench.lossless.judge import Judge, first_difference
from ssd_serve.bench.lossless.rig import LoadedPair, Outputs
from ssd_serve.models.hub import resolve_model
from tests.chaos.message_proxy import MessageProxy
from tests.chaos.processes import RunningServer
from tests.chaos.slow_readers import never_read, read_slowly
from tests.message_faults import FaultRates

_BEGUN_TOKENS = 8
"""Tokens that every client has before a fault happens."""
_POLL_S = 0.02
_TEXTS = ("def f(", "import os\n", "class Tree:\n    def", "for index in range(", "# A list of", "try:\n    ")

Heal = Callable[[], dict[str, float]]
"""Function that ends a fault and returns further observations."""
Strike = Callable[[RunningServer, MessageProxy | None], Heal]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that lasts `lasts_s` seconds.

    `noticed` (of the server and the process ids before) becomes True when the server has reacted; None: the
    server need not react. `survives`: the server itself goes on.
    """

    name: str
    strike: Strike
    noticed: Callable[[RunningServer, dict[str, int]], bool] | None = None
    lasts_s: float = 0.0
    survives: bool = True


def _nothing() -> dict[str, float]:
    return {}


def _send(name: str, number: signal.Signals) -> Strike:
    def strike(server: RunningServer, _proxy: MessageProxy | None) -> Heal:
        server.signal(name, number)
        return _nothing

    return strike


def _pause_server(server: RunningServer, _proxy: MessageProxy | None) -> Heal:
    server.signal("server", signal.SIGSTOP)

    def heal() -> dict[str, float]:
        server.signal("server", signal.SIGCONT)
        return {}

    return heal


def _unhealthy(server: RunningServer, _before: dict[str, int]) -> bool:
    return not server.healthy()


def _reaped(server: RunningServer, before: dict[str, int]) -> bool:
    return not psutil.pid_exists(before["drafter-0"])


def _workers_gone(_server: RunningServer, before: dict[str, int]) -> bool:
    return not any(_runs(pid) for name, pid in before.items() if name != "server")


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _messages(rates: FaultRates) -> Strike:
    def strike(_server: RunningServer, proxy: MessageProxy | None) -> Heal:
        if proxy is None:
            raise SsdError("message faults need a proxy")
        before = proxy.changed
        proxy.use(rates, seed=7)

        def heal() -> dict[str, float]:
            proxy.use(None)
            return {"messages_changed": proxy.changed - before}

        return heal

    return strike


PROCESS_FAULTS = (
    Fault("nothing", lambda _server, _proxy: _nothing),
    Fault("kill -9 of the verifier", _send("verifier", signal.SIGKILL), _unhealthy),
    Fault("SIGSTOP of the verifier", _send("verifier", signal.SIGSTOP), _unhealthy),
    Fault("kill -9 of the drafter", _send("drafter-0", signal.SIGKILL), _reaped),
    Fault("SIGSTOP of the drafter", _send("drafter-0", signal.SIGSTOP), _reaped),
    Fault("SIGSTOP of the server", _pause_server, _unhealthy, lasts_s=6.5),
    Fault("clients that never read", lambda server, _proxy: never_read(server.url), lasts_s=2.0),
    Fault("clients that read slowly", lambda server, _proxy: read_slowly(server.url), lasts_s=2.0),
)
MESSAGE_FAULTS = (
    Fault("messages dropped", _messages(FaultRates(drop=0.2)), lasts_s=1.0),
    Fault(
        "messages delayed and duplicated",
        _messages(FaultRates(delay=0.6, duplicate=0.5, max_ticks=10)),
        lasts_s=1.0,
    ),
    Fault("every message dropped", _messages(FaultRates(drop=1.0)), lasts_s=1.0),
)
SERVER_KILLED = Fault("kill -9 of the server", _send("server", signal.SIGKILL), _workers_gone, survives=False)


@dataclass(slots=True)
class ClientStream:
    """A request of one client with the received tokens, their times, and the error."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    tokens: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    error: str = ""

    def body(self) -> dict[str, object]:
        """Return the request, which continues behind the tokens that were received."""
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            "generated_token_ids": [self.tokens],
        }

    def longest_wait(self, since: float) -> float:
        """Return the longest time without a token that ended after `since`, in seconds."""
        gaps = zip(self.times, self.times[1:], strict=False)
        return max((later - sooner for sooner, later in gaps if later > since), default=0.0)

    def fresh(self) -> "ClientStream":
        """Return the same request without tokens."""
        return replace(self, tokens=[], times=[], error="")


def client_streams(url: str, count: int, max_tokens: int) -> list[ClientStream]:
    """Return requests, half of them greedy and half at temperature 1."""
    found: list[ClientStream] = []
    with httpx.Client(base_url=url, timeout=30.0, trust_env=False) as http:
        for number in range(count):
            text = _TEXTS[number // 2 % len(_TEXTS)] + " " * (number // (2 * len(_TEXTS)))
            ids = http.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
            found.append(ClientStream(tuple(ids), 1000 + number, float(number % 2), max_tokens))
    return found


async def run_streams(url: str, streams: Sequence[ClientStream]) -> None:
    """Stream all requests to their ends."""
    async with open_client(url) as http:
        await asyncio.gather(*(_stream(http, each) for each in streams))


async def _stream(http: httpx.AsyncClient, client: ClientStream) -> None:
    events = Events()
    client.error = ""
    if len(client.tokens) == client.max_tokens:
        return

    def take(data: bytes) -> None:
        for chunk in events.feed(data):
            client.error = client.error or chunk.error_message
            client.tokens += chunk.token_ids
            client.times += [time.monotonic()] * len(chunk.token_ids)

    error = await stream(http, msgspec.json.encode(client.body()), take)
    client.error = client.error or error.partition(":")[0]


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """Result of one fault; times are seconds since it happened.

    `lost` tokens never arrived; `wrong` texts differ from the undisturbed ones by more than a near-tie.
    """

    lost: int
    wrong: int
    longest_wait_s: float
    errors: tuple[str, ...]
    noticed_s: float | None = None
    recovered_s: float | None = None
    speculates: bool | None = None
    more: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def harmless(self) -> bool:
        """True if no token was lost or wrong, and a surviving server cut off no client."""
        complete = self.more.get("whole_answers") in (None, self.more.get("clients"))
        return not (self.lost or self.wrong) and complete and (self.recovered_s is None or not self.errors)


async def inject(
    settings: Settings,
    server: RunningServer,
    proxy: MessageProxy | None,
    fault: Fault,
    undisturbed: Sequence[ClientStream],
    clients: Sequence[ClientStream],
) -> FaultOutcome:
    """Start all streams, let the fault happen, and compare what the clients received."""
    before, drafters = server.pids(), server.metric("ssd_drafters_alive")
    restarts = server.metric("ssd_engine_restarts_total")
    streaming = asyncio.create_task(run_streams(server.url, clients))
    while not all(len(each.tokens) >= _BEGUN_TOKENS or each.error for each in clients):
        await asyncio.sleep(0.005)
    struck = time.monotonic()
    heal = await asyncio.to_thread(fault.strike, server, proxy)
    noticing = asyncio.create_task(_noticed(server, fault, before, struck))
    await asyncio.sleep(fault.lasts_s)
    more = await asyncio.to_thread(heal)
    await streaming
    noticed_s = await noticing
    outcome = compare(settings, undisturbed, clients, struck)
    recovered_s = speculates = None
    if fault.survives:
        recovered_s = await asyncio.to_thread(server.await_recovery, set(before), drafters) - struck
        speculates = await asyncio.to_thread(server.speculates)
        more = {**more, "engine_restarts": server.metric("ssd_engine_restarts_total") - restarts}
    return replace(outcome, noticed_s=noticed_s, recovered_s=recovered_s, speculates=speculates, more=more)


async def _noticed(
    server: RunningServer, fault: Fault, before: dict[str, int], struck: float
) -> float | None:
    while fault.noticed is not None:
        if await asyncio.to_thread(fault.noticed, server, before):
            return time.monotonic() - struck
        await asyncio.sleep(_POLL_S)
    return None


def compare(
    settings: Settings, undisturbed: Sequence[ClientStream], clients: Sequence[ClientStream], since: float
) -> FaultOutcome:
    """Compare texts token by token; a first difference is judged in float64, as `ssd bench lossless` does."""
    pairs = list(zip(undisturbed, clients, strict=True))
    differing = {
        number: (one, other)
        for number, (one, other) in enumerate(pairs)
        if (index := first_difference(one.tokens, other.tokens)) is not None and index < len(other.tokens)
    }
    return FaultOutcome(
        lost=sum(max(0, len(one.tokens) - len(other.tokens)) for one, other in pairs),
        wrong=len(differing) - (_near_ties(settings, differing) if differing else 0),
        longest_wait_s=max(each.longest_wait(since) for each in clients),
        errors=tuple(sorted({each.error for each in clients if each.error})),
    )


def _near_ties(settings: Settings, differing: Mapping[int, tuple[ClientStream, ClientStream]]) -> int:
    target, draft = resolve_model(settings.target, "target"), resolve_model(settings.draft_models[0], "draft")
    submits = [
        Submit(
            number,
            one.prompt,
            SamplingParameters(temperature=one.temperature, max_tokens=one.max_tokens, ignore_eos=True),
            one.seed,
        )
        for number, (one, _) in differing.items()
    ]
    plain = Outputs({number: tuple(one.tokens) for number, (one, _) in differing.items()}, 0, 0)
    found = Outputs({number: tuple(other.tokens) for number, (_, other) in differing.items()}, 0, 0)
    judge = Judge(LoadedPair("faults", target, draft))
    return sum(each.near_tie for each in judge.differences(submits, plain, found))


def message_proxy(server: RunningServer) -> MessageProxy:
    """Put a proxy between the verifier and its drafter, which is restarted for that."""
    proxy = MessageProxy(Path(server.run_dir / "drafter.sock"))
    before = server.pids()["drafter-0"]
    psutil.Process(before).kill()
    server.wait(lambda: server.pids().get("drafter-0", before) != before, 30.0)
    server.await_recovery({"drafter-0"}, 1.0)
    return proxy
