"""Models, a data sheet and costs for tests of `ssd plan`."""

import torch

from ssd_serve.app.plan.device_tables import DeviceSheet
from ssd_serve.app.plan.known_models import (
    Computing,
    PlannedModel,
    known_model,
    sized,
)
from ssd_serve.app.plan.simulation import Costs
from ssd_serve.base.cost import CostTable, HostCost, Timing
from ssd_serve.drafter.frontier import GrowthLimits

LIMITS = GrowthLimits(width=16, fan_out=8, depth=16, nodes=4096)

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


def flat(target_s: float, draft_s: float) -> Costs:
    """Steps that cost the same for any number of rows, and hardly any host time."""
    table = CostTable([Timing(rows, 0, target_s) for rows in (1, 64)])
    return Costs(table, HostCost(node_s=1e-9), draft_s, LIMITS, context=0)


def small_model(matrix_bytes: float = 1e9, kv_heads: int = 8) -> PlannedModel:
    size = int(matrix_bytes)
    ranks = (1, 2, 4, 8)
    return PlannedModel("small", 10, kv_heads, 1000, 4096, size // 2, size, size, size, 1000, 0.0, ranks)
