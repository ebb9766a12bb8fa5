"""What a front end is told of a verifier every second: the figures of its engine at this moment."""

from msgspec.structs import replace

from ssd_serve.base.messages import Status
from ssd_serve.verifier.assembly import AssembledVerifier
from ssd_serve.verifier.engine import Engine


def whole_status(verifier: AssembledVerifier) -> Status:
    """The status of a verifier: its engine's, with what the engine does not know."""
    status = engine_status(verifier.engine)
    differences = verifier.differences.count
    return replace(status, attention=verifier.facts.attention, attention_differences=differences)


def engine_status(engine: Engine) -> Status:
    """The status of an engine, copied."""
    scheduler, clocked = engine.scheduler, engine.clocked
    prefix = scheduler.prefix
    layout, gains = engine.planner.placing.layout, engine.planner.layout_gains()
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
        drafters_alive=engine.drafters.answering,
        drafter_restarts=engine.drafters.rejoins,
        drafter_requests=engine.drafters.requests,
        drafter_moves=engine.drafters.moves,
        expansions=engine.drafters.expansions,
        awaited_expansions=engine.totals.awaited_expansions,
        late_expansions=engine.totals.late_expansions,
        expected_tokens=engine.totals.expected_tokens,
        given_tokens=engine.totals.given_tokens,
        totals=engine.figures,
        forward_s=clocked.forward_s,
        wait_s=clocked.wait_s,
        host_s=clocked.host_s,
        layout=layout.value if layout else "",
        layout_gains=gains,
        decision=engine.decision.told() if engine.decision is not None else None,
        health=engine.watch.health,
        memory_shortages=engine.shortage.count,
    )
