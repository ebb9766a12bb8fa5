"""JSON objects of a traced request's rounds."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from ssd_serve.base.messages import RoundTrace, TraceNode
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.text import TokenTexts

_SHARED_SOURCE = "suffix"
"""Draft source that may propose texts of other requests."""


def trace_object(trace: RoundTrace, texts: TokenTexts, reveals: bool) -> dict[str, object]:
    """Return a round's object.

    Unless the server `reveals` which prompts were cached, rejected tokens that may come from other users' texts are
    null, and the first round is one forward.
    """
    accepted = set(trace.accepted)
    if trace.first and not reveals:
        trace = replace(trace, start_s=0.0, forward_at_s=0.0, forward_s=trace.end_s, waited_s=0.0, growth=())

    def node(index: int, each: TraceNode) -> dict[str, object]:
        hidden = _SHARED_SOURCE in each.sources and index not in accepted and not reveals
        return {
            "token": None if hidden else each.token,
            "text": None if hidden else texts.text_of(each.token),
            "parent": each.parent,
            "depth": each.depth,
            "sources": each.sources,
            "logprob": None if each.logprob is None else round(each.logprob, 4),
            "rank": each.rank,
        }

    return {
        "start_ms": _ms(trace.start_s),
        "end_ms": _ms(trace.end_s),
        "forward_start_ms": _ms(trace.forward_at_s),
        "forward_ms": _ms(trace.forward_s),
        "waited_ms": _ms(trace.waited_s),
        "context": trace.context,
        "nodes": [node(index, each) for index, each in enumerate(trace.nodes)],
        "nodes_left_out": trace.left_out,
        "accepted": trace.accepted,
        "bonus": {"token": trace.bonus, "text": texts.text_of(trace.bonus)},
        "growth": [
            {"at_ms": _ms(each.at_s), "source": each.source, "expansions": each.expansions}
            for each in trace.growth
        ],
        "cut": trace.cut,
    }


def trace_in_steps(traces: Sequence[RoundTrace], texts: TokenTexts, reveals: bool) -> Steps[msgspec.Raw]:
    """Return the JSON list of many rounds."""
    written: list[bytes] = []
    for each in traces:
        written.append(msgspec.json.encode(trace_object(each, texts, reveals)))
        yield
    return msgspec.Raw(b"[%s]" % b",".join(written))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
