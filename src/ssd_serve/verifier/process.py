"""The verifier process: receives requests, runs rounds, sends tokens and status, and accepts drafters."""

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from msgspec.structs import replace

from ssd_serve.base.contention import CoreContention, ThreadLimit, core_seconds, family_seconds
from ssd_serve.base.devices import available_cores
from ssd_serve.base.draft_messages import Message
from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.base.errors import EngineDeadError
from ssd_serve.base.logs import Logger, RateLimitedLogger, carry_library_logs, get_logger
from ssd_serve.base.messages import (
    AcceptanceHealth,
    CostEstimate,
    DecisionReason,
    Progress,
    ServerMessage,
    Status,
    Submit,
    SubmitChoices,
)
from ssd_serve.base.resources import Heap, settle_memory
from ssd_serve.sampling.grammar import Grammars
from ssd_serve.transport.channel import Channel, Waitable, poll
from ssd_serve.transport.listener import Listener
from ssd_serve.transport.rank_sockets import RankFiles
from ssd_serve.verifier.assembly import AssembledVerifier, assemble_verifier, ready_report
from ssd_serve.verifier.drafters.admission import FROM_DRAFTERS
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.ranks import LeadingRank

_STATUS_S = 1.0
_REST_AFTER_S = 30.0
"""Seconds without work after which memory is given back."""
_KEPT_TOKENS = 4096
"""Tokens of the prefix cache that an idle verifier keeps: the latest conversation goes on without a prefill."""
_COMPILING_S = 0.002
"""Wait of the loop while grammars are compiled and nothing else runs."""
_CONNECT_S = 3600.0
_JOIN_S = 60.0
_MAX_UNSENT = 4096
_MAX_ACCEPTED = 16
"""Drafters in one turn of the loop."""
_REMEMBER_S = 5.0
_WHY_S = 1.0
"""Least seconds between two log lines of the decision's reason."""
_BUSY_S = 60.0
"""Least seconds between two log lines that the machine is busy."""


def run(config: EngineConfig, servers: Listener, joining: Listener, files: RankFiles) -> int:
    """Load, serve until the server is gone. Returns the exit code.

    `servers`, `joining`: where the server and drafters connect. `files`: where this process, rank 0 of the
    target, meets the others if there are any.
    """
    log = get_logger("verifier", config.log_level, config.log_format)
    carry_library_logs(log)
    others = _others(config, log)
    ranks = LeadingRank(config, files) if config.tensor_parallel > 1 else None
    server = _await_server(servers)
    verifier = assemble_verifier(config, lambda text: _say(server, log, text), log=log, ranks=ranks)
    settle_memory()
    loop = VerifierLoop(
        server, [joining, *others], verifier.engine, lambda: whole_status(verifier), verifier.times.store, log
    )
    if config.mode is Mode.SSD:
        _say(server, log, "waiting for the drafters")
        loop.await_drafters(_JOIN_S, max(1, config.joining_drafters))
    server.send(ready_report(config, verifier))
    log.info(
        "ready", target=verifier.facts.name, mode=config.mode.value, step_ms=round(1e3 * verifier.step_s, 2)
    )
    loop.run()
    return 0


class VerifierLoop:
    """Moves messages between the server and the engine, and steps the engine while it is busy."""

    def __init__(
        self,
        server: Channel,
        joining: Sequence[Listener],
        engine: Engine,
        status: Callable[[], Status],
        store_times: Callable[[], None],
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The first of `joining` is for this server's own drafters. `store_times` stores measurements for the
        next start; it is called periodically, since a process may be killed."""
        self._server = server
        self._joining = joining
        self._engine = engine
        self._unsent: deque[Message] = deque()
        self._status_at = 0.0
        self._store_times = store_times
        self._status = status
        parent = os.getppid()  # it started the drafters too
        self._contention = CoreContention(
            worked=lambda: core_seconds(available_cores()), own=lambda: family_seconds(parent)
        )
        self._threads = ThreadLimit(torch.get_num_threads, torch.set_num_threads)
        self._reporter = EngineLogReporter(engine, log)
        self._held = GrammarQueue(engine.grammars)
        self._remembered_at = time.monotonic()
        self._heap = Heap()
        self._clock = clock
        self._busy_at: float | None = clock()
        """Time of the last round; None once memory was given back."""

    def await_drafters(self, timeout_s: float, count: int) -> None:
        """Wait until `count` asynchronous drafters have joined. Stop at the timeout, or if requests of an
        earlier verifier are waiting."""
        self._engine.drain()
        deadline = time.monotonic() + timeout_s
        while self._engine.drafters.num_async < count and time.monotonic() < deadline:
            if self._server.wait(0.0):  # taken once the server knows that this verifier can generate
                return
            self._accept()
            self._sleep(0.05)
            self._engine.drain()

    def run(self) -> None:
        """Serve until the server is gone."""
        while not self._server.closed:
            self._turn()

    def _turn(self) -> None:
        for message in self._server.receive():
            if isinstance(message, ServerMessage) and not self._held.hold(message):
                self._unsent.extend(self._engine.handle(message))
        for held in self._held.released():
            self._unsent.extend(self._engine.handle(held))
        self._accept()
        if self._engine.busy and len(self._unsent) < _MAX_UNSENT:
            self._busy_at = self._clock()
            reports = self._engine.step()
            if not self._engine.busy:  # before the last tokens: a client with all tokens reads final counters
                self._unsent.append(self._current_status())
            self._unsent.extend(reports)
        else:
            self._sleep(_COMPILING_S if self._held else _STATUS_S / 2)
            self._engine.drain()
            self._rest_when_idle()
        self._report()

    def _rest_when_idle(self) -> None:
        if self._busy_at is None or self._engine.busy or self._clock() - self._busy_at < _REST_AFTER_S:
            return
        self._busy_at = None
        self._engine.rest(_KEPT_TOKENS)
        self._heap.trim()

    def _sleep(self, timeout_s: float) -> None:
        sources: list[Waitable] = [self._server, *self._joining, *self._engine.drafters.channels]
        poll(sources, timeout_s)

    def _accept(self) -> None:
        for place, listener in enumerate(self._joining):
            for _ in range(_MAX_ACCEPTED):
                channel = listener.accept(FROM_DRAFTERS)
                if channel is None:
                    break
                self._engine.drafters.admit(channel, channel.peer, remote=place > 0)

    def _current_status(self) -> Status:
        busy, others = self._contention.busy, round(self._contention.others, 1)
        return replace(self._status(), machine_busy=busy, other_cores=others if busy else 0.0)

    def _report(self) -> None:
        """Send what the server will take; a slow server never stops a forward, only the next round."""
        now = time.monotonic()
        self._reporter.report(now)
        if now - self._status_at >= _STATUS_S:
            self._status_at = now
            self._contention.observe()
            self._threads.leave(self._contention.taken, len(available_cores()))
            self._reporter.report_contention(self._contention, now)
            if len(self._unsent) < _MAX_UNSENT:
                self._unsent.append(self._current_status())
            self._reporter.report_health()
            self._engine.drafters.heartbeat()
        if now - self._remembered_at >= _REMEMBER_S:
            self._remembered_at = now
            self._store_times()
        while self._unsent and self._server.post(self._unsent[0]):
            self._unsent.popleft()
        self._server.flush()
        self._heap.trim_when_due()


def _others(config: EngineConfig, log: Logger) -> list[Listener]:
    """Return the listener for remote drafters, if they may join."""
    if not config.drafter_address or config.mode is not Mode.SSD:
        return []
    limited = RateLimitedLogger(log)  # any process that reaches the port can cause refusals
    return [
        Listener.at(
            config.drafter_address,
            config.cluster_key or "",
            lambda why: limited.warning("drafter refused", reason=why),
        )
    ]


def _await_server(servers: Listener) -> Channel:
    channel = servers.await_peer(_CONNECT_S)
    if channel is None:
        raise EngineDeadError("the server never connected to the verifier")
    # A later connection is for the next verifier.
    servers.close()
    return channel


def _say(server: Channel, log: Logger, text: str) -> None:
    log.debug(text)
    server.send(Progress(text))


class GrammarQueue:
    """Messages that wait, in order, until the grammars of their requests are compiled."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._held: deque[tuple[ServerMessage, Future[None] | None]] = deque()
        self._numbers: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, message: ServerMessage) -> bool:
        """Queue a message if its grammar must be compiled, or its request waits for that; return whether it was
        queued."""
        numbers, compiling = _numbers(message), None
        if isinstance(message, Submit | SubmitChoices):
            grammar = message.parameters.grammar
            if not grammar or self._grammars is None or self._grammars.is_compiled(grammar):
                return False
            compiling = self._thread.submit(self._grammars.compile, grammar)
        elif not any(self._numbers[number] for number in numbers):
            return False
        self._held.append((message, compiling))
        self._numbers.update(numbers)
        return True

    def released(self) -> list[ServerMessage]:
        """Return messages that no longer wait; the engine refuses a grammar that could not be compiled."""
        found: list[ServerMessage] = []
        while self._held and (self._held[0][1] is None or self._held[0][1].done()):
            message, _ = self._held.popleft()
            self._numbers.subtract(_numbers(message))
            found.append(message)
        self._numbers = +self._numbers
        return found


def _numbers(message: ServerMessage) -> list[int]:
    if isinstance(message, SubmitChoices):
        return [each.request for each in message.choices]
    return [message.request]


class EngineLogReporter:
    """Logs changes of an engine's state."""

    def __init__(self, engine: Engine, log: Logger) -> None:
        self._engine = engine
        self._log = log
        self._health = engine.monitor.health
        self._why: DecisionReason | None = None
        self._why_logged_at = -_WHY_S
        self._shortages = 0
        self._busy = False
        self._busy_logged_at = -math.inf

    def report(self, now: float) -> None:
        """Log lack of memory, and changes of the reason why rounds speculate or not; `now`: seconds of any
        clock."""
        backoff, decision = self._engine.oom_backoff, self._engine.decision
        if backoff.count != self._shortages:
            self._shortages = backoff.count
            self._log.warning(
                "the device's memory ran out in a round: it was run again without trees and with fewer prompt "
                "tokens, and rounds stay small for a while",
                reason=backoff.reason,
                times=backoff.count,
                prompt_tokens=backoff.chunk,
                advice="lower SSD_KV_MEMORY_MB or SSD_PREFILL_CHUNK",
            )
        if decision is None or decision.why is self._why or now - self._why_logged_at < _WHY_S:
            return
        self._why, self._why_logged_at = decision.why, now
        self._log.debug(
            "speculates" if decision.nodes else "does not speculate",
            why=decision.why.value,
            mode=decision.layout,
            nodes=decision.nodes,
            waited_s=decision.waited_s,
            chosen=_price(decision.chosen),
            other=_price(decision.other),
        )

    def report_health(self) -> None:
        """Log when acceptance collapses or recovers: no text changes, so that nothing else would show it."""
        health = self._engine.monitor.health
        if health is self._health:
            return
        self._health = health
        if health is AcceptanceHealth.GOOD:
            self._log.info("speculation recovered")
        else:
            self._log.warning("speculation gives nothing", reason=health.value, advice="run `ssd doctor`")

    def report_contention(self, contention: CoreContention, now: float) -> None:
        """Log when the machine becomes busy, at most once a minute, and when it is no longer; `now`: seconds of
        any clock."""
        if contention.busy == self._busy or (contention.busy and now - self._busy_logged_at < _BUSY_S):
            return
        self._busy = contention.busy
        if not self._busy:
            self._log.info("this machine is no longer busy")
            return
        self._busy_logged_at = now
        self._log.warning(
            "this machine is busy: other programs take cores that the target needs, and answers are slower",
            other_cores=round(contention.others, 1),
            waited_percent=round(100 * contention.waited),
        )


def _price(price: CostEstimate | None) -> str:
    return f"{price.rate:.1f} tokens/s, {1e3 * price.seconds:.1f} ms a round" if price else "unknown"


def whole_status(verifier: AssembledVerifier) -> Status:
    """Return the status of a verifier: that of its engine, with figures of attention."""
    status = engine_status(verifier.engine)
    differences = verifier.differences.count
    return replace(status, attention=verifier.facts.attention, attention_differences=differences)


def engine_status(engine: Engine) -> Status:
    scheduler, times = engine.scheduler, engine.times
    prefix = scheduler.prefix
    mode, gains = engine.planner.mode, engine.planner.mode_gains()
    return Status(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        slots_used=scheduler.pool.used - (prefix.evictable if prefix else 0),
        slots=scheduler.pool.slots,
        prefix_queries=prefix.queries if prefix else 0,
        prefix_hits=prefix.hits if prefix else 0,
        prompt_tokens=engine.totals.prompt_tokens,
        generation_tokens=engine.totals.figures.tokens,
        preemptions=scheduler.preemptions,
        drafters_alive=engine.drafters.num_responsive,
        drafter_restarts=engine.drafters.rejoins,
        drafter_requests=engine.drafters.num_requests,
        drafter_moves=engine.drafters.moves,
        expansions=engine.drafters.expansions,
        awaited_expansions=engine.totals.awaited_expansions,
        late_expansions=engine.totals.late_expansions,
        expected_tokens=engine.totals.expected_tokens,
        given_tokens=engine.totals.given_tokens,
        totals=engine.figures,
        forward_s=times.forward_s,
        wait_s=times.wait_s,
        host_s=times.host_s,
        layout=mode.value if mode else "",
        layout_gains=gains,
        decision=engine.decision,
        health=engine.monitor.health,
        memory_shortages=engine.oom_backoff.count,
    )
