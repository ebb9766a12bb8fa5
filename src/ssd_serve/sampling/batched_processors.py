"""`processors.process` for many rows at once, on any device: a few operators for a batch, nothing read back.

A row's result equals that of `process`, to the bit where the device's softmax does not depend on the number
of rows. Rows with a parameter outside `BATCHED` are given to `process` itself. This module knows rows and
parameters, no noise and no trees.
"""

import math
from collections.abc import Callable, Sequence

import torch

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.sampling.overrides import LogitOverrides, Places, RowOverrides, apply_overrides
from ssd_serve.sampling.parameters import (
    BATCHED,
    UnsupportedParameters,
    has_penalties,
    has_truncation,
    is_greedy,
    needs_overrides,
)
from ssd_serve.sampling.processors import TOP_P_UNITS, counts_on_device, edit, process, smallest_share
from ssd_serve.sampling.rows import SamplingRows

_UNSUPPORTED = UnsupportedParameters(BATCHED)
_LOGITS_AT_ONCE = 4 << 20
"""Logits sorted at once, at most: sorting takes some 40 bytes for each."""


def process_rows(
    logits: torch.Tensor, rows: Sequence[SamplingRows], unsupported: UnsupportedParameters = _UNSUPPORTED
) -> torch.Tensor:
    """Processed logits of single rows: float32 [rows, vocabulary] -> the same, a new tensor."""
    values = edit_rows(logits, rows, unsupported)
    parameters = [row.parameters for row in rows]
    if not all(map(is_greedy, parameters)):
        values = values / _column(values, [1.0 if is_greedy(p) else p.temperature for p in parameters])
    if _rows_where(parameters, lambda p: p.min_p > 0.0):
        _keep_min_p(values, parameters)
    vocabulary = values.shape[1]
    rows_at_once = max(1, _LOGITS_AT_ONCE // vocabulary)
    for keep, applies in (
        (_keep_top_k, lambda p: 0 < p.top_k < vocabulary),
        (_keep_top_p, lambda p: p.top_p < 1.0),
    ):
        limited = _rows_where(parameters, applies)
        for start in range(0, len(limited), rows_at_once):
            chunk = limited[start : start + rows_at_once]
            index = torch.tensor(chunk).to(values.device)
            kept = keep(values.index_select(0, index), [parameters[row] for row in chunk])
            values.index_copy_(0, index, kept)
    for place, row in () if unsupported.none else enumerate(rows):
        if unsupported.needs_process(row.parameters) or unsupported.needs_edit(row.parameters, row.generated):
            values[place] = process(logits[place], row.parameters, row.before)
    return values


def _rows_where(
    parameters: Sequence[SamplingParameters], applies: Callable[[SamplingParameters], bool]
) -> list[int]:
    return [row for row, each in enumerate(parameters) if has_truncation(each) and applies(each)]


def _column(like: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).to(like.device)[:, None]


def edit_rows(
    logits: torch.Tensor, rows: Sequence[SamplingRows], unsupported: UnsupportedParameters = _UNSUPPORTED
) -> torch.Tensor:
    """The steps of `process_rows` before division by the temperature; the same arguments, a new tensor."""
    values = torch.where(torch.isnan(logits), -torch.inf, logits)
    apply_overrides(values, _edited_rows(rows))
    _penalise(values, rows)
    for place, row in () if unsupported.none else enumerate(rows):
        if unsupported.needs_edit(row.parameters, row.generated):
            values[place] = edit(logits[place], row.parameters, row.before)
    return values


def _edited_rows(rows: Sequence[SamplingRows]) -> list[RowOverrides]:
    made: dict[tuple[int, tuple[int, ...]], LogitOverrides] = {}
    found: list[RowOverrides] = []
    for index, row in enumerate(rows):
        if needs_overrides(row.parameters, row.generated):
            key = id(row.parameters), row.eos
            overrides = (
                row.overrides
                or made.get(key)
                or made.setdefault(key, LogitOverrides(row.parameters, row.eos))
            )
            early = row.generated < row.parameters.min_tokens
            found.append(RowOverrides(index, overrides, early, row.counts, row.path))
    return found


def _penalise(values: torch.Tensor, rows: Sequence[SamplingRows]) -> None:
    """Apply penalties in place, as `processors.process` defines them.

    A request's text is copied to the device once for all its rows. Tokens of paths are few, and are applied
    after it.
    """
    texts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    text, times, paths = Places(), list[torch.Tensor](), list[tuple[int, int, int]]()
    for index, row in enumerate(rows):
        if has_penalties(row.parameters):
            if row.counts is None:
                raise ValueError("penalties need the counts of prompt and output tokens")
            if id(row.counts) not in texts:
                texts[id(row.counts)] = counts_on_device(row.counts, (), values.device)
            tokens, counts = texts[id(row.counts)]
            text.add(index, tokens)
            times.append(counts)
            paths += [(index, token, count) for token, count in row.counts.on_path(row.path)]
    if not text.rows:
        return
    penalties = [
        (each.repetition_penalty, each.frequency_penalty, each.presence_penalty)
        for each in (row.parameters for row in rows)
    ]
    by_row = torch.tensor(penalties, dtype=torch.float32).to(values.device)  # [rows, 3]
    places, on_path = text.index(), torch.tensor(paths, dtype=torch.int64).reshape(-1, 3).to(values.device)
    path_rows, path_tokens, path_counts = on_path.unbind(1)
    before = values[path_rows, path_tokens]
    values[places] = _penalised(values[places], torch.cat(times), by_row[places[0]])
    values[path_rows, path_tokens] = _penalised(before, path_counts.to(torch.float32), by_row[path_rows])


def _penalised(found: torch.Tensor, times: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Penalised logits [n] of tokens that occur `times` in the output, under `penalties` [n, 3]."""
    repetition, frequency, presence = penalties.unbind(1)
    found = torch.where(found > 0, found / repetition, found * repetition)
    return found - frequency * times - presence * (times > 0).to(torch.float32)


def _keep_min_p(values: torch.Tensor, parameters: Sequence[SamplingParameters]) -> None:
    def below(each: SamplingParameters) -> float:
        wanted = each.min_p > 0.0 and has_truncation(each)
        return math.log(min(each.min_p, 1.0)) if wanted else -math.inf

    least = values.amax(dim=1, keepdim=True) + _column(values, [below(each) for each in parameters])
    values.masked_fill_(values < least, -torch.inf)


def _keep_top_k(values: torch.Tensor, parameters: Sequence[SamplingParameters]) -> torch.Tensor:
    """Mask all but the k largest logits of each row; of equal ones the lowest ids stay."""
    counts = torch.tensor([each.top_k for each in parameters]).to(values.device)[:, None]
    most = max(each.top_k for each in parameters)
    threshold = torch.topk(values, most, dim=1).values.gather(1, counts - 1)
    above, equal = values > threshold, values == threshold
    remaining = counts - above.sum(dim=1, keepdim=True)
    return torch.where(above | (equal & (torch.cumsum(equal, 1) <= remaining)), values, -torch.inf)


def _keep_top_p(values: torch.Tensor, parameters: Sequence[SamplingParameters]) -> torch.Tensor:
    """Mask all but the most probable tokens of each row, which sum to top-p; see `keep_top_p`."""
    vocabulary = values.shape[1]
    limits = torch.tensor([int(each.top_p * TOP_P_UNITS) for each in parameters]).to(values.device)[:, None]
    smallest = [smallest_share(each.top_p, vocabulary) for each in parameters]
    least = torch.tensor(smallest, dtype=torch.float64).to(values.device)[:, None]
    probabilities = torch.softmax(values.to(torch.float64), 1)
    order = torch.sort(values, dim=1, descending=True, stable=True).indices
    ordered = probabilities.gather(1, order)
    # Sums of integers are exact in any order of adding.
    units = torch.where(ordered >= least, ordered * TOP_P_UNITS, 0.0).to(torch.int64)
    inside = torch.cumsum(units, 1) - units < limits
    inside[:, :1] = True
    inside &= ordered >= least
    stay = torch.zeros_like(inside).scatter_(1, order, inside)
    return torch.where(stay, values, -torch.inf)
