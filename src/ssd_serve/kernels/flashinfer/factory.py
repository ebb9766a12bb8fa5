"""How tree attention by FlashInfer is made."""

from typing import TYPE_CHECKING, Any

from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.contract import AttentionBackend, AttentionFactory, Means

if TYPE_CHECKING:
    from ssd_serve.kernels.flashinfer.adapter import Package

_SPLIT_PAGES = 512
"""Where contexts are split so that results do not depend on the batch."""


class _Maker:
    """Loads the package at the first use, and once: it reads its folder when it is imported."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._package: Package | None = None

    def __call__(self, cache: KVCache, heads: int) -> AttentionBackend[Any]:
        from ssd_serve.kernels.flashinfer.attention import FlashInferAttention
        from ssd_serve.kernels.flashinfer.loading import load_package
        from ssd_serve.kernels.flashinfer.page_size import fastest_page_size

        means = self._means
        if self._package is None:
            self._package = load_package(cache.keys(0).device, means.folder / "flashinfer", means.log)
        if means.invariant:
            return FlashInferAttention(cache, heads, self._package, split_pages=_SPLIT_PAGES)
        page_size = fastest_page_size(cache, heads, self._package, means.log)
        return FlashInferAttention(cache, heads, self._package, page_size=page_size)


FACTORY = AttentionFactory(_Maker)
