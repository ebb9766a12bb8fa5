"""Tests of the assignment of requests to drafters: shared by load, and moved only when necessary."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssd_serve.verifier.drafters.assignment import MAX_MOVES, DrafterGroup, Reassignment
from tests.examples import examples


class Assignment(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.group = DrafterGroup()
        self.assigned: dict[int, set[int]] = {}
        self.open: set[int] = set()
        self.num_begun = 0
        self.num_joined = 0

    def follow(self, moves: list[Reassignment]) -> None:
        for move in moves:
            if move.origin in self.assigned:
                self.assigned[move.origin].remove(move.request)
            assert move.request not in self.assigned[move.target]
            self.assigned[move.target].add(move.request)

    @rule()
    def begin(self) -> None:
        self.num_begun += 1
        self.open.add(self.num_begun)
        drafter = self.group.assign(self.num_begun)
        if drafter is not None:
            self.assigned[drafter].add(self.num_begun)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.open)))
        self.open.remove(request)
        drafter = self.group.remove(request)
        if drafter is not None:
            self.assigned[drafter].remove(request)

    @rule()
    def join(self) -> None:
        self.num_joined += 1
        self.assigned[self.num_joined] = set()
        self.follow(self.group.join(self.num_joined, self.open))

    @precondition(lambda self: self.assigned)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.assigned)))
        lost = self.assigned.pop(member)
        moves = self.group.leave(member)
        assert {move.request for move in moves} == (lost if self.assigned else set())
        self.follow(moves)

    @precondition(lambda self: self.assigned)
    @rule(data=st.data(), step_s=st.sampled_from([0.0, 0.001, 0.0012, 0.0018, 0.004]), lags=st.booleans())
    def judge(self, data: st.DataObject, step_s: float, lags: bool) -> None:
        self.group.update(data.draw(st.sampled_from(sorted(self.assigned))), step_s, lags)

    @rule()
    def balance(self) -> None:
        moves = self.group.rebalance()
        assert len(moves) <= MAX_MOVES
        self.follow(moves)

    @rule()
    def settle(self) -> None:
        for _ in range(2 * len(self.open) + 1):
            self.follow(self.group.rebalance())
        assert self.group.rebalance() == []
        group = self.group
        responsive = [member for member in self.assigned if not group.is_lagging(member)]
        for one in responsive:
            assert all(group.load(one) <= group.load(other, 1) for other in responsive)
        for member in set(self.assigned) - set(responsive):
            assert not responsive or not group.num_requests(member)

    @invariant()
    def every_request_has_exactly_one_drafter(self) -> None:
        everywhere = sorted(request for requests in self.assigned.values() for request in requests)
        assert everywhere == (sorted(self.open) if self.assigned else [])
        for member, requests in self.assigned.items():
            assert {self.group.drafter_of(request) for request in requests} <= {member}
            assert self.group.num_requests(member) == len(requests)


TestAssignment = Assignment.TestCase
TestAssignment.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_slow_drafter_is_assigned_fewer_requests() -> None:
    group = DrafterGroup()
    for member, step_s in ((0, 0.001), (1, 0.003), (2, 0.0019)):
        group.join(member, ())
        group.update(member, step_s, lagging=False)
    for request in range(14):
        group.assign(request)
    assert [group.num_requests(member) for member in range(3)] == [6, 2, 6]
    group.update(1, 0.0025, lagging=False)
    assert group.rebalance() == []  # a small change of its step time moves no request
    group.update(1, 0.0012, lagging=False)
    while group.rebalance():
        pass
    assert [group.num_requests(member) for member in range(3)] == [5, 4, 5]
