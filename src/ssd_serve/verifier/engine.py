"""The verifier's engine: one step is one round.

    drain growth -> choose work -> wait for growth where it pays -> launch -> listen -> finish: sample, walk,
    commit, publish

It owns requests from `submit` to `Finished`. It knows no HTTP, no text, and not how drafts are made.
"""

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ssd_serve.base.errors import DeviceMemoryError, GrammarError
from ssd_serve.base.messages import (
    Committed,
    DecisionMessage,
    DecisionReason,
    Figures,
    Finish,
    Finished,
    PromptProgress,
    Refused,
    ServerMessage,
    Submit,
    SubmitChoices,
    VerifierReport,
)
from ssd_serve.cache.replica import Replica
from ssd_serve.models.memory import release_memory
from ssd_serve.sampling.grammar import Grammars
from ssd_serve.sampling.thinking import output_state
from ssd_serve.verifier.acceptance import (
    AcceptanceMonitor,
    DraftedLevels,
    TimeTotals,
    Totals,
    drafted_levels,
)
from ssd_serve.verifier.control.budget import RankedNode
from ssd_serve.verifier.control.planner import Round, RoundPlanner
from ssd_serve.verifier.drafters.pool import DrafterPool
from ssd_serve.verifier.request import Request, RequestLimits, SharedPromptState, create_request, shared_state
from ssd_serve.verifier.round import InFlight, RequestStep, Rounds, TreeTokens, Walk
from ssd_serve.verifier.scheduler import OomBackoff, ScheduledChunk, Scheduler
from ssd_serve.verifier.tracing import RequestTrace, RoundTimes

_WAKING_S = 0.0015
"""Listening ends this long before the forward should, because a poll may oversleep by a millisecond."""


class Engine:
    """Verifies rounds for all requests."""

    def __init__(
        self,
        rounds: Rounds,
        scheduler: Scheduler,
        drafters: DrafterPool,
        planner: RoundPlanner,
        bounds: RequestLimits,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: None where no output can be constrained."""
        self.grammars = grammars
        self._round_began = 0.0
        self._times = RoundTimes()
        self.scheduler = scheduler
        self.drafters = drafters
        self.planner = planner
        self.monitor = AcceptanceMonitor()
        self.times = TimeTotals()
        self.totals = Totals()
        self.oom_backoff = OomBackoff(scheduler.prefill_chunk)
        self.decision: DecisionMessage | None = None
        """The last round's; None before the first."""
        self._rounds = rounds
        self._bounds = bounds
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._active: dict[int, Request] = {}
        self._levels = DraftedLevels()
        self._looked_up = 0
        """Accepted nodes of the round that only lookups had proposed."""

    @property
    def busy(self) -> bool:
        """True if `step` has work."""
        return bool(self._requests)

    @property
    def figures(self) -> Figures:
        """Figures of all requests since start."""
        running = [request.acceptance for request in self._requests.values()]
        return self.totals.snapshot(running, self.drafters.sources.names)

    def handle(self, message: ServerMessage) -> Sequence[Refused | Finished]:
        """Handle a message of a front end; return the immediate replies."""
        if isinstance(message, Submit | SubmitChoices):
            return self.submit_all(message)
        if isinstance(message, Finish):
            finished = self.finish(message.request)
            return [finished] if finished is not None else []
        self.abort(message.request)
        return []

    def submit(self, message: Submit) -> Refused | Finished | None:
        """Queue one request; None: it is queued."""
        return next(iter(self.submit_all(message)), None)

    def submit_all(self, message: Submit | SubmitChoices) -> list[Refused | Finished]:
        """Queue a request, or the choices of a prompt; return refusals, and the end of complete outputs."""
        each = message.each() if isinstance(message, SubmitChoices) else [message]
        wrong = self._bounds.impossible(message.prompt, message.parameters.max_tokens)
        if wrong is not None:
            return [Refused(one.request, *wrong) for one in each]
        shared: SharedPromptState | None = None
        answers: list[Refused | Finished] = []
        for one in each:
            shared = shared or shared_state(one, self._bounds.eos)
            answer = self._impossible_choice(one) or self._accept(one, shared)
            if answer is not None:
                answers.append(answer)
        return answers

    def _accept(self, message: Submit, shared: SharedPromptState) -> Refused | Finished | None:
        """Queue a request, unless it is complete or its output does not match its grammar."""
        bounds = self._bounds
        try:
            grammar = output_state(message.parameters, message.output, bounds.vocabulary, self.grammars)
        except GrammarError as error:
            return Refused(message.request, f"structured output: {error}", "grammar")
        request = create_request(message, shared, bounds, grammar)
        ended = request.ended(request.tokens[-1], request.remaining_tokens) if request.generated else ""
        if ended:
            return self._finished(request, ended)
        request.levels = self._levels.next_text()
        request.trace = RequestTrace(self._clock) if request.options.trace else None
        self._requests[request.number] = request
        self.scheduler.submit(request)
        self.totals.prompt_tokens += request.prompt_length
        return None

    def abort(self, number: int) -> None:
        """Free everything of a request now; unknown numbers are ignored."""
        request = self._requests.pop(number, None)
        if request is not None:
            self._retire(request)

    def finish(self, number: int) -> Finished | None:
        """End a request because the front end found its end; None when it had ended by itself."""
        request = self._requests.pop(number, None)
        if request is None:
            return None
        self._retire(request)
        return Finished(number, "stop", self._final_figures(request))

    def step(self) -> list[VerifierReport]:
        """Run one round over all running requests; returns reports for the front end."""
        started = self._round_began = self._clock()
        self.drain()
        admitted = self._admit()
        chunks = self._schedule()
        if not chunks:
            self._open(admitted)
            return []
        nodes, decision = self.planner.choose(self.scheduler.running, chunks, self._drain_awaited)
        self._open(admitted)
        flight, forward_s, walks = self._compute_or_less(
            self._assign_slots(chunks, nodes[: self.oom_backoff.nodes])
        )
        self.decision = self._launched(decision, flight.nodes)
        self.totals.compare(self.decision, sum([len(walk.tokens) for walk in walks if walk.decoded]))
        if self.drafters.features is not None:
            self.drafters.features.take(flight, walks)
        self._looked_up = 0
        self._times = RoundTimes(started, flight.started, forward_s, decision.waited_s)
        reports = [report for walk in walks for report in self._commit(walk)]
        self.scheduler.pool.free([slot for walk in walks for slot in walk.rejected])
        self.drafters.flush()
        self.oom_backoff.on_success()
        self._account(flight, walks, forward_s, decision.waited_s, self._clock() - started)
        return reports

    def _launched(self, decision: DecisionMessage, nodes: int) -> DecisionMessage:
        """Return the decision with the number of nodes that were launched."""
        if nodes == decision.nodes:
            return decision
        short = DecisionReason.MEMORY if self.oom_backoff.nodes == 0 else DecisionReason.SLOTS
        return replace(decision, nodes=nodes, why=decision.why if nodes else short)

    def rest(self, kept: int) -> None:
        """Evict all but `kept` tokens of the prefix cache, and give the memory of free slots back."""
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.evict(self.scheduler.prefix.size - kept)
        self._rounds.model.release(self.scheduler.pool.free_spans())

    def drain(self) -> None:
        """Handle messages of drafters."""
        self.drafters.drain(self._active)

    def _drain_awaited(self) -> None:
        """Drain and count expansions that a round waited for; all others grew while the target worked."""
        before = self.drafters.expansions
        self.drain()
        self.totals.awaited_expansions += self.drafters.expansions - before

    def _compute_or_less(self, work: Sequence[RequestStep]) -> tuple[InFlight, float, list[Walk]]:
        """Compute a round; if memory runs out, once more with fewer rows, which changes no token."""
        try:
            return self._compute(work)
        except DeviceMemoryError as error:
            reason = str(error)
        # Outside the handler the error no longer keeps the round's tensors.
        rows = [len(each.chunk.slots) for each in work]
        self.oom_backoff.on_oom(sum(count for count in rows if count > 1), reason)
        for each in work:
            self.scheduler.pool.free(each.node_slots)
        release_memory()
        chunks = self.scheduler.shrink([each.chunk for each in work], self.oom_backoff.chunk)
        return self._compute([RequestStep(chunk) for chunk in chunks])

    def _compute(self, work: Sequence[RequestStep]) -> tuple[InFlight, float, list[Walk]]:
        """Run a round's forward; return it with its seconds and the walks."""
        flight = self._rounds.launch(work)
        forward_s = self._listen(flight)
        return flight, forward_s, self._rounds.finish(flight)

    def _listen(self, flight: InFlight) -> float:
        """Take growth while the device works and once more when it is done; returns the forward's seconds."""
        if not flight.ready():
            ends = flight.started + self.planner.cost.seconds(flight.rows, flight.reading) - _WAKING_S
            while not flight.ready() and self.drafters.wait(ends - self._clock(), in_flight=True):
                self.drain()
        forward_s = flight.wait()
        self.drain()
        return forward_s

    def _admit(self) -> Sequence[Request]:
        admitted = self.scheduler.admit()
        for request in admitted:
            self._active[request.number] = request
            if request.first_scheduled_at is None:
                request.first_scheduled_at = self._round_began
        return admitted

    def _open(self, admitted: Sequence[Request]) -> None:
        """Open requests at the drafters, once the round has its mode: a drafter that pauses must not prefill."""
        for request in admitted:
            if request.number in self._active:
                self.drafters.open(request)

    def _schedule(self) -> list[ScheduledChunk]:
        scheduler, decoding = self.scheduler, self.scheduler.decoding
        reading = decoding < len(scheduler.running)
        rows = self.planner.prefill_tokens(decoding, self.oom_backoff.chunk) if reading else 0
        chunks, preempted = scheduler.plan(rows)
        for request in preempted:
            self._active.pop(request.number, None)
            self.drafters.close(request)
            request.replica = None
        return chunks

    def _assign_slots(
        self, chunks: Sequence[ScheduledChunk], chosen: Sequence[RankedNode]
    ) -> list[RequestStep]:
        """Give the chosen nodes slots. They fall in reach, so a prefix of each request's keeps parents
        first."""
        if not chosen:
            return [RequestStep(chunk) for chunk in chunks]
        trees = [TreeTokens() for _ in chunks]
        for _, index, token, parent in chosen:
            trees[index].add(token, parent)
        slots = self.scheduler.tree_slots(chunks, [len(tree) for tree in trees])
        return [
            RequestStep(chunk, tree.first(len(given)), given)
            for chunk, tree, given in zip(chunks, trees, slots, strict=True)
        ]

    def _commit(self, walk: Walk) -> list[VerifierReport]:
        """Keep the accepted slots, extend the output, and report to drafters and front end."""
        work, request = walk.work, walk.work.chunk.request
        request.slots.extend([*work.chunk.slots, *walk.kept])
        request.scored += len(walk.prompt_logprobs)
        recorder, sources = request.trace, self.drafters.sources
        trace = None if recorder is None else recorder.round(walk, self._times, sources.names)
        committed = Committed(request.number, walk.tokens, walk.logprobs, walk.prompt_logprobs, trace)
        if not walk.tokens:
            self.drafters.send_features(request)
            if request.options.return_progress and not request.generated:
                committed = replace(committed, progress=self._progress(request))
            return [committed] if walk.prompt_logprobs or committed.progress else []
        before = request.generated
        if request.first_scheduled_at is not None and not request.figures.prompt_s:
            request.figures.prompt_s = self._clock() - request.first_scheduled_at
        request.tokens.extend(walk.tokens)
        if request.counts is not None:
            request.counts.extend(walk.tokens)
        failed = _follow(request, walk.tokens)
        self._advance(walk, request, first=before == 0 and not len(work.tree))
        if not walk.ended and not failed:
            return [committed]
        del self._requests[request.number]
        self._retire(request)
        if walk.ended:
            return [committed, self._finished(request, walk.ended)]
        return [committed, Finished(request.number, "error", self._final_figures(request), message=failed)]

    def _progress(self, request: Request) -> PromptProgress:
        time_ms = round(1e3 * (self._clock() - (request.first_scheduled_at or 0.0)))
        cached = request.figures.cached_prompt_tokens
        return PromptProgress(len(request.slots), request.prompt_length, cached, time_ms)

    def _finished(self, request: Request, why: str) -> Finished:
        stop_token = request.tokens[-1] if why == "stop" else None
        return Finished(request.number, why, self._final_figures(request), stop_token)

    def _final_figures(self, request: Request) -> Figures:
        return request.acceptance.add_to(request.figures, self.drafters.sources.names)

    def _advance(self, walk: Walk, request: Request, first: bool) -> None:
        """Move the replica's root and publish the outcome; count the round unless it ended the prompt."""
        replica = request.replica
        if replica is None:
            return
        rows = walk.work.tree
        if not first:
            sources = request.acceptance.count(replica, rows.tokens, rows.parents, rows.depths, walk.accepted)
            lookups = self.drafters.lookup_sources if len(rows) else 0
            accepted, levels = drafted_levels(sources, rows.parents, walk.accepted, lookups)
            request.levels.observe(accepted, levels, len(walk.tokens))
            self._levels.observe(accepted, levels, len(walk.tokens) / max(1, len(self._active)))
            self._looked_up += len(walk.accepted) - accepted
        hit = replica.advance(walk.tokens).hit
        self.totals.late_expansions += replica.take_late()
        if not walk.ended:
            self.drafters.send_outcome(request)
        working = self.drafters.working
        if working and not first:
            self.monitor.observe(0 in walk.accepted if len(rows) else None, hit)
        _count((request.figures, self.totals.figures), walk, first, replica if working else None, hit)

    def _retire(self, request: Request) -> None:
        self.totals.acceptance.add(request.acceptance)
        if self._active.pop(request.number, None) is not None:
            self.drafters.close(request)
        self.scheduler.remove(request)

    def _account(
        self, flight: InFlight, walks: Sequence[Walk], forward_s: float, waited_s: float, total_s: float
    ) -> None:
        self.times.add(flight.rows, forward_s, waited_s, total_s)
        decoding = [walk for walk in walks if walk.decoded]
        if decoding:
            self.monitor.judge(self.drafters.drafting)
        if flight.result.includes_capture:
            return  # its time does not predict later rounds
        slots = sum(len(walk.work.chunk.slots) for walk in walks)
        self.planner.observe(
            Round(
                requests=len(decoding),
                prompts=len(walks) - len(decoding),
                prefill_tokens=slots - len(decoding),
                rows=flight.rows,
                reading=flight.reading,
                tokens=sum(len(walk.tokens) for walk in decoding),
                looked_up=self._looked_up,
                forward_s=forward_s,
                host_s=total_s - forward_s - waited_s,
                total_s=total_s,
            )
        )

    def _impossible_choice(self, message: Submit) -> Refused | None:
        number, bounds = message.request, self._bounds
        if not bounds.known(message.output):
            return Refused(number, bounds.unknown, "prompt")
        if number in self._requests:
            return Refused(number, "request number is in use", "request")
        if self.scheduler.full() and not message.output:
            return Refused(number, "too many requests are waiting", "", retry_after_s=1.0)
        return None


def _follow(request: Request, tokens: Sequence[int]) -> str:
    """Advance the grammar by the output; return the error of a grammar that is too complex, else an empty text."""
    grammar = request.grammar
    if grammar is None or (grammar.consume(tokens) == len(tokens) and not grammar.error):
        return ""
    return f"the output's grammar could not be followed: {grammar.error or 'a token does not match'}"


def _count(kept: Sequence[Figures], walk: Walk, first: bool, replica: Replica | None, hit: bool) -> None:
    """Add a request's round to figures, of the round that ended its prompt (`first`) only the tokens.
    `replica`: where drafts were expected; `hit`: whether its new root was in it."""
    tree = replica.tree if replica is not None and hit else None
    depth, nodes = (tree.ready_depth(), len(tree)) if tree is not None else (0, 0)
    for figures in kept:
        figures.tokens += len(walk.tokens)
        if first:
            continue
        figures.rounds += 1
        figures.drafted += len(walk.work.tree)
        figures.accepted += len(walk.accepted)
        if replica is not None:
            figures.hits += hit
            figures.misses += not hit
            figures.ready_depth += depth
            figures.ready_nodes += nodes
