"""Reading the matrices of linear layers, in the dtype of the file or as e4m3 numbers with their scales.

The file decides which matrices are quantised: an fp8 one must have a scale of a shape that `config.json` names,
any other must have none. Scales of activations are checked and not used: rows are rounded finer or not at
all. Scales of an fp8 KV cache are ignored: keys and values are kept wide. Knows names and shapes of tensors;
knows no device and no architecture.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ssd_serve.base.errors import CheckpointError, UserError
from ssd_serve.kernels.device import dtype_name
from ssd_serve.kernels.fp8 import (
    FORMATS,
    Fp8Matrix,
    can_multiply,
    holds_nan,
    native_format,
    to_fnuz,
    widen,
)
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.quantization import Fp8Scheme

_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale")
_KV_SCALES = tuple(
    f".self_attn.{name}"
    for name in ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale", "v_proj.output_scale")
)
_ONE = ((), (1,), (1, 1))
"""Shapes of a single scale."""


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A matrix, or a rank's share of one, as it lies in the file."""

    numbers: torch.Tensor  # [outputs, inputs]
    scales: torch.Tensor | None = None
    """float32 [outputs, groups], each for `width` neighbouring inputs; None: the numbers are the weights."""
    width: int = 0

    @property
    def outputs(self) -> int:
        return len(self.numbers)

    def reordered(self, order: torch.Tensor) -> "ScaledMatrix":
        """The same with its outputs in another order."""
        if self.scales is None:
            return ScaledMatrix(self.numbers[order])
        numbers = self.numbers.view(torch.uint8)[order].view(self.numbers.dtype)
        return ScaledMatrix(numbers, self.scales[order], self.width)

    def write(self, target: torch.Tensor) -> None:
        """Write the weights into `target` [outputs, inputs], rounded once, to its dtype."""
        if self.scales is None:
            target.copy_(self.numbers)
        else:
            widen(self.numbers, self.scales, self.width, target)

    def scaled(self, form: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Numbers in this e4m3 format and scales [outputs] that mean the same; None where there are none."""
        if self.scales is None or self.scales.shape[1] != 1:
            return None
        scales = self.scales[:, 0]
        if self.numbers.dtype is form:
            return self.numbers, scales
        return (to_fnuz(self.numbers), scales * 2) if form is torch.float8_e4m3fnuz else None


def multiplied_format(scheme: Fp8Scheme | None, device: str) -> torch.dtype | None:
    """Return the e4m3 format in which a checkpoint's fp8 weights are multiplied; None: they are widened.

    CPUs have no fast product of fp8, and activations are rounded to it only where the export wants that.
    """
    if scheme is None or not scheme.rounds_inputs or device == "cpu":
        return None
    return native_format(device)


class MatrixReader:
    """The matrices of one checkpoint; `scheme` is how its fp8 weights are scaled, None: it may hold none."""

    def __init__(self, checkpoint: Checkpoint, scheme: Fp8Scheme | None) -> None:
        self._checkpoint = checkpoint
        self._scheme = scheme
        self._forms: dict[str, torch.dtype | None] = {}
        for name in checkpoint.names() if scheme is not None else ():
            if name.endswith(_KV_SCALES):
                checkpoint.ignore(name, "since the KV cache is not in fp8")

    def plain(self, name: str, shape: tuple[int, ...], rows: slice = slice(None)) -> torch.Tensor:
        """A tensor that is no linear layer's, hence never quantised, or some of its rows, in the dtype of the
        file."""
        return self._wide(name, self._checkpoint.read(name, shape, rows=rows))

    def read(
        self, name: str, shape: tuple[int, int], *, rows: slice = slice(None), columns: slice | None = None
    ) -> ScaledMatrix:
        """The matrix `name`.weight or a slice of it, on the CPU. `shape` is that of the whole matrix."""
        weight = f"{name}.weight"
        numbers = self._checkpoint.read(weight, shape, rows=rows, columns=columns)
        scales = [f"{name}.{kind}" for kind in _WEIGHT_SCALES if f"{name}.{kind}" in self._checkpoint]
        if numbers.dtype not in FORMATS:
            if scales:
                raise self._error(
                    f"{weight} is {dtype_name(numbers.dtype)}, but has {scales[0]}; "
                    "only fp8 weights may have a scale"
                )
            return ScaledMatrix(self._wide(weight, numbers))
        if self._scheme is None:
            raise self._error(f"{weight} is fp8, but config.json has no quantization_config to say how")
        self._checkpoint.require(scales or [f"{name}.{_WEIGHT_SCALES[0]}"])
        if holds_nan(numbers):
            raise self._error(
                f"{weight} holds bytes that are no number in {dtype_name(numbers.dtype)}; "
                "the export is damaged"
            )
        self._check_input_scales(name)
        factors, width = self._scales(scales[0], self._scheme, shape, columns)
        return ScaledMatrix(numbers, factors[rows], width)

    def product(
        self, parts: Sequence[ScaledMatrix], bias: torch.Tensor | None, device: str
    ) -> Fp8Matrix | None:
        """Fuse parts in the device's fp8 format; None where one of them has no such form."""
        form = self._form(device)
        if form is None or not can_multiply(sum(each.outputs for each in parts), parts[0].numbers.shape[1]):
            return None
        scaled = [both for part in parts if (both := part.scaled(form)) is not None]
        if len(scaled) < len(parts):
            return None
        data = torch.cat([numbers.view(torch.uint8) for numbers, _ in scaled]).to(device)
        scales = torch.cat([scales for _, scales in scaled]).to(device)
        return Fp8Matrix(data.view(form), scales, None if bias is None else bias.to(device))

    def saved(self, device: str, dtype: torch.dtype) -> int:
        """Return the bytes that fp8 saves on this device; reads scales, but no weights."""
        form = self._form(device)
        return 0 if form is None else self.bytes_saved(form, dtype)

    def _form(self, device: str) -> torch.dtype | None:
        """Return `multiplied_format`, which tries products, once for each device."""
        if device not in self._forms:
            self._forms[device] = multiplied_format(self._scheme, device)
        return self._forms[device]

    def bytes_saved(self, form: torch.dtype, dtype: torch.dtype) -> int:
        """Bytes that the matrices take less than in `dtype` where fp8 is multiplied in the format `form`.

        Reads scales, but no weights. A matrix that is fused with a wide one is widened, and yet counted.
        """
        saved = 0
        for weight in self._checkpoint.names():
            name = weight.removesuffix(".weight")
            match self._checkpoint.shape(weight):
                case (outputs, inputs) if name != weight and can_multiply(outputs, inputs):
                    stored = self.read(name, (outputs, inputs), rows=slice(0))
                    if stored.scaled(form) is not None:
                        saved += outputs * (inputs * (dtype.itemsize - 1) - torch.float32.itemsize)
                case _:
                    pass
        return saved

    def _scales(
        self, name: str, scheme: Fp8Scheme, shape: tuple[int, int], columns: slice | None
    ) -> tuple[torch.Tensor, int]:
        """Scales [outputs, groups] for all outputs and a slice of the inputs, and the width of a group."""
        found = self._checkpoint.shape(name)
        outputs, inputs = shape
        if "channel" in scheme.kinds and found in ((outputs,), (outputs, 1)):
            return self._scale(name).view(outputs, 1), inputs
        if "tensor" in scheme.kinds and found in _ONE:
            return self._scale(name).view(1, 1).expand(outputs, 1), inputs
        if scheme.block is not None:
            height, width = scheme.block
            if found == (-(-outputs // height), -(-inputs // width)):
                scales = self._scale(name).repeat_interleave(height, 0)[:outputs]
                return scales[:, _groups(columns, inputs, width)], width
        kinds = " or ".join(sorted(scheme.kinds))
        raise self._error(
            f"{name} has shape {found}, but config.json says a scale for each {kinds} of {shape}"
        )

    def _scale(self, name: str) -> torch.Tensor:
        scales = self._wide(name, self._checkpoint.read(name, self._checkpoint.shape(name))).float()
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            raise self._error(f"{name} holds a scale that is negative or no number; the export is damaged")
        return scales

    def _check_input_scales(self, name: str) -> None:
        for scale in (f"{name}.{kind}" for kind in _INPUT_SCALES if f"{name}.{kind}" in self._checkpoint):
            if (found := self._checkpoint.shape(scale)) not in _ONE:
                raise self._error(f"{scale} has shape {found}; supported is one scale for a layer's inputs")
            self._scale(scale)

    def _wide(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _WIDE:
            raise self._error(
                f"{name} is {dtype_name(tensor.dtype)}; supported are float32, bfloat16 and float16, and "
                "e4m3 for the weights of linear layers"
            )
        return tensor

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint.folder}: {text}")


def _groups(columns: slice | None, inputs: int, width: int) -> slice:
    """The groups of scales for a slice of the inputs."""
    start, stop, _ = (columns or slice(None)).indices(inputs)
    if start % width or (stop % width and stop != inputs):
        raise UserError(
            f"a matrix with blocks of {width} inputs cannot be split inside a block; use fewer ranks"
        )
    return slice(start // width, -(-stop // width))
