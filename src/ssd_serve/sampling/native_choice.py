"""Choosing tokens by the compiled kernel: processing, noise and argmax of all rows in one call.

Parameters outside `COMPILED`, those that change single tokens, are applied by torch before the call.
"""

import math
from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, chain, islice

import numpy as np
import torch

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.kernels.native.library import INT, POINTER, SIZE, NativeLibrary
from ssd_serve.sampling.batched_processors import edit_rows, process_rows
from ssd_serve.sampling.parameters import (
    COMPILED,
    UnsupportedParameters,
    has_penalties,
    has_truncation,
    is_greedy,
)
from ssd_serve.sampling.processors import TOP_P_UNITS, smallest_share
from ssd_serve.sampling.rows import SamplingRows

_NEUTRAL = SamplingParameters()
_NUM_REALS = 6
"""Floating-point numbers of each request."""


class NativeChoice:
    """Chooses tokens for rows of float32 logits on the CPU. The noise equals that of `NativeNoise`, bit for
    bit."""

    def __init__(self, library: NativeLibrary, compiled: Collection[str] = COMPILED) -> None:
        """`compiled`: the parameters that the kernel applies, a subset of `COMPILED`."""
        self._unsupported = UnsupportedParameters(compiled)
        pointers = (POINTER,) * 6
        self._choose = library.function(
            "ssd_choose", POINTER, POINTER, SIZE, SIZE, *pointers, INT, result=INT
        )

    def choose(
        self, logits: torch.Tensor, requests: Sequence[SamplingRows], walk: bool = False
    ) -> tuple[list[int], dict[int, torch.Tensor]]:
        """Choose a token for each row of `logits` [rows, vocabulary].

        Returns the choices, and by row the processed logits of requests that ask for log-probabilities.
        `walk`: rows off the accepted path get the choice -1 and have no processed logits.
        """
        call = _Call(logits.contiguous(), self._unsupported)
        for each in requests:
            call.add(each)
        return call.run(self._choose, walk), call.processed


class _Call:
    """Arguments of one call, collected request by request. The layout is that of choosing.c."""

    def __init__(self, logits: torch.Tensor, unsupported: UnsupportedParameters) -> None:
        self.processed: dict[int, torch.Tensor] = {}
        self._logits = logits
        self._unsupported = unsupported
        self._vocabulary = logits.shape[1]
        self._rows = 0
        self._integers: list[int] = []
        self._reals: list[float] = []
        self._depths: list[int] = []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._path_ends: list[int] = [0]
        self._paths: list[int] = []
        self._kept: list[torch.Tensor | np.ndarray] = []
        """Arrays that the kernel has addresses of; they must outlive the call."""

    def add(self, request: SamplingRows) -> None:
        parameters, rows = request.parameters, request.rows
        place = self._logits.data_ptr() + 4 * self._vocabulary * self._rows
        penalised = has_penalties(parameters)
        if self._unsupported.needs_process(parameters):
            place, parameters, penalised = self._changed(process_rows, request), _NEUTRAL, False
        elif self._unsupported.needs_edit(parameters, request.generated):
            place, penalised = self._changed(edit_rows, request), False
        tokens_at = counts_at = num_tokens = 0
        if penalised:
            tokens_at, counts_at, num_tokens = self._counted(request)
            for path in request.paths():
                self._paths.extend(path)
                self._path_ends.append(len(self._paths))
        else:
            self._path_ends.extend([len(self._paths)] * rows)
        processed_at = self._processed_rows(rows) if request.parameters.logprobs is not None else 0
        top_k, top_p = self._truncation(parameters)
        is_random, seed = not is_greedy(request.parameters), _signed(request.seed)
        self._integers += (
            rows,
            self._rows,
            place,
            processed_at,
            tokens_at,
            counts_at,
            num_tokens,
            top_k,
            top_p,
        )
        self._integers += (is_random, seed, request.position)
        self._reals += self._numbers(parameters, penalised)
        self._depths += (0, *request.depths)
        self._tokens += (-1, *request.tokens)
        self._parents += (-1, *request.parents)
        self._rows += rows

    def run(self, kernel: Callable[..., int], walk: bool) -> list[int]:
        """Call the kernel. Raises `MemoryError`."""
        lists = (
            self._integers,
            self._depths,
            self._path_ends,
            self._paths,
            self._tokens,
            self._parents,
            [-1] * self._rows,
        )
        # One array of each kind: a round has some dozens of numbers, and NumPy would take longer than the search.
        integers, reals = array("q", chain.from_iterable(lists)), array("d", self._reals)
        ends = accumulate(8 * len(each) for each in lists)
        at = integers.buffer_info()[0]
        depths, ends_of_paths, paths, tokens, parents, choices = (at + end for end in islice(ends, 6))
        done = kernel(
            at,
            reals.buffer_info()[0],
            len(reals) // _NUM_REALS,
            self._vocabulary,
            depths,
            ends_of_paths,
            paths,
            tokens if walk else None,
            parents if walk else None,
            choices,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError("there is no memory left to choose tokens; run fewer requests at once")
        return integers[len(integers) - self._rows :].tolist()

    def _changed(
        self, change: Callable[[torch.Tensor, Sequence[SamplingRows]], torch.Tensor], request: SamplingRows
    ) -> int:
        rows = self._logits[self._rows : self._rows + request.rows]
        changed = change(rows, request.split())
        self._kept.append(changed)
        return changed.data_ptr()

    def _counted(self, request: SamplingRows) -> tuple[int, int, int]:
        if request.counts is None:
            raise ValueError("penalties need the counts of prompt and output tokens")
        tokens, counts = request.counts.with_path(())
        self._kept += (tokens, counts)
        return tokens.ctypes.data, counts.ctypes.data, len(tokens)

    def _processed_rows(self, rows: int) -> int:
        processed = self._logits.new_empty((rows, self._vocabulary))
        self.processed.update(zip(range(self._rows, self._rows + rows), processed, strict=True))
        self._kept.append(processed)
        return processed.data_ptr()

    def _truncation(self, parameters: SamplingParameters) -> tuple[int, int]:
        """k, and top-p in units (at least one: the most probable token always stays); 0: off."""
        if not has_truncation(parameters):
            return 0, 0
        k = parameters.top_k if 0 < parameters.top_k < self._vocabulary else 0
        return k, max(1, int(parameters.top_p * TOP_P_UNITS)) if parameters.top_p < 1.0 else 0

    def _numbers(self, parameters: SamplingParameters, penalised: bool) -> tuple[float, ...]:
        greedy, min_p = is_greedy(parameters), parameters.min_p
        return (
            1.0 if greedy else parameters.temperature,
            math.nan if greedy or min_p <= 0.0 else math.log(min(min_p, 1.0)),
            smallest_share(parameters.top_p, self._vocabulary),
            parameters.repetition_penalty if penalised else 1.0,
            parameters.frequency_penalty if penalised else 0.0,
            parameters.presence_penalty if penalised else 0.0,
        )


def _signed(seed: int) -> int:
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
