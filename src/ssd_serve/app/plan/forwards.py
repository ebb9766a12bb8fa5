"""T(rows, context): the seconds of one forward on devices of a data sheet, part by part.

Knows sizes and devices; nothing of rounds, drafts or time that passes.
"""

from dataclasses import dataclass

from ssd_serve.app.plan.device_tables import DeviceSheet
from ssd_serve.app.plan.known_models import PlannedModel

_ELEMENT = 2
"""Bytes of an activation."""
_LOGIT_BYTES = 10
"""Traffic of one logit: written and read in bf16, scored and reduced in fp32."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The rows of a forward, over all of its requests."""

    rows: int
    """All of them: roots, tree nodes, and prompt tokens."""
    prompt: int = 0
    """Those that are prompt tokens, whose logits nobody wants."""
    context: int = 0
    """Tokens that attention reads, each request's counted once."""
    row_context: int = 0
    """Tokens that each row attends to, added up."""

    @classmethod
    def of_one(cls, rows: int, context: int) -> "Forward":
        """A root and its tree, after `context` tokens."""
        return cls(rows, 0, context, rows * context)

    @property
    def decoding(self) -> int:
        """Rows that are no prompt."""
        return self.rows - self.prompt


@dataclass(frozen=True, slots=True)
class ForwardParts:
    """Where the seconds of a forward go, one after the other."""

    launch_s: float
    """From the host's wish to the device and back."""
    weights_s: float
    """Reading every matrix once."""
    matmul_s: float
    """Multiplying, as far as reading does not hide it: of a prompt what lies beyond the ridge, of a few rows
    of several requests or of a tree the share that the device's kernels expose."""
    attention_s: float
    """Reading the KV cache, and what is computed with it."""
    layers_s: float
    """Small kernels, and what they take for each row."""
    exchange_s: float
    """All-reduces over the ranks."""
    sampling_s: float
    """Choosing among the logits of all rows that want them."""

    @property
    def seconds(self) -> float:
        """All of them."""
        device_s = self.weights_s + self.matmul_s + self.attention_s + self.layers_s
        return self.launch_s + device_s + self.exchange_s + self.sampling_s


def forward_parts(sheet: DeviceSheet, model: PlannedModel, ranks: int, forward: Forward) -> ForwardParts:
    """A forward of a model that is split over `ranks` such devices."""
    bandwidth = ranks * sheet.bandwidth_share * sheet.bandwidth_gb_s * 1e9
    flops = ranks * sheet.throughput_share * sheet.bf16_tflops * 1e12
    weights_s = model.matrix_bytes / bandwidth
    prompt_s = forward.prompt * model.flops_per_row / flops
    # A head that several ranks need is held, and read, by each of them.
    cache_bytes = forward.context * model.kv_bytes_per_token * model.kv_share(ranks) * ranks
    wanted = forward.decoding
    return ForwardParts(
        launch_s=sheet.launch_s,
        weights_s=weights_s,
        matmul_s=sheet.exposed_share * wanted * model.flops_per_row / flops + max(0.0, prompt_s - weights_s),
        attention_s=cache_bytes / bandwidth + forward.row_context * model.attention_flops / flops,
        layers_s=model.layers * (sheet.layer_s + wanted * sheet.row_s + (wanted > 1) * sheet.several_s),
        exchange_s=_exchange_s(sheet, model, ranks, forward.rows),
        sampling_s=wanted * model.vocabulary * _LOGIT_BYTES / bandwidth,
    )


def _exchange_s(sheet: DeviceSheet, model: PlannedModel, ranks: int, rows: int) -> float:
    """Two sums a layer, each a reduce-scatter and an all-gather."""
    if ranks == 1:
        return 0.0
    speed = 1e9 * min(sheet.links_gb_s, (ranks - 1) * sheet.peer_gb_s)
    bytes_out = 2 * (ranks - 1) / ranks * rows * model.hidden * _ELEMENT
    return 2 * model.layers * (sheet.exchange_s + bytes_out / speed)
