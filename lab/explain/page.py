"""The page of `python -m lab.explain`, and its JSON. Knows what was measured and decided, not how."""

from collections.abc import Sequence

import msgspec

from lab.explain.experiment import LayoutChoice, Situation
from lab.explain.measurement import MeasuredPair
from ssd_serve.bench.document import read_as
from ssd_serve.bench.experiment import Result
from ssd_serve.bench.tables import markdown_table
from ssd_serve.models.warmup import LONG_CONTEXT, SHORT_CONTEXT
from ssd_serve.verifier.planning.cost import Reading
from ssd_serve.verifier.planning.layout import Layout

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_HARDLY = 0.05
_NAMES = {Layout.ASYNC: "beside", Layout.SYNC: "inline", Layout.OFF: "plain"}


class _Measured(msgspec.Struct, frozen=True):
    hardware: dict[str, object]


def page(pair: MeasuredPair, question: Situation, decisions: Sequence[LayoutChoice], result: Result) -> str:
    """Markdown: what was measured, then what is decided by it and why."""
    machine = read_as(_Measured, result, "python -m lab.explain").hardware
    lines = [
        f"# What the engine decides for {pair.target} with {pair.draft}",
        "",
        f"Measured on {machine['cpu']}, {machine['cores']} cores.",
        "",
        *_target(pair),
        "",
        *_draft(pair),
        "",
        *_decisions(pair, question, decisions),
    ]
    return "\n".join(lines)


def as_json(pair: MeasuredPair, question: Situation, decisions: Sequence[LayoutChoice]) -> dict[str, object]:
    """The same in plain values; times in seconds."""
    node_s = pair.host.node_s
    return {
        "bench": "explain",
        "target": pair.target,
        "draft": pair.draft,
        "context": question.context,
        "cores": {layout.value: cores for layout, cores in pair.cores.items()},
        "target_s": {
            layout.value: {
                f"{rows}@{context}": _target_s(pair, layout, rows, context) for rows, context in _points()
            }
            for layout in pair.layouts
        },
        "draft_forward_s": {
            layout.value: {str(nodes): seconds for nodes, seconds in each.items()}
            for layout, each in pair.draft_forwards_s.items()
        },
        "draft_width": pair.limits.width,
        "draft_host_s": pair.draft_host_s,
        "host_node_s": node_s,
        "host_round_s": pair.host.seconds(1, 0),
        "decisions": [_decision_json(each) for each in decisions],
    }


def _decision_json(decision: LayoutChoice) -> dict[str, object]:
    return {
        "acceptance": decision.acceptance,
        "requests": decision.requests,
        "takes": decision.taken.value,
        "share_of_rounds": decision.share,
        "layouts": {
            layout.value: {
                "gain": decision.gains[layout],
                "tokens_per_s": each.tokens_per_s,
                "tokens_per_round": each.tokens_per_round,
                "nodes_per_round": each.nodes_per_round,
                "awaited_steps": each.waited_steps,
                "hit_rate": each.hit_rate,
                "node_price_tokens": each.node_price,
                "step_price_tokens": each.step_price,
            }
            for layout, each in decision.expected.items()
        },
    }


def _points() -> list[tuple[int, int]]:
    return [(rows, context) for context in (SHORT_CONTEXT, LONG_CONTEXT) for rows in _ROWS]


def _target_s(pair: MeasuredPair, layout: Layout, rows: int, context: int) -> float:
    return pair.costs[layout].seconds(rows, Reading(context, rows * context))


def _target(pair: MeasuredPair) -> list[str]:
    head = ("layout", "cores", "context", *(f"{rows} row(s)" for rows in _ROWS))
    lines: list[tuple[object, ...]] = []
    for layout in pair.layouts:
        if layout is Layout.OFF and Layout.SYNC in pair.costs:
            continue
        name = "inline, plain" if layout is Layout.SYNC else _NAMES[layout]
        for context in (SHORT_CONTEXT, LONG_CONTEXT):
            cells = (f"{1e3 * _target_s(pair, layout, rows, context):.2f}" for rows in _ROWS)
            lines.append((name, pair.cores[layout], context, *cells))
    return ["## Target: T(rows, context) in ms", "", markdown_table(head, lines)]


def _draft(pair: MeasuredPair) -> list[str]:
    lines = ["## Draft and host", ""]
    for layout, forwards in pair.draft_forwards_s.items():
        told = ", ".join(f"{nodes} nodes {1e3 * seconds:.2f} ms" for nodes, seconds in forwards.items())
        lines.append(f"- draft forwards, {_NAMES[layout]}: {told}")
    lines.append(
        f"- the drafter expands {pair.limits.width} nodes a step, the widest that costs little more than the "
        f"narrowest; a step takes {1e3 * pair.draft_host_s:.2f} ms beside its forward"
    )
    base_s = pair.host.seconds(1, 0)
    lines.append(
        f"- the verifier's host takes {1e3 * base_s:.2f} ms a round of one request, and "
        f"{1e6 * pair.host.node_s:.0f} us more for each node (fitted while an engine with the draft inline "
        "ran)"
    )
    return lines


def _decisions(pair: MeasuredPair, question: Situation, decisions: Sequence[LayoutChoice]) -> list[str]:
    lines = [
        "## Decisions",
        "",
        "In simulated time, by the engine's own budget, growth policy and governor. *Acceptance*: share of "
        "first guesses that are right. A node is verified when its reach exceeds its *price*, the tokens "
        "that its row's time is worth; a draft step is awaited when it should add more tokens than the "
        "*step's price* (beside the target only after a miss). *Gain*: against plain rounds as first "
        "measured. What target and drafter take from each other at work is left out; each request has "
        f"{question.context} tokens.",
        "",
    ]
    rows: list[tuple[object, ...]] = []
    for decision in decisions:
        for layout in pair.layouts:
            each = decision.expected[layout]
            drafting = (
                f"{each.nodes_per_round:.1f}",
                f"{each.node_price:.2f}",
                f"{each.waited_steps:.1f}",
                f"{each.step_price:.2f}",
                f"{each.tokens_per_round:.2f}",
                f"{each.hit_rate:.2f}",
            )
            cells = ("0", "", "", "", "1.00", "") if layout is Layout.OFF else drafting
            name = f"**{_NAMES[layout]}**" if layout is decision.taken else _NAMES[layout]
            figures = (f"{each.tokens_per_s:.1f}", f"{decision.gains[layout]:.2f}")
            rows.append((f"{decision.acceptance:g}", decision.requests, name, *cells, *figures))
    head = (
        *(
            "acceptance",
            "requests",
            "layout",
            "nodes verified",
            "node's price",
            "steps awaited",
            "step's price",
        ),
        *("tokens a round", "hit rate", "tokens/s", "gain"),
    )
    lines += [markdown_table(head, rows), "", *(f"- {_why(each)}" for each in decisions)]
    return lines


def _why(decision: LayoutChoice) -> str:
    """One sentence for the governor's choice."""
    others = sorted(
        (layout for layout in decision.gains if layout is not decision.taken),
        key=lambda layout: -decision.gains[layout],
    )
    against = ", ".join(f"{_NAMES[layout]} {decision.gains[layout]:.2f}" for layout in others)
    drafting = [layout for layout in decision.expected if layout is not Layout.OFF]
    text = (
        f"acceptance {decision.acceptance:g}, {decision.requests} request(s): the governor takes "
        f"{_NAMES[decision.taken]}, which gives {decision.gains[decision.taken]:.2f} against {against}"
    )
    if decision.taken is Layout.OFF:
        nodes = max(decision.expected[layout].nodes_per_round for layout in drafting)
        return f"{text}; drafting costs more than the {nodes:.1f} nodes that are worth verifying bring"
    taken = decision.expected[decision.taken]
    if taken.nodes_per_round < _HARDLY:
        return f"{text}; hardly a node is worth verifying, so that it decodes plainly"
    waits = (
        f"{taken.waited_steps:.1f} draft steps are awaited a round"
        if taken.waited_steps >= _HARDLY
        else "growth is never worth awaiting"
    )
    return (
        f"{text}; {taken.nodes_per_round:.1f} nodes have a reach above {taken.node_price:.2f}, {waits}; "
        f"{1 - decision.share:.0%} of its rounds are trials of others"
    )
