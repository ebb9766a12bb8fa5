"""Where Triton keeps what it has compiled: only in a folder that nobody else can write to.

Knows Triton's own setting of that folder (`TRITON_CACHE_DIR`), not what is in it.
"""

import logging
from pathlib import Path

from triton import knobs

from ssd_serve.base.owned import cache_folder

logger = logging.getLogger(__name__)


def keep_private() -> None:
    """Before anything is compiled: take another folder where somebody else could put code into Triton's."""
    cache = knobs.cache
    cache.dir = str(cache_folder(Path(cache.dir), logger.warning, "TRITON_CACHE_DIR"))
