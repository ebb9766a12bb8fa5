"""What documents show of results that were measured on a GPU, a function for each block. Knows the shapes of
results."""

from collections.abc import Mapping
from typing import Any

from lab.page_blocks import lossless_table
from ssd_serve.bench.modes_result import modes_tables
from ssd_serve.bench.tables import markdown_table

Result = Mapping[str, Any]


def conformance(result: Result) -> str:
    """A line for each backend and dtype: how many trials, how many of them right, and the largest error."""
    rows = result["results"]
    lines: list[tuple[object, ...]] = []
    for backend, dtype in dict.fromkeys((row["backend"], row["dtype"]) for row in rows):
        some = [row for row in rows if (row["backend"], row["dtype"]) == (backend, dtype)]
        tried = [row for row in some if "right" in row]
        if not tried:
            continue
        largest = max(row.get("error", float("inf")) for row in tried)
        refused = "; ".join(row["unsupported"].partition(":")[0] for row in some if "unsupported" in row)
        lines.append(
            (backend, dtype, len(tried), sum(row["right"] for row in tried), f"{largest:.2g}", refused)
        )
    head = ("tree attention", "dtype", "trials", "right", "largest difference", "refused")
    return f"{markdown_table(head, lines)}\n\n{_where(result)}"


def lossless(result: Result) -> str:
    """What the proof gave with captured forwards, in fp32 and in bf16."""
    found = {"fp32": result["totals"], f"bf16, {result['bf16']['attention']}": result["bf16"]}
    return f"{lossless_table('run', found)}\n\n{_where(result)}"


def kernels(result: Result) -> str:
    """A line for each batch, a column for each backend: milliseconds a layer, launching included."""
    rows = result["results"]
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    found = {(row["shape"], row["backend"]): row for row in rows}
    lines = [
        (shape, *(_ms(found.get((shape, backend))) for backend in backends))
        for shape in dict.fromkeys(row["shape"] for row in rows)
    ]
    heads, kv_heads, head_dim = result["heads"]
    told = f"{heads} query heads, {kv_heads} KV heads of {head_dim}, {result['dtype']}."
    return f"{markdown_table(('ms a layer', *backends), lines)}\n\n{told} {_where(result)}"


def modes(*results: Result) -> str:
    """One table of results that differ in their temperatures."""
    first = results[0]
    rows = [row for result in results for row in result["results"]]
    left_out = [result["notes"]["real"]["left_out"] for result in results]
    notes = {"real": {"left_out": {key: share for each in left_out for key, share in each.items()}}}
    joined = {**first, "results": rows, "notes": notes}
    return f"{modes_tables(joined)}\n\n{_where(first)}"


def _ms(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    low, high = row["quartiles"]
    return f"{row['ms']:.3f} ({low:.3f} to {high:.3f})"


def _where(result: Result) -> str:
    (gpu, *_), versions = result["hardware"]["gpus"], result["versions"]
    commit, day = result["provenance"]["commit"][:9], result["provenance"]["started"].partition("T")[0]
    return f"{gpu}, torch {versions['torch']}, at {commit} on {day}."
