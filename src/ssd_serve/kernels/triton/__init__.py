"""Tree attention and noise in Triton, for GPUs. Triton is imported when the first kernel is made."""

import logging
from pathlib import Path
from typing import Any

from ssd_serve.base.trusted_files import cache_folder
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.contract import AttentionBackend, AttentionFactory

logger = logging.getLogger(__name__)


def keep_private() -> None:
    """Move Triton's cache of compiled kernels to a folder that only this user can write.

    Must be called before anything is compiled; `TRITON_CACHE_DIR` names the folder.
    """
    from triton import knobs

    knobs.cache.dir = str(cache_folder(Path(knobs.cache.dir), logger.warning, "TRITON_CACHE_DIR"))


def _make(cache: KVCache, heads: int) -> AttentionBackend[Any]:
    from ssd_serve.kernels.triton.attention import TritonAttention

    keep_private()
    return TritonAttention(cache, heads)


FACTORY = AttentionFactory(lambda _context: _make)
