"""Choosing tokens by the compiled kernel: processing, noise and argmax of all rows in one call.

What single tokens' parameters do (bias, masks, bad words) is left to `kernels.processors.edit`, row by row.
Knows rows, not what they are for.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ssd_serve.kernels.native.library import INT, POINTER, SIZE, NativeLibrary
from ssd_serve.kernels.noise import NoiseRows
from ssd_serve.kernels.processors import (
    TOP_P_UNITS,
    edit,
    is_greedy,
    needs_editing,
    penalises,
    smallest_share,
    truncates,
)
from ssd_serve.kernels.sampling_rows import SamplingRows
from ssd_serve.messages import SamplingParameters

_REALS = 6
"""Numbers of a request that are not whole."""


class NativeChoice:
    """Chooses tokens for rows of float32 logits on the CPU."""

    def __init__(self, library: NativeLibrary) -> None:
        pointers = (POINTER,) * 5
        self._choose = library.function(
            "ssd_choose", POINTER, POINTER, SIZE, SIZE, *pointers, INT, result=INT
        )

    def choose(
        self, logits: torch.Tensor, requests: Sequence[SamplingRows], noise: NoiseRows
    ) -> tuple[list[int], dict[int, torch.Tensor]]:
        """The choice of each row of `logits` [rows, vocabulary], and the processed logits, by row, of the
        requests that want log-probabilities."""
        spans = [each.noise_span for each in requests]
        lines = noise.lines([span for span in spans if span is not None])
        if lines is None:  # more rows of noise than are remembered
            return self._in_parts(logits, requests, noise)
        call = _Call(logits.contiguous())
        given = iter(lines)
        for each, span in zip(requests, spans, strict=True):
            call.add(each, None if span is None else next(given))
        return call.run(self._choose, noise.table), call.processed

    def _in_parts(
        self, logits: torch.Tensor, requests: Sequence[SamplingRows], noise: NoiseRows
    ) -> tuple[list[int], dict[int, torch.Tensor]]:
        parts = requests if len(requests) > 1 else requests[0].single()
        half = len(parts) // 2
        start = sum(each.rows for each in parts[:half])
        choices, processed = self.choose(logits[:start], parts[:half], noise)
        others, more = self.choose(logits[start:], parts[half:], noise)
        return [*choices, *others], processed | {start + row: each for row, each in more.items()}


class _Call:
    """The arguments of one call, gathered request by request. Layouts are those of choosing.c."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.processed: dict[int, torch.Tensor] = {}
        self._logits = logits
        self._vocabulary = logits.shape[1]
        self._rows = 0
        self._wholes: list[int] = []
        self._reals: list[float] = []
        self._noise_at: list[int] = []
        self._path_ends: list[int] = [0]
        self._paths: list[int] = []
        self._kept: list[torch.Tensor | np.ndarray] = []
        """What the kernel is told addresses of."""

    def add(self, request: SamplingRows, lines: list[int] | None) -> None:
        """The next rows; `lines` of the noise table by depth, None at temperature 0."""
        parameters, rows = request.parameters, request.rows
        at = self._logits.data_ptr() + 4 * self._vocabulary * self._rows
        penalised = penalises(parameters)
        if needs_editing(parameters, request.generated):
            at, penalised = self._edited(request), False
        tokens_at = counts_at = known = 0
        if penalised:
            tokens_at, counts_at, known = self._counted(request)
            for path in request.paths():
                self._paths.extend(path)
                self._path_ends.append(len(self._paths))
        else:
            self._path_ends.extend([len(self._paths)] * rows)
        told = self._told(rows) if parameters.logprobs is not None else 0
        top_k, top_p = self._truncation(parameters)
        self._wholes += (rows, self._rows, at, told, tokens_at, counts_at, known, top_k, top_p)
        self._reals += self._numbers(parameters, penalised)
        if lines is None:
            self._noise_at += [-1] * rows
        else:
            self._noise_at.append(lines[0])
            self._noise_at += [lines[depth] for depth in request.depths]
        self._rows += rows

    def run(self, kernel: Callable[..., int], table: torch.Tensor) -> list[int]:
        """Choose. Raises `MemoryError`."""
        wholes, noise_at = np.array(self._wholes, np.int64), np.array(self._noise_at, np.int64)
        reals, choices = np.array(self._reals, np.float64), np.empty(self._rows, np.int64)
        ends, paths = np.array(self._path_ends, np.int64), np.array(self._paths, np.int64)
        done = kernel(
            wholes.ctypes.data,
            reals.ctypes.data,
            len(reals) // _REALS,
            self._vocabulary,
            table.data_ptr(),
            noise_at.ctypes.data,
            ends.ctypes.data,
            paths.ctypes.data,
            choices.ctypes.data,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError("there is no memory left to choose tokens; run fewer requests at once")
        found: list[int] = choices.tolist()
        return found

    def _edited(self, request: SamplingRows) -> int:
        rows = self._logits[self._rows : self._rows + request.rows]
        edited = torch.stack(
            [
                edit(row, one.parameters, one.counts, one.path, one.generated, one.eos)
                for row, one in zip(rows, request.single(), strict=True)
            ]
        )
        self._kept.append(edited)
        return edited.data_ptr()

    def _counted(self, request: SamplingRows) -> tuple[int, int, int]:
        if request.counts is None:
            raise ValueError("penalties need the counts of prompt and output tokens")
        tokens, counts = request.counts.with_path(())
        self._kept += (tokens, counts)
        return tokens.ctypes.data, counts.ctypes.data, len(tokens)

    def _told(self, rows: int) -> int:
        told = self._logits.new_empty((rows, self._vocabulary))
        self.processed.update(zip(range(self._rows, self._rows + rows), told, strict=True))
        self._kept.append(told)
        return told.data_ptr()

    def _truncation(self, parameters: SamplingParameters) -> tuple[int, int]:
        """k, and top-p in units (at least one: the most probable token always stays); 0: off."""
        if not truncates(parameters):
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
