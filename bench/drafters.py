"""`ssd bench drafters`: what more drafters give a crowd of requests, and what they cost the verifier's host.

In virtual time (`ablate_rig.py`): every drafter has a device of its own that a table times. Speculation
throughput is what reaches the verifier's replicas a second while all requests decode. The host's time is
processor time of this machine. Knows engines and figures; not how drafters share requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ssd_serve.bench.ablate_rig import Pair
from ssd_serve.bench.drafters_rig import DraftedEngine, Host
from ssd_serve.bench.machine import hardware, versions
from ssd_serve.bench.prompts import Prompt
from ssd_serve.errors import SsdError
from ssd_serve.messages import Committed, Finished, SamplingParameters, Submit
from ssd_serve.models.interface import Model


@dataclass(frozen=True, slots=True)
class Plan:
    """`requests` run at once, with prompts of `prompt` tokens; `width` nodes of a draft step get `candidates`
    each."""

    drafters: tuple[int, ...] = (1, 2, 4)
    requests: int = 16
    prompt: int = 24
    tokens: int = 128
    temperature: float = 1.0
    width: int = 32
    candidates: int = 16
    depth: int = 16


@dataclass(frozen=True, slots=True)
class _Seen:
    """Counters at one moment."""

    virtual_s: float
    host_s: float
    drafters_host_s: float
    rounds: int
    rows: int
    expansions: int
    candidates: int
    tokens: int
    request_rounds: int
    hits: int
    misses: int
    moves: int


def run_drafters(
    pair: Pair,
    load_draft: Callable[[], Model],
    prompts: Sequence[Prompt],
    plan: Plan,
    table: str,
    say: Callable[[str], None],
) -> dict[str, object]:
    """All numbers of drafters; `load_draft` gives each drafter a model of its own. Checks that all of them
    give the same texts."""
    drafts = [pair.draft, *(load_draft() for _ in range(max(plan.drafters) - 1))]
    rows: list[dict[str, object]] = []
    texts: dict[int, tuple[int, ...]] = {}
    for count in plan.drafters:
        say(f"{count} drafter{'s' * (count > 1)}")
        row, found = _run(pair, drafts[:count], prompts, plan)
        if texts and found != texts:
            raise SsdError(f"{count} drafters changed a text")
        texts = found
        rows.append({"drafters": count, **row})
    first = next((row for row in rows if row["drafters"] == 1), rows[0])
    for row in rows:
        row["scaling"] = _number(row["candidates_per_s"]) / _number(first["candidates_per_s"])
    return {
        "benchmark": "drafters",
        "table": table,
        "plan": asdict(plan),
        "rows": rows,
        "hardware": hardware(),
        "versions": versions(),
    }


def _run(
    pair: Pair, drafts: Sequence[Model], prompts: Sequence[Prompt], plan: Plan
) -> tuple[dict[str, object], dict[int, tuple[int, ...]]]:
    rig = DraftedEngine(pair, drafts, plan.requests, plan.width, plan.candidates, plan.depth)
    rig.engine.drain()
    crowd = _Crowd(rig)
    parameters = SamplingParameters(temperature=plan.temperature, max_tokens=plan.tokens, ignore_eos=True)
    for number in range(plan.requests):
        prompt = prompts[number % len(prompts)]
        crowd.submit(Submit(number, prompt.tokens[: plan.prompt], parameters, prompt.seed))
    first = crowd.run_until(lambda: crowd.decoding)
    last = crowd.run_until(lambda: crowd.ended)
    crowd.run_until(lambda: False)
    return _figures(first, last), {number: tuple(tokens) for number, tokens in crowd.texts.items()}


class _Crowd:
    """Requests that run together, and what was seen of them."""

    def __init__(self, rig: DraftedEngine) -> None:
        self._rig = rig
        self._host = Host(rig.not_host)
        self.texts: dict[int, list[int]] = {}
        self.ended = False
        """Whether the first has ended."""

    @property
    def decoding(self) -> bool:
        """Whether all prompts have been read."""
        return self._rig.engine.scheduler.decoding == len(self.texts)

    def submit(self, submit: Submit) -> None:
        """One more."""
        self.texts[submit.request] = []
        if self._rig.engine.submit(submit) is not None:
            raise SsdError("the benchmark's own request was refused")

    def run_until(self, condition: Callable[[], bool]) -> _Seen:
        """Rounds until the condition holds or all is done."""
        engine = self._rig.engine
        while engine.busy and not condition():
            for report in self._host.of(engine.step):
                if isinstance(report, Committed):
                    self.texts[report.request].extend(report.tokens)
                self.ended |= isinstance(report, Finished)
        return self._seen()

    def _seen(self) -> _Seen:
        engine, drafters = self._rig.engine, self._rig.drafters
        figures = engine.totals.figures
        return _Seen(
            self._rig.clock.now,
            self._host.seconds,
            drafters.host.seconds,
            engine.clocked.rounds,
            engine.clocked.rows,
            drafters.expansions,
            drafters.candidates,
            figures.tokens,
            figures.rounds,
            figures.hits,
            figures.misses,
            drafters.moves,
        )


def _figures(first: _Seen, last: _Seen) -> dict[str, object]:
    seconds = last.virtual_s - first.virtual_s
    if seconds <= 0:
        raise SsdError("the first request ended before all prompts were read: ask for more tokens")
    rounds = max(1, last.rounds - first.rounds)
    judged = max(1, last.hits - first.hits + last.misses - first.misses)
    return {
        "virtual_s": seconds,
        "rounds": rounds,
        "expansions_per_s": (last.expansions - first.expansions) / seconds,
        "candidates_per_s": (last.candidates - first.candidates) / seconds,
        "tokens_per_s": (last.tokens - first.tokens) / seconds,
        "tokens_per_round": (last.tokens - first.tokens) / max(1, last.request_rounds - first.request_rounds),
        "rows_per_round": (last.rows - first.rows) / rounds,
        "hit_rate": (last.hits - first.hits) / judged,
        "moves": last.moves - first.moves,
        "host_us_per_round": 1e6 * (last.host_s - first.host_s) / rounds,
        "drafters_host_us_per_round": 1e6 * (last.drafters_host_s - first.drafters_host_s) / rounds,
    }


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
