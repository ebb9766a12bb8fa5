"""Tests of the assignment of requests to drafters: shared by load, and moved only when necessary."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssd_serve.verifier.drafters.assignment import MAX_MOVES, DrafterGroup, Reassignment
from tests.examples import examples


class Sharing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.team = DrafterGroup()
        self.told: dict[int, set[int]] = {}
        self.open: set[int] = set()
        self.begun = 0
        self.joined = 0

    def follow(self, moves: list[Reassignment]) -> None:
        for move in moves:
            if move.origin in self.told:
                self.told[move.origin].remove(move.request)
            assert move.request not in self.told[move.target]
            self.told[move.target].add(move.request)

    @rule()
    def begin(self) -> None:
        self.begun += 1
        self.open.add(self.begun)
        home = self.team.assign(self.begun)
        if home is not None:
            self.told[home].add(self.begun)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.open)))
        self.open.remove(request)
        home = self.team.remove(request)
        if home is not None:
            self.told[home].remove(request)

    @rule()
    def join(self) -> None:
        self.joined += 1
        self.told[self.joined] = set()
        self.follow(self.team.join(self.joined, self.open))

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.told)))
        lost = self.told.pop(member)
        moves = self.team.leave(member)
        assert {move.request for move in moves} == (lost if self.told else set())
        self.follow(moves)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), step_s=st.sampled_from([0.0, 0.001, 0.0012, 0.0018, 0.004]), lags=st.booleans())
    def judge(self, data: st.DataObject, step_s: float, lags: bool) -> None:
        self.team.update(data.draw(st.sampled_from(sorted(self.told))), step_s, lags)

    @rule()
    def balance(self) -> None:
        moves = self.team.rebalance()
        assert len(moves) <= MAX_MOVES
        self.follow(moves)

    @rule()
    def settle(self) -> None:
        for _ in range(2 * len(self.open) + 1):
            self.follow(self.team.rebalance())
        assert self.team.rebalance() == []
        team = self.team
        well = [member for member in self.told if not team.is_lagging(member)]
        for one in well:
            assert all(team.load(one) <= team.load(other, 1) for other in well)
        for member in set(self.told) - set(well):
            assert not well or not team.num_requests(member)

    @invariant()
    def every_request_has_exactly_one_drafter(self) -> None:
        everywhere = sorted(request for requests in self.told.values() for request in requests)
        assert everywhere == (sorted(self.open) if self.told else [])
        for member, requests in self.told.items():
            assert {self.team.drafter_of(request) for request in requests} <= {member}
            assert self.team.num_requests(member) == len(requests)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_equals_get_equal_shares() -> None:
    team = DrafterGroup()
    for member in range(4):
        team.join(member, ())
    for request in range(16):
        team.assign(request)
    assert [team.num_requests(member) for member in range(4)] == [4, 4, 4, 4]
    assert team.rebalance() == []


def test_a_slow_drafter_gets_less_and_a_little_slower_is_not_slow() -> None:
    team = DrafterGroup()
    for member, step_s in ((0, 0.001), (1, 0.003), (2, 0.0019)):
        team.join(member, ())
        team.update(member, step_s, lagging=False)
    for request in range(14):
        team.assign(request)
    assert [team.num_requests(member) for member in range(3)] == [6, 2, 6]
    team.update(1, 0.0025, lagging=False)
    assert team.rebalance() == []  # a small change of its step time moves no request
    team.update(1, 0.0012, lagging=False)
    while team.rebalance():
        pass
    assert [team.num_requests(member) for member in range(3)] == [5, 4, 5]
