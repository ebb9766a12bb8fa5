"""A plan as ten lines for people, and as JSON. Knows what a plan holds, not how it was made."""

from collections.abc import Sequence
from dataclasses import asdict

from ssd_serve.app.plan.plan import DRAFT_HOST_S, MemoryShare, PlanEstimate, PlannedLayout, best_draft
from ssd_serve.verifier.drafters.pool import SpeculationMode

_GIB = float(1 << 30)
_MODES = {SpeculationMode.PLAIN: "ar", SpeculationMode.SYNC: "sd", SpeculationMode.ASYNC: "ssd"}
_NAMES = {
    SpeculationMode.PLAIN: "plain",
    SpeculationMode.SYNC: "draft inline",
    SpeculationMode.ASYNC: "draft beside",
}


def page(plans: Sequence[PlanEstimate]) -> str:
    """Make the page: at most ten lines, and one for other drafts; the modes are those of the best draft."""
    plan = best_draft(plans)
    lines = [_pair(plan), _assumed(plan), *_memory(plan), _steps(plan)]
    lines += [_layout(plan, layout) for layout in plan.layouts]
    lines.append(_verdict(plan))
    if len(plans) > 1:
        lines.append("drafts: " + "; ".join(_draft(each) for each in plans))
    note = _note(plan)
    return "\n".join([*lines, note] if note else lines)


def as_json(plans: Sequence[PlanEstimate]) -> list[dict[str, object]]:
    """Every plan with every layout; sizes in bytes, times in seconds."""
    return [
        {
            "target": plan.target.name,
            "draft": plan.draft.name if plan.draft is not None else None,
            "devices": plan.platform.count,
            "device": plan.platform.unit,
            "device_figures": plan.platform.origin,
            "assumed": _assumed(plan),
            "acceptance": plan.options.acceptance,
            "requests": plan.options.requests,
            "context": plan.options.context,
            "layouts": [_layout_json(layout) for layout in plan.layouts],
            "take": _MODES[plan.best.drafting] if plan.best is not None else None,
            "draft_pays_from_acceptance": plan.pays_from,
            "devices_needed": plan.devices_needed,
        }
        for plan in plans
    ]


def _layout_json(layout: PlannedLayout) -> dict[str, object]:
    return {
        "mode": _MODES[layout.drafting],
        "target_devices": layout.target,
        "draft_devices": layout.draft,
        "fits": all(share.fits for share in layout.shares),
        "need_bytes": [round(share.need) for share in layout.shares],
        "target_step_s": layout.step_s,
        "target_step_parts": asdict(layout.parts),
        "draft_step_s": layout.draft_s,
        "tokens_per_s": layout.speed or None,
    }


def _pair(plan: PlanEstimate) -> str:
    draft = f" with {plan.draft.name} ({_gib(plan.draft.resident_bytes)})" if plan.draft is not None else ""
    return (
        f"{plan.target.name} ({_gib(plan.target.resident_bytes)}){draft} on {plan.platform.count} x "
        f"{plan.platform.unit}; {plan.platform.origin}"
    )


def _assumed(plan: PlanEstimate) -> str:
    load = plan.options
    draft = ""
    if plan.draft is not None:
        draft = (
            f"acceptance {load.acceptance:g} (first guesses that are right), {1e3 * DRAFT_HOST_S:g} ms of "
            "host work a draft step, "
        )
    return (
        f"assumed: {load.requests} request(s) of {load.context} tokens, {draft}{plan.platform.assumed}; "
        "speeds below are computed from this, not measured"
    )


def _memory(plan: PlanEstimate) -> list[str]:
    """The roomiest placement first: the plain one; then what a draft needs."""
    layouts = {layout.drafting: layout for layout in plan.layouts}
    plain = layouts[SpeculationMode.PLAIN]
    lines = [f"memory, target on {_count(plan, plain.target)}: {_share(plain.shares[0])}"]
    beside, inline = layouts.get(SpeculationMode.ASYNC), layouts.get(SpeculationMode.SYNC)
    if beside is not None:
        target, draft = beside.shares
        lines.append(
            f"memory, draft beside: target on {_count(plan, beside.target)}: {_share(target)}; "
            f"draft on 1: {_share(draft)}"
        )
    elif inline is not None:
        lines.append(f"memory, with the draft inline: {_share(inline.shares[0])}")
    return lines


def _share(share: MemoryShare) -> str:
    verdict = "fits" if share.fits else "does NOT fit"
    return (
        f"weights {_gib(share.weights)} + KV {_gib(share.kv)} + graphs and buffers {_gib(share.reserve)} of "
        f"{_gib(share.free)} each: {verdict}"
    )


def _steps(plan: PlanEstimate) -> str:
    plain = plan.layouts[0]
    parts = [f"expected steps: target {1e3 * plain.step_s:.1f} ms on {_count(plan, plain.target)}"]
    parts += [
        f"{_NAMES[layout.drafting]}: target {1e3 * layout.step_s:.1f} ms, "
        f"draft {1e3 * layout.draft_s:.1f} ms for {plan.options.width} nodes "
        f"({layout.draft_s / layout.step_s:.2f} of it)"
        for layout in plan.layouts[1:]
    ]
    return "; ".join(parts)


def _layout(plan: PlanEstimate, layout: PlannedLayout) -> str:
    where = f"target on {_count(plan, layout.target)}"
    if layout.draft:
        where += f", draft on {layout.draft}"
    idle = plan.platform.count - layout.target - layout.draft
    where += f", {idle} idle" if idle else ""
    label = f"  {_NAMES[layout.drafting]:<13} ({where})"
    if not layout.speed:
        return f"{label}: does not fit"
    plain = plan.layouts[0].speed
    faster = (
        f", {layout.speed / plain:.2f}x plain"
        if plain and layout.drafting is not SpeculationMode.PLAIN
        else ""
    )
    return f"{label}: {layout.speed:.1f} tokens/s{faster}"


def _verdict(plan: PlanEstimate) -> str:
    best = plan.best
    if best is None:
        needed = plan.devices_needed
        if plan.platform.shares_memory:
            return "take: nothing; the target does not fit into this memory"
        if needed is None:
            most = f"{plan.target.ranks[-1]} x {plan.platform.unit}"
            return f"take: nothing; the target does not fit on {most}, the most that can share it"
        return f"take: nothing; the target alone fits from {needed} x {plan.platform.unit} on"
    if plan.draft is None:
        return f"take: plain decoding ({_settings(plan, best)}); a DRAFT shows what speculation would give"
    least = "no acceptance" if plan.pays_from is None else f"an acceptance of {plan.pays_from:.2f} on"
    pays = (
        f"a draft of this size pays from {least}"
        if plan.pays_from is not None
        else "no acceptance makes it pay"
    )
    if best.drafting is SpeculationMode.PLAIN:
        return f"take: plain decoding ({_settings(plan, best)}); {pays}"
    plain = plan.layouts[0].speed
    faster = f", {best.speed / plain:.2f}x plain decoding on the same devices" if plain else ""
    return f"take: {_NAMES[best.drafting]} ({_settings(plan, best)}){faster}; {pays}"


def _settings(plan: PlanEstimate, layout: PlannedLayout) -> str:
    """Settings that select a layout."""
    split = layout.target > 1 and not plan.platform.shares_memory
    return f"mode {_MODES[layout.drafting]}" + (f", SSD_TENSOR_PARALLEL={layout.target}" if split else "")


def _draft(plan: PlanEstimate) -> str:
    if plan.draft is None or plan.best is None:
        return "does not fit"
    plain = plan.layouts[0].speed
    fastest = max(plan.layouts[1:], key=lambda layout: layout.speed)
    gain = (
        f"{fastest.speed / plain:.2f}x {_NAMES[fastest.drafting]}"
        if plain
        else f"{fastest.speed:.1f} tokens/s"
    )
    return f"{plan.draft.name} at {plan.options.acceptance:g} {gain}"


def _note(plan: PlanEstimate) -> str:
    notes: list[str] = []
    models = (plan.target,) if plan.draft is None else (plan.target, plan.draft)
    if widened := [model.name for model in models if model.fp8 is False]:
        notes.append(f"fp8 weights are widened on this device: {', '.join(widened)}")
    if plan.target.matrix_bytes < plan.platform.cache_bytes:
        notes.append("the target fits the cache and is faster than this; `ssd bench modes` measures it")
    if plan.draft is not None and plan.draft.vocabulary != plan.target.vocabulary:
        notes.append(
            f"vocabularies of {plan.target.vocabulary} and {plan.draft.vocabulary} tokens: a pair needs one "
            "tokenizer"
        )
    return f"note: {'; '.join(notes)}" if notes else ""


def _count(plan: PlanEstimate, devices: int) -> str:
    return f"{devices} core(s)" if plan.platform.shares_memory else f"{devices}"


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= 0.1 * _GIB else f"{size / (1 << 20):.0f} MiB"
