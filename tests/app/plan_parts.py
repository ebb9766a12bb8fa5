"""Models, a data sheet and costs for tests of `ssd plan`."""

import torch

from ssd_serve.app.plan.device_tables import DeviceSheet
from ssd_serve.app.plan.known_models import (
    Computing,
    PlannedModel,
    known_model,
    sized,
)

PLAIN_SHEET = DeviceSheet(
    name="test",
    memory_gb=100,
    bandwidth_gb_s=1000,
    bf16_tflops=100,
    bandwidth_share=1.0,
    throughput_share=1.0,
    layer_s=0.0,
    exchange_s=0.0,
)


def known(name: str) -> PlannedModel:
    config = known_model(name)
    assert config is not None
    return sized(name, config, Computing("cuda:0", torch.bfloat16))


def small_model(matrix_bytes: float = 1e9, kv_heads: int = 8) -> PlannedModel:
    size = int(matrix_bytes)
    ranks = (1, 2, 4, 8)
    return PlannedModel("small", 10, kv_heads, 1000, 4096, size // 2, size, size, size, 1000, 0.0, ranks)
