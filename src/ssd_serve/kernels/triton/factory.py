"""How tree attention in Triton is made. The package is imported with the first one."""

from typing import Any

from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.contract import AttentionBackend, AttentionFactory


def _make(cache: KVCache, heads: int) -> AttentionBackend[Any]:
    from ssd_serve.kernels.triton.attention import TritonAttention
    from ssd_serve.kernels.triton.private import keep_private

    keep_private()
    return TritonAttention(cache, heads)


FACTORY = AttentionFactory(lambda _means: _make)
