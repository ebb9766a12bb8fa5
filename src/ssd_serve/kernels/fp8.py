"""Weights of eight bits: the two e4m3 formats, their conversion, and torch's scaled products on GPUs.

Checkpoints hold `e4m3fn`, which NVIDIA's GPUs and the MI350 multiply; `e4m3fnuz` is the MI300's own. A byte
means half as much in fnuz, except that 0x80 is NaN there instead of -0, and that 0x7F and 0xFF, which are NaN
in fn, are numbers. A scaled product rounds each activation row to e4m3 with a scale of its own, so that a
row's result does not depend on the others. Sums are scaled in float32. `torch._scaled_mm` is a private
operator: it is tried against exact products before it is used. Knows no checkpoint and no model.
"""

import logging
from functools import cache

import torch

logger = logging.getLogger(__name__)

FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

_MULTIPLE = 16
"""Inputs and outputs of a scaled product must be multiples of it."""
_SMALLEST_TOP = 1e-30
_AT_ONCE = 1024
"""Rows that are widened together, so that float32 copies stay small."""
_TOLERANCE = 2.0**-9
"""Tolerance as a share of the sum of magnitudes: matrix units add products in fewer bits than float32 has."""


def to_fnuz(numbers: torch.Tensor) -> torch.Tensor:
    """e4m3fn numbers as e4m3fnuz ones of half their value, exactly; scales must be doubled.

    Zero of either sign becomes the one zero, NaN of either sign the one NaN.
    """
    data = numbers.view(torch.uint8)
    data = torch.where(data == 0x80, 0, torch.where((data & 0x7F) == 0x7F, 0x80, data))
    return data.to(torch.uint8).view(torch.float8_e4m3fnuz)


def holds_nan(numbers: torch.Tensor) -> bool:
    """Return True if a number of either format is NaN."""
    data = numbers.view(torch.uint8)
    found = (data & 0x7F) == 0x7F if numbers.dtype is torch.float8_e4m3fn else data == 0x80
    return bool(found.any())


def widen(numbers: torch.Tensor, scales: torch.Tensor, width: int, target: torch.Tensor) -> None:
    """Write numbers times scales into `target`, rounded once, to its dtype.

    `numbers` e4m3 [outputs, inputs]; `scales` float32 [outputs, groups], each for `width` neighbouring
    inputs, fewer at the end; `target` [outputs, inputs], on any device.
    """
    for start in range(0, len(numbers), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        factors = scales[part].to(target.device)
        if factors.shape[1] > 1:
            factors = factors.repeat_interleave(width, 1)[:, : numbers.shape[1]]
        target[part] = numbers[part].to(target.device).float() * factors


def round_rows(rows: torch.Tensor, form: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, inputs] as e4m3 numbers [rows, inputs] and float32 scales [rows, 1]; the largest fits."""
    largest = torch.finfo(form).max
    scales = rows.abs().amax(1, keepdim=True).float().clamp_min_(_SMALLEST_TOP).div_(largest)
    return (rows / scales).clamp_(-largest, largest).to(form), scales


class Fp8Matrix:
    """An e4m3 weight [outputs, inputs] in the device's own format, with float32 scales [outputs]."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._columns = numbers.contiguous().t()
        self._inputs, self._outputs = self._columns.shape
        self._scales = scales
        self._bias = torch.zeros((), device=numbers.device) if bias is None else bias.float()
        self._one = torch.ones((), device=numbers.device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., inputs] -> [..., outputs], in the dtype of the rows."""
        flat = rows.reshape(-1, self._inputs)
        numbers, steps = round_rows(flat, self._columns.dtype)
        sums: torch.Tensor = torch.ops.aten._scaled_mm(
            numbers, self._columns, scale_a=self._one, scale_b=self._one, out_dtype=torch.float32
        )
        result = torch.addcmul(self._bias, sums.mul_(steps), self._scales).to(rows.dtype)
        return result.view(*rows.shape[:-1], self._outputs)


def can_multiply(outputs: int, inputs: int) -> bool:
    """Return True if scaled products are built for a weight of this shape."""
    return outputs % _MULTIPLE == 0 and inputs % _MULTIPLE == 0


def native_format(device: str) -> torch.dtype | None:
    """The e4m3 format that this device and this torch multiply, and rightly; None if there is none."""
    return next((form for form in FORMATS if multiplies(form, device)), None)


def multiplies(form: torch.dtype, device: str) -> bool:
    """Return True if products of this e4m3 format work on this device, and are near enough to exact ones."""
    generator = torch.Generator().manual_seed(0)
    largest = torch.finfo(form).max
    # Numbers that the format holds, with its largest in each row: rounding leaves them as they are.
    rows, weight = (
        torch.randint(-15, 16, (count, 256), generator=generator).float() * 0.25 for count in (3, 48)
    )
    rows[:, 0], weight[:, 1] = largest, -largest
    rows[1, 2:4] = torch.tensor([-0.0, -1e-9])  # a format without -0 must not make NaN of them
    scales, bias = (torch.rand(48, generator=generator) + 0.5 for _ in range(2))
    try:
        matrix = Fp8Matrix(weight.to(form).to(device), scales.to(device), bias.to(device))
        found = matrix(rows.to(device)).double().cpu()
    except (RuntimeError, AttributeError, TypeError, ValueError):
        return False
    expected = rows.double() @ weight.double().T * scales.double() + bias.double()
    bound = rows.double().abs() @ weight.double().abs().T * scales.double() + bias.double()
    right = bool(((found - expected).abs() <= _TOLERANCE * bound).all())
    if not right:
        warn_of_failure(str(form).removeprefix("torch."), device)
    return right


@cache
def warn_of_failure(form: str, device: str) -> None:
    """Log the failure, once for each format and device."""
    logger.warning(
        "fp8 products (%s) failed their self-test on %s: weights are widened to the model's dtype instead",
        form,
        device,
    )
