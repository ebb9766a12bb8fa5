"""Log lines and status messages of an engine. Reads its figures and changes nothing."""

from msgspec.structs import replace

from ssd_serve.base.logs import Logger
from ssd_serve.base.messages import AcceptanceHealth, CostEstimate, DecisionReason, Status
from ssd_serve.verifier.assembly import AssembledVerifier
from ssd_serve.verifier.engine import Engine

_WHY_S = 1.0
"""Least seconds between two log lines of the decision's reason."""


class EngineLogReporter:
    """Logs changes of an engine's state."""

    def __init__(self, engine: Engine, log: Logger) -> None:
        self._engine = engine
        self._log = log
        self._health = engine.monitor.health
        self._why: DecisionReason | None = None
        self._why_told_at = -_WHY_S
        self._shortages = 0

    def report(self, now: float) -> None:
        """Log events of the latest rounds; `now`: seconds of any clock."""
        self._report_oom()
        self._report_decision(now)

    def _report_oom(self) -> None:
        oom_backoff = self._engine.oom_backoff
        if oom_backoff.count == self._shortages:
            return
        self._shortages = oom_backoff.count
        self._log.warning(
            "the device's memory ran out in a round: it was run again without trees and with fewer prompt "
            "tokens, and rounds stay small for a while",
            reason=oom_backoff.reason,
            times=oom_backoff.count,
            prompt_tokens=oom_backoff.chunk,
            advice="lower SSD_KV_MEMORY_MB or SSD_PREFILL_CHUNK",
        )

    def _report_decision(self, now: float) -> None:
        """Why rounds speculate or not, whenever that changes."""
        decision = self._engine.decision
        if decision is None or decision.why is self._why or now - self._why_told_at < _WHY_S:
            return
        self._why, self._why_told_at = decision.why, now
        self._log.debug(
            "speculates" if decision.nodes else "does not speculate",
            why=decision.why.value,
            mode=decision.mode.value,
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


def _price(price: CostEstimate | None) -> str:
    return f"{price.rate:.1f} tokens/s, {1e3 * price.seconds:.1f} ms a round" if price else "unknown"


def whole_status(verifier: AssembledVerifier) -> Status:
    """The status of a verifier: its engine's, with what the engine does not know."""
    status = engine_status(verifier.engine)
    differences = verifier.differences.count
    return replace(status, attention=verifier.facts.attention, attention_differences=differences)


def engine_status(engine: Engine) -> Status:
    """The status of an engine, copied."""
    scheduler, times = engine.scheduler, engine.times
    prefix = scheduler.prefix
    mode, gains = engine.planner.execution.mode, engine.planner.mode_gains()
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
        decision=engine.decision.to_message() if engine.decision is not None else None,
        health=engine.monitor.health,
        memory_shortages=engine.oom_backoff.count,
    )
