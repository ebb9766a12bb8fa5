"""What each layout should do for the requests that run, before live rounds tell: the governor asks.

Knows what drafters say of their steps, and cost tables; chooses nothing.
"""

from collections.abc import Sequence

from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.base.cost import HostCost, Reading
from ssd_serve.verifier.planning.forecast import (
    DecodingLoad,
    DraftStep,
    Rightness,
    forecast,
    slowed_by_reading,
    with_reading,
)
from ssd_serve.verifier.planning.layout import Layout
from ssd_serve.verifier.planning.placing import Governing, Placing
from ssd_serve.verifier.request import Request


class Expectations:
    """`width`: nodes of a draft step; `host` and `right` are what the planner learns."""

    def __init__(
        self,
        drafters: Drafters,
        placing: Placing,
        governing: Governing,
        width: int,
        host: HostCost,
        right: Rightness,
    ) -> None:
        self._drafters = drafters
        self._placing = placing
        self._costs = governing.costs
        self._width = width
        self._host = host
        self._right = right
        self._running: Sequence[Request] = ()
        self._context = 0.0
        governing.governor.forecast = self._forecast
        governing.governor.lasting = self._lasting
        governing.governor.slowed = self._slowed

    def begin(self, running: Sequence[Request], context: float) -> None:
        """A round begins while these requests run, of so many tokens of context on average."""
        self._running, self._context = tuple(running), context

    def _forecast(self, requests: int) -> dict[Layout, float]:
        """What each layout should give with so many requests."""
        steps = {layout: DraftStep(self._drafters.step_of(layout), self._width) for layout in self._costs}
        load = DecodingLoad(requests, self._context)
        unit_s = self._costs[Layout.OFF].first_seconds(requests, load.reading())
        gains = forecast(load, unit_s, self._placing.costs(requests), steps, self._host, self._right.share)
        late = {Layout.SYNC: 1 - self._beside_others, Layout.ASYNC: float(self._placing.reads_alone)}
        for layout, share in late.items():
            if layout in gains and share:
                plain_s, read_s = self._whole_s(layout)
                beside = layout is Layout.ASYNC
                gains[layout] = with_reading(gains[layout], plain_s, share * read_s, beside)
        return gains

    @property
    def _beside_others(self) -> float:
        """The share of prompts that an inline draft reads while others decode and wait for it: in rounds that
        read prompts. The prompt of a request alone is read when its first round that decodes waits."""
        return 1 - 1 / max(1, len(self._running))

    def _lasting(self, layout: Layout) -> float:
        """What the layout would give where it begins now, as a share of what it gives the running requests
        from beginning to end: its drafters have their texts to read in either case, for fewer tokens now."""
        if layout is Layout.OFF or not (unread_s := self._drafters.unread_s(layout)):
            return 1.0
        left_s = self._plain_s(sum([request.left for request in self._running]))
        whole_s, read_s = self._whole_s(layout)
        return min(1.0, left_s * (whole_s + read_s) / (whole_s * (left_s + unread_s)))

    def _whole_s(self, layout: Layout) -> tuple[float, float]:
        """Seconds of plain decoding for the running requests from beginning to end, and those for which the
        layout's drafters read their prompts."""
        prompts = sum([request.prompt_length for request in self._running])
        tokens = sum([request.parameters.max_tokens for request in self._running])
        return max(self._plain_s(tokens), 1e-9), self._drafters.prefill_s_per_token(layout) * prompts

    def _slowed(self, layout: Layout) -> float:
        """By how much the layout should slow rounds that read prompts: drafters on the target's device read
        them too."""
        if layout is not Layout.SYNC:
            return 1.0
        return slowed_by_reading(self._costs[Layout.OFF], self._beside_others * self._drafters.prefill_s_per_token(layout))

    def _plain_s(self, tokens: int) -> float:
        """Seconds of plain decoding for so many tokens of the running requests together."""
        requests = len(self._running)
        return tokens / max(1, requests) * self._costs[Layout.OFF].first_seconds(requests, Reading())
