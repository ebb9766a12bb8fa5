"""Choosing tokens: argmax of processed logits minus log E, ties to the lowest id, independent of the batch.

With E a unit exponential for each token, argmax_v l(v) - log E(v) is an exact sample of softmax(l)
(exponential race, Gumbel-max). Verifier and drafter share E, so the drafter can predict the verifier's
actual choice. Source: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
speculative decoding", arXiv 2408.07978.

This module knows nothing of drafts: it chooses a token for each row, or only for the rows of the accepted
path.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from ssd_serve.base.messages import SamplingParameters, TokenLogprobs
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.sampling.batched_processors import process_rows
from ssd_serve.sampling.grammar import Mask
from ssd_serve.sampling.native_choice import NativeChoice
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.parameters import is_greedy, needs_processing
from ssd_serve.sampling.processors import TokenCounts, apply_masks
from ssd_serve.sampling.rows import SamplingRows

logger = logging.getLogger(__name__)

_LOGITS_AT_ONCE = 4 << 20
"""Logits for which log-probabilities are computed at once, at most."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Choices of all rows, -1 for skipped ones, and log-probabilities of the rows that request them."""

    choices: list[int]
    logprobs: list[TokenLogprobs | None]


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    requests: Sequence[SamplingRows],
    noise: NoiseRows,
    native: NativeChoice | None = None,
    walk: bool = False,
) -> Sampled:
    """Choose a token for each row of `logits` [rows, vocabulary]; `noise` lives on the same device.

    The choice of a row is the same alone and in any batch: every operation is elementwise, exact, or within
    one row. On CPUs `native` chooses if given: the same tokens, except at the very edge of top-p, which
    `keep_top_p` describes. `walk`: only the accepted path of a tree is needed; rows off it may be skipped
    and then have the choice -1.
    """
    if not requests:
        return Sampled([], [])
    logits = apply_request_masks(logits.to(torch.float32), requests)
    if native is not None and logits.device.type == "cpu":
        choices, processed = native.choose(logits, requests, walk)
        return Sampled(choices, _logprobs(requests, choices, processed))
    rows = [row for each in requests for row in each.split()]
    scaled = processed_logits(logits, rows)  # [rows, vocabulary]
    greedy = {key for key, parameters in _distinct(rows).items() if is_greedy(parameters)}
    seeds = [None if id(row.parameters) in greedy else row.seed for row in rows]
    positions = [row.position for row in rows]
    scores = scaled if seeds.count(None) == len(seeds) else scaled - noise.rows(seeds, positions)
    choices = lowest_argmax(scores)
    return Sampled(choices, _logprobs(requests, choices, scaled))


def apply_request_masks(logits: torch.Tensor, requests: Sequence[SamplingRows]) -> torch.Tensor:
    """Mask float32 [rows, vocabulary] with -inf as the rows' grammars require; a new tensor if there are
    masks."""
    if all(each.masks is None for each in requests):
        return logits
    masks: list[Mask | None] = []
    for each in requests:
        masks += [None] * each.rows if each.masks is None else list(each.masks)
    return apply_masks(logits, masks)


def trusted_choice(library: NativeLibrary | None) -> NativeChoice | None:
    """The compiled choice, if its self-test passes: torch's choices on a few rows of every kind. A failure
    is logged."""
    if library is None:
        return None
    native, plain = NativeChoice(library), SamplingParameters(temperature=0.8)
    kinds = (
        SamplingParameters(temperature=0.0),
        plain,
        replace(plain, top_k=7),
        replace(plain, top_p=0.9, min_p=0.01),
        replace(plain, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1),
    )
    counts = TokenCounts((3, 5, 8), (5, 5, 9))
    tree = SamplingRows(
        plain, 0, 40, counts, generated=3, tokens=(4, 6, 7), parents=(-1, 0, -1), depths=(1, 2, 1)
    )
    requests = [tree._replace(parameters=each, seed=(1 << 63) + seed) for seed, each in enumerate(kinds)]
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((sum(each.rows for each in requests), 77), generator=generator)
    noise = NoiseRows(logits.shape[1], 64)
    right = sample(logits, requests, noise).choices
    every, walked = (sample(logits, requests, noise, native, walk).choices for walk in (False, True))
    kept = all(choice in (expected, -1) for choice, expected in zip(walked, right, strict=True))
    if every == right and kept:
        return native
    logger.warning(
        "the compiled choice of tokens failed its self-test and is not used: %s instead of %s, %s on a path",
        every,
        right,
        walked,
    )
    return None


def _logprobs(
    requests: Sequence[SamplingRows],
    choices: Sequence[int],
    processed: Mapping[int, torch.Tensor] | torch.Tensor,
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the requests that ask for them; `processed` holds at least the processed logits
    of their rows."""
    logprobs: list[TokenLogprobs | None] = [None] * len(choices)
    wanted: list[tuple[int, int, int]] = []
    start = 0
    for each in requests:
        if each.parameters.logprobs is not None:
            for index in range(start, start + each.rows):
                token = choices[index] if each.known is None else each.known
                if token >= 0:
                    wanted.append((index, token, each.parameters.logprobs))
        start += each.rows
    while wanted:
        together = max(1, _LOGITS_AT_ONCE // len(processed[wanted[0][0]]))
        some, wanted = wanted[:together], wanted[together:]
        rows = torch.stack([processed[index] for index, _, _ in some])
        found = rows_logprobs(rows, [token for _, token, _ in some], [top for _, _, top in some])
        for (index, _, _), each_found in zip(some, found, strict=True):
            logprobs[index] = each_found
    return logprobs


def processed_logits(logits: torch.Tensor, rows: Sequence[SamplingRows]) -> torch.Tensor:
    """Logits of the distribution that each row samples: float32 [rows, vocabulary]; may be `logits` itself.
    `rows` are split into single rows."""
    distinct = _distinct(rows)
    # Most rows need nothing, or division by their temperature only.
    touched = {key for key, parameters in distinct.items() if needs_processing(parameters, 0)}
    work = [
        index
        for index, row in enumerate(rows)
        if id(row.parameters) in touched and needs_processing(row.parameters, row.generated)
    ]
    if len(work) == len(rows):
        return process_rows(logits, rows)
    by_key = {key: 1.0 if is_greedy(each) else each.temperature for key, each in distinct.items()}
    scaled = logits
    if any(temperature != 1.0 for temperature in by_key.values()):
        temperatures = torch.tensor([by_key[id(row.parameters)] for row in rows], dtype=torch.float32)
        scaled = logits / temperatures.to(logits.device)[:, None]
    if not work:
        return scaled
    index = torch.tensor(work).to(logits.device)
    return scaled.index_copy(0, index, process_rows(logits.index_select(0, index), [rows[i] for i in work]))


def _distinct(rows: Sequence[SamplingRows]) -> dict[int, SamplingParameters]:
    """Distinct parameter objects of these rows, by identity: the rows of a tree share one."""
    return {id(row.parameters): row.parameters for row in rows}


def lowest_argmax(scores: torch.Tensor) -> list[int]:
    """Index of the largest value of each row of float32 [rows, vocabulary], the lowest among equal ones.

    torch promises no order among equal values, numpy promises the first. A NaN counts as -inf; a row of
    nothing else chooses 0.
    """
    if scores.device.type == "cpu":
        values = scores.numpy()
        chosen = values.argmax(axis=1)
        if np.isnan(
            values[np.arange(len(values)), chosen]
        ).any():  # numpy takes the first NaN for the largest value
            return lowest_argmax(torch.where(torch.isnan(scores), -torch.inf, scores))
        choices: list[int] = chosen.tolist()
        return choices
    lowest: list[int] = lowest_argmax_on_device(scores).tolist()
    return lowest


def lowest_argmax_on_device(scores: torch.Tensor) -> torch.Tensor:
    """`lowest_argmax` by torch operators that do not depend on the order of reduction: int64 [rows]."""
    scores = torch.where(torch.isnan(scores), -torch.inf, scores)
    ids = torch.arange(scores.shape[1], device=scores.device)
    equal = scores == scores.amax(dim=1, keepdim=True)  # [rows, vocabulary]
    return torch.where(equal, ids, scores.shape[1]).amin(dim=1)


def token_logprobs(processed: torch.Tensor, choice: int, top: int) -> TokenLogprobs:
    """Log-probabilities of the choice and of the `top` most probable tokens, under float32 [vocabulary].

    Tokens of probability 0 (masked) are left out.
    """
    values = torch.log_softmax(torch.where(torch.isnan(processed), -torch.inf, processed), 0)
    chosen = float(values[choice])
    if top == 0:
        return TokenLogprobs(chosen, ())
    threshold = torch.topk(values, min(top, len(values))).values[-1]
    candidates = torch.nonzero(
        values >= threshold
    ).flatten()  # ascending ids; more than `top` if some are equal
    ordered, order = torch.sort(values[candidates], descending=True, stable=True)
    pairs = zip(candidates[order[:top]].tolist(), ordered[:top].tolist(), strict=True)
    return TokenLogprobs(chosen, tuple((token, value) for token, value in pairs if value > -torch.inf))


def rows_logprobs(
    processed: torch.Tensor, choices: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs]:
    """`token_logprobs` of each row of float32 [rows, vocabulary], with one look at the device for all."""
    values = torch.log_softmax(torch.where(torch.isnan(processed), -torch.inf, processed), 1)
    index = torch.tensor(choices).to(values.device)[:, None]
    largest_top = min(max(tops), values.shape[1])
    chosen: list[float] = values.gather(1, index)[:, 0].tolist()
    if largest_top == 0:
        return [TokenLogprobs(each, ()) for each in chosen]
    best = torch.topk(values, largest_top, dim=1)
    last = torch.tensor([min(max(top, 1), largest_top) - 1 for top in tops]).to(values.device)[:, None]
    reaching: list[int] = (values >= best.values.gather(1, last)).sum(1).tolist()
    ids: list[list[int]] = best.indices.tolist()
    likely: list[list[float]] = best.values.tolist()
    found: list[TokenLogprobs] = []
    for row, top in enumerate(tops):
        count = min(top, largest_top)
        if count and reaching[row] != count:  # equal ones on the edge: the lowest ids stay
            found.append(token_logprobs(processed[row], choices[row], top))
            continue
        pairs = sorted(zip(ids[row][:count], likely[row][:count], strict=True), key=lambda p: (-p[1], p[0]))
        kept = tuple((token, value) for token, value in pairs if value > -math.inf)
        found.append(TokenLogprobs(chosen[row], kept))
    return found
