"""What a round says about the trees that it has verified."""

import pytest

from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.verifier.request import accept, share
from ssd_serve.verifier.round import RequestStep, TreeRows, Walk
from ssd_serve.verifier.scheduler import ScheduledChunk

TREE = TreeRows([5, 6, 7], parents=[-1, -1, 0], depths=[1, 1, 2])
"""Two children of the root, and one below the first of them."""


@pytest.mark.parametrize(
    ("accepted", "ended", "levels"),
    [
        ((), "", 1),  # both of the first level were wrong
        ((0,), "", 2),  # the second level was wrong
        ((1,), "", 1),  # nothing was verified below
        ((0, 2), "", 2),
        ((0,), "stop", 1),  # the text was over before the second level
    ],
)
def test_levels_are_counted_where_the_text_came_by_and_nodes_were_there(
    accepted: tuple[int, ...], ended: str, levels: int
) -> None:
    submit = Submit(0, (1, 2), SamplingParameters(max_tokens=9), 0)
    part = ScheduledChunk(accept(submit, share(submit, ()), 64, 50), (0,), final=True)
    tokens = tuple(range(len(accepted) + 1))
    assert Walk(RequestStep(part, TREE, (1, 2, 3)), accepted, tokens, ended, ()).levels == levels
    assert Walk(RequestStep(part), (), (1,), "", ()).levels == 0
