"""Where a round computes, and who drafts for it: the governor's layout, on as many cores as are worth it.

Prompts are read on all cores, where that saves more than a round without drafts loses. Knows the drafters as
what works or pauses; chooses no nodes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.planning.core_choice import CoreChoice
from ssd_serve.base.cost import CostTable, Reading
from ssd_serve.verifier.planning.governor import Governor
from ssd_serve.verifier.planning.growth import GrowPolicy
from ssd_serve.verifier.planning.layout import Cores, Layout


@dataclass(frozen=True, slots=True)
class Governing:
    """What may change while the engine runs, by layout: the cores, what forwards cost there, and how long a
    round waits for drafts. `few`: what they cost where a round without a drafter beside it computes on as few
    cores as with one."""

    governor: Governor[Layout]
    cores: Cores
    costs: Mapping[Layout, CostTable]
    policies: Mapping[Layout, GrowPolicy]
    few: CostTable | None = None


class Placing:
    """`cost` and `policy` are those of the place where the next round computes. `governing` None: there is
    one place for ever."""

    def __init__(
        self,
        drafters: Drafters,
        cost: CostTable,
        policy: GrowPolicy,
        governing: Governing | None,
        clock: Callable[[], float],
    ) -> None:
        self.cost = cost
        self.policy = policy
        self.governing = governing
        self.layout: Layout | None = None
        """Who drafts, by the governor; None while nobody chooses."""
        self._drafters = drafters
        self._choice: CoreChoice | None = None
        if governing is not None and governing.few is not None and governing.cores.differ:
            self._choice = CoreChoice(governing.few, governing.costs[Layout.OFF], clock)
        self._entered: tuple[Layout, bool] | None = None
        """The layout in which the round computes, and whether on all of its cores."""
        self._nodes = 0
        """Of the last round."""

    @property
    def reads_alone(self) -> bool:
        """Whether rounds may read prompts on cores that a drafter has otherwise, which reads them later."""
        return self._choice is not None

    @property
    def reading(self) -> bool:
        """Whether the round reads prompts on cores that a drafter has otherwise."""
        return self._entered is not None and self._entered[0] is not self.layout

    def costs(self, requests: int) -> dict[Layout, CostTable]:
        """What forwards of so many rows cost in each layout, where they would compute."""
        if self.governing is None:
            return {}
        costs = dict(self.governing.costs)
        if self._choice is not None:
            alone = self._choice.likely(requests, Reading())
            costs = {layout: cost if layout is Layout.ASYNC else alone for layout, cost in costs.items()}
        return costs

    def place(self, requests: int, decoding: int, rows: int, reading: Reading) -> None:
        """Choose for a round while `requests` requests run, of which `decoding` decode, and `rows` rows
        without nodes: one for each of these, the others of prompts."""
        if self.governing is None or not requests:
            return
        self.layout = layout = self.governing.governor.choose(requests, decoding > 0)
        wide = True
        if self._choice is not None:
            if layout is not Layout.ASYNC:
                wide = self._choice.wide(rows + self._nodes, reading)
            elif rows > decoding and self._choice.saved_s(rows, reading) > self._missed_s(
                self._choice, layout, decoding
            ):
                layout = Layout.OFF
        if (layout, wide) != self._entered:
            self._enter(layout, wide, self.governing)

    def _missed_s(self, choice: CoreChoice, layout: Layout, decoding: int) -> float:
        """What it costs at most that nobody drafts in a round: a draft step, and for those that decode what
        nodes bring, which is less than a round of theirs."""
        round_s = choice.table(wide=False).first_seconds(decoding, Reading()) if decoding else 0.0
        return self._drafters.step_of(layout) + round_s

    def observe(self, rows: int, nodes: int, reading: Reading, seconds: float) -> None:
        """The round's forward of `rows` rows, of which some are nodes, took `seconds`."""
        self.cost.observe(rows, seconds, reading)
        self._nodes = nodes
        if self._choice is not None and self._entered is not None and self._entered[0] is not Layout.ASYNC:
            self._choice.observe(self._entered[1], rows, seconds, reading)

    def _enter(self, layout: Layout, wide: bool, governing: Governing) -> None:
        changes = self._entered is None or self._entered[0] is not layout
        self._entered = (layout, wide)
        self.cost = governing.costs[layout]
        if self._choice is not None and layout is not Layout.ASYNC:
            self.cost = self._choice.table(wide)
        governing.cores.enter(layout, wide)
        if changes:
            self.policy = governing.policies[layout]
            self._drafters.use(layout)
