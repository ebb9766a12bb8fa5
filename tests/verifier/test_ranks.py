"""A target on several ranks, put together from settings: its KV cache has to fit the rank with the least
memory."""

import pytest

from ssd_serve.base.engine_config import EMBEDDED, Mode
from ssd_serve.base.errors import MemoryShortError
from ssd_serve.base.settings import Settings
from ssd_serve.transport.rank_sockets import Leader
from ssd_serve.verifier.assembly import assemble_verifier
from ssd_serve.verifier.ranks import LeadingRank


class Met(LeadingRank):
    def __init__(self, min_free: int) -> None:
        self._min_free = min_free

    def meet(self) -> Leader:
        return Leader([], self._min_free)


def test_the_poorest_rank_decides_how_many_slots_there_are() -> None:
    settings = Settings(target=EMBEDDED, mode=Mode.AR, tensor_parallel=2)
    with pytest.raises(MemoryShortError, match="tokens of KV cache, too few for one request"):
        assemble_verifier(settings.engine_config(), print, ranks=Met(8 << 20))
