"""What documents show of results, a function for each block. Knows the shapes of results."""

from collections.abc import Mapping
from typing import Any

from lab.ablate.report import GROWTHS
from lab.channels.feature_report import FEATURE_HEAD, feature_lines
from ssd_serve.bench.peers.ways import OURS, PLAIN
from ssd_serve.bench.tables import markdown_table

Result = Mapping[str, Any]

_REJECTION = "rejection"


def ablate(result: Result) -> str:
    """A line for each way to grow, a column for each choice and temperature."""
    rows = result["results"]
    columns = sorted({(row["choice"] == _REJECTION, row["temperature"]) for row in rows})
    speeds = {
        (row["growth"], row["choice"] == _REJECTION, row["temperature"]): row["tokens_per_s"] for row in rows
    }
    head = ("growth", *(f"{'rejection, ' if rejection else ''}T {t:g}" for rejection, t in columns))
    lines = [
        (GROWTHS.get(growth, growth), *(_number(speeds.get((growth, *column))) for column in columns))
        for growth in dict.fromkeys(row["growth"] for row in rows)
    ]
    prompts = [row["prompts"] for row in rows]
    told = f"Tokens/s over {max(prompts)} prompts; plain decoding gives {result['plain_tokens_per_s']:g}."
    if min(prompts) < max(prompts):
        told += (
            " Rejection sampling draws texts of its own, and those that nearly loop are not counted: "
            f"{min(prompts)} are at least."
        )
    return f"{markdown_table(head, lines)}\n\n{told}"


def calibration(result: Result) -> str:
    """A line for each temperature, of the guesses that were likely enough to matter."""
    head = ("T", "guesses", "mean reach", "happened", "calibration error", "Brier", "base rate's Brier")
    names = ("predicted", "happened", "expected_calibration_error", "brier", "base_brier")
    lines = [
        (
            f"{row['temperature']:g}",
            f"{row['likely']['count']:,}",
            *(f"{row['likely'][name]:.3f}" for name in names),
        )
        for row in result["results"]
    ]
    return markdown_table(head, lines)


def rereading(*results: Result) -> str:
    """A line for each layout and temperature: what keeping gives, and how much more the others."""
    rows = [row for result in results for row in result["results"]]
    rules = list(rows[0]["against_kept"])
    head = ("layout", "T", "texts", "kept, tokens/s", *(f"{rule}, times as fast" for rule in rules))
    lines = [
        (
            row["layout"],
            f"{row['temperature']:g}",
            row["texts"],
            _number(row["tokens_per_s"]["kept"]),
            *(ratio(row["against_kept"][rule]) for rule in rules),
        )
        for row in rows
    ]
    return markdown_table(head, lines)


def grammars(result: Result) -> str:
    """A line for each tokenizer and library."""
    head = (
        *("tokenizer", "library", "schemas", "texts refused", "compiled in, ms (p50, p99)"),
        *("first mask, ms (p50, p99)", "mask of a row, us (p50, p99)"),
    )

    def two(row: Mapping[str, Any], name: str) -> str:
        return f"{row[name]['p50']:.2f}, {row[name]['p99']:.2f}"

    lines = [
        (
            f"{row['vocabulary']:,} tokens",
            row["library"],
            f"{row['schemas']} of {row['schemas'] + row['not_compiled']}",
            row["texts_refused"],
            *(two(row, name) for name in ("compile_ms", "first_mask_ms", "row_us")),
        )
        for row in result["results"]
    ]
    return markdown_table(head, lines)


def grammar_drafts(result: Result) -> str:
    """A line for each mode and temperature."""
    head = ("mode", "T", "tokens a round, any drafts", "drafts that keep to the grammar", "times as fast")
    lines = [
        (
            row["mode"],
            f"{row['temperature']:g}",
            *(f"{row['tokens_per_round'][way]:.2f}" for way in ("any", "kept")),
            ratio(row["times_as_fast"]),
        )
        for row in result["results"]
    ]
    return markdown_table(head, lines)


def vocabulary(result: Result) -> str:
    """A line for each share of common tokens, a column for each temperature: tokens a round."""
    rows = result["results"]
    temperatures = dict.fromkeys(row["temperature"] for row in rows)
    found = {(row["common"], row["temperature"]): row["tokens_per_round"] for row in rows}
    head = ("tokens in common", *(f"T {temperature:g}" for temperature in temperatures))
    lines = [
        (f"{common:.0%}", *(f"{found[common, temperature]:.2f}" for temperature in temperatures))
        for common in dict.fromkeys(row["common"] for row in rows)
    ]
    return markdown_table(head, lines)


def drafts(result: Result) -> str:
    """For each device and temperature a line for each way, a column for each kind of text and how many there
    are: how many times as fast as plain decoding whole requests are, and the tokens of a round."""
    rows = [row for row in result["results"] if row["texts"]]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    parts: list[str] = []
    for device, temperature in dict.fromkeys((row["device"], row["temperature"]) for row in rows):
        some = [row for row in rows if (row["device"], row["temperature"]) == (device, temperature)]
        found = {(row["engine"], row["way"], row["kind"]): row for row in some}
        ways = dict.fromkeys((row["engine"], row["way"]) for row in some)
        lines = [
            (
                way if engine == OURS else f"{engine}: {way}",
                *(_draft_cell(found.get((engine, way, kind))) for kind in kinds),
            )
            for engine, way in ways
        ]
        texts = {row["kind"]: row["texts"] for row in some}
        head = ("draft", *(f"{kind} ({texts.get(kind, 0)})" for kind in kinds))
        parts.append(f"{device}, temperature {temperature:g}:\n\n{markdown_table(head, lines)}")
    parts += [f"{engine} is not measured: {why}." for engine, why in result.get("left_out", {}).items()]
    return "\n\n".join(parts)


_FEW_TEXTS = 4
"""Of fewer no interval tells anything."""


def _draft_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["texts"] < _FEW_TEXTS:
        return "too few"
    against = row["ratios"].get(PLAIN)
    if against is None:
        return f"{row['tokens_per_s']:.0f} tokens/s"
    told = f"{against['mean']:.2f} ({against['low']:.2f} to {against['high']:.2f})"
    return f"{told}; {row['tokens_per_round']:.2f}"


def quality(result: Result) -> str:
    """A line for each dtype, of which the first is the reference."""
    reference = result["results"][0]["dtype"]
    lines = [
        (row["dtype"], f"{row['nats_per_token']:.4f}", f"{row['same_best_token']:.3f}")
        for row in result["results"]
    ]
    head = ("dtype", "nats a token", f"most probable token as in {reference}")
    return f"{markdown_table(head, lines)}\n\n{result['positions']:,} held-out positions."


def drafters(result: Result) -> str:
    """A line for each number of drafters, in virtual time; below it what processes in real time gave."""
    head = (
        "drafters",
        "expansions, times those of one",
        "guesses that trees gain, times those of one",
        "tokens/s",
        "verifier's host time a round, ms",
    )
    alone = result["rows"][0]["expansions_per_s"]
    lines = [
        (
            row["drafters"],
            f"{row['expansions_per_s'] / alone:.2f}",
            f"{row['scaling']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['host_us_per_round'] / 1e3:.1f}",
        )
        for row in result["rows"]
    ]
    parts = [markdown_table(head, lines)]
    if result.get("real"):
        first = result["real"][0]["expansions_per_s"]
        real = [
            (
                row["drafters"],
                f"{row['expansions_per_s'] / first:.2f}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['overrun_share']:.2f}",
            )
            for row in result["real"]
        ]
        told = f"Processes on sockets, in real time, with the forwards of `{result['real_table']}`:"
        titles = ("drafters", "expansions, times those of one", "tokens/s", "forwards beyond the table")
        parts += [told, markdown_table(titles, real)]
    return "\n\n".join(parts)


def channels(result: Result) -> str:
    """A line for each way of a message, and what the launchers take."""
    lines = [
        (way, f"{row['p50'] / 1e3:.2f} ms", f"{row['p99'] / 1e3:.2f} ms")
        for way, row in result["round_trips_us"].items()
    ]
    starts = [
        (name, f"{row['ready_s']:.1f} s", f"{row['own_mib']:.0f} MiB")
        for name, row in result["starts"].items()
    ]
    return f"{markdown_table(('way', 'median', '99th percentile'), lines)}\n\n" + markdown_table(
        ("launcher", "an engine can generate after", "its own processes take"), starts
    )


def features(result: Result) -> str:
    """A line for each way of a target's features."""
    return markdown_table(FEATURE_HEAD, feature_lines(result))


def faults(result: Result) -> str:
    """A line for each fault."""
    head = ("fault", "noticed after", "all streams went on after", "longest wait", "tokens lost, wrong")
    lines = [
        (
            row["fault"],
            _seconds(row["noticed_s"]),
            _seconds(row["recovered_s"]) if row["recovered_s"] else "at once",
            _seconds(row["stall_s"]),
            f"{row['lost']}, {row['wrong']}",
        )
        for row in result["outcomes"]
        if row["fault"] != "nothing"
    ]
    return markdown_table(head, lines)


def invariance(result: Result) -> str:
    """A line for each shape of batch, with slots in order and scattered."""
    ratios: dict[str, list[float]] = {}
    for row in result["results"]:
        ratios.setdefault(row["shape"], []).append(row["ratio"])
    lines = [(shape, f"{min(each):.2f} to {max(each):.2f}") for shape, each in ratios.items()]
    return markdown_table(("batch", "factor"), lines)


def soak(result: Result) -> str:
    """What was done to the server, and how its longest-lived processes grew."""
    done = result["disturbances"]
    kills, stalls = (
        sum(count for name, count in done.items() if name.startswith(word)) for word in ("killed", "stalled")
    )
    lines = [
        ("minutes", f"{result['plan']['minutes']:g}"),
        ("requests, failed", f"{sum(result['requests'].values()):,}, {result['failed'] or 'none'}"),
        ("equal repeats", result["probes"]),
        ("kills, stalls", f"{kills}, {stalls}"),
        ("left behind", ", ".join((*result["end"]["orphans"], *result["end"]["leftovers"])) or "nothing"),
    ]
    longest: dict[str, Mapping[str, Any]] = {}
    for process in result["processes"]:
        held = longest.get(process["name"], process)
        longest[process["name"]] = max(held, process, key=lambda each: float(each["seconds"]))
    for name, process in longest.items():
        slope = process["slope"]
        if slope is not None:
            grown = f"{slope['value']:+.0f} ({slope['low']:+.0f} to {slope['high']:+.0f})"
            lines.append((f"{name}, MiB an hour over {process['seconds'] / 60:.0f} minutes", grown))
    return markdown_table(("", "seen"), lines)


def lossless(result: Result, torch: Result, invariant: Result) -> str:
    """What the whole product gave, and parts of it with PyTorch's kernels, without and with batch
    invariance."""
    return lossless_table(
        "run",
        {
            "fp32": result["totals"],
            f"bf16, {result['bf16']['kernels']} kernels": result["bf16"],
            f"bf16, {torch['bf16']['kernels']} kernels": torch["bf16"],
            "fp32, batch invariant": invariant["totals"],
            f"bf16, batch invariant, {invariant['bf16']['kernels']} kernels": invariant["bf16"],
        },
    )


def lossless_drafts(result: Result) -> str:
    """What each draft gave, alone or with others, in fp32."""
    figures = ("tokens", "accepted", "divergences", "near_ties")
    totals: dict[str, dict[str, int]] = {}
    for row in result["results"]:
        found = totals.setdefault(row["draft"], dict.fromkeys(("cases", *figures), 0))
        found["cases"] += 1
        for each in figures:
            found[each] += row[each]
    return lossless_table("what drafts", {f"`{draft}`": found for draft, found in totals.items()})


def governor(result: Result) -> str:
    """What finding out costs under each load."""
    head = ("simulated load", "time lost", "in the worst run", "rounds in another layout than the best")
    lines = [
        (row["load"], f"{row['regret']:.1%}", f"{row['worst_regret']:.1%}", f"{row['elsewhere']:.0%}")
        for row in result["results"]
        if row["chooser"] == "governor"
    ]
    return markdown_table(head, lines)


def lossless_table(what: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each proof by its name: what was compared, and what differed."""
    head = (what, "cases", "tokens", "accepted nodes", "first differences", "of them near-ties")
    figures = ("cases", "tokens", "accepted", "divergences", "near_ties")
    lines = [(name, *(f"{totals[each]:,}" for each in figures)) for name, totals in found.items()]
    return markdown_table(head, lines)


def ratio(found: Mapping[str, Any] | None) -> str:
    """A mean of ratios with its interval; nothing where there is none."""
    return "" if found is None else f"{found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
