"""Speculative sampling by rejection, for comparison only: the engine itself never rejects.

Children are drawn from the draft distribution q with noise of the drafter's own; one after the other is
accepted with probability min(1, p/q), else p becomes the residual max(p - q, 0) and q loses that token.
Exact whatever q is. Sources: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
decoding", arXiv 2211.17192; several draws without replacement: Jeon et al., "Recursive speculative decoding",
arXiv 2402.14160.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest
from ssd_serve.drafter.sources.draft_model import ModelSource, RowsToRank
from ssd_serve.messages import SamplingParameters
from ssd_serve.models.interface import Model
from ssd_serve.plan.forwards import Forward
from ssd_serve.plan.virtual_time import Clock, VirtualRounds
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.ranking import draft_scores
from ssd_serve.seeds import mix
from ssd_serve.verifier.round import InFlight, RequestStep, Walk

Floats = npt.NDArray[np.float64]
_DRAFTER, _VERIFIER = 1, 2
"""What makes the drafter's and the verifier's noise differ for one seed."""
_RANKS, _LEVELS = 4, 8


class Drawn:
    """What the drafter tells beside its growth: the distribution that each node's children were drawn from,
    and how often such children were accepted."""

    def __init__(self) -> None:
        self.distributions: dict[int, Floats] = {}  # by node name: [vocabulary]
        self._accepted = np.tile(np.linspace(0.1, 1.9, _LEVELS), (_RANKS, 1))
        self._tried = np.full((_RANKS, _LEVELS), 2.0)

    def observe(self, rank: int, chance: float, accepted: bool) -> None:
        """A child of this rank, drawn with this probability among those left, was tested."""
        place = _place(rank, chance)
        self._accepted[place] += accepted
        self._tried[place] += 1

    def log_reach(self, chances: Sequence[float]) -> list[float]:
        """Estimated log-probability of each child's acceptance, all those before it being rejected first."""
        found: list[float] = []
        left = 1.0
        for rank, chance in enumerate(chances):
            place = _place(rank, chance)
            accepted = float(self._accepted[place] / self._tried[place])
            found.append(float(np.log(max(left * accepted, 1e-9))))
            left *= 1 - accepted
        return found


def _place(rank: int, chance: float) -> tuple[int, int]:
    return min(rank, _RANKS - 1), min(int(chance * _LEVELS), _LEVELS - 1)


class DrawingSource(ModelSource):
    """Draws children instead of ranking them: `draws` of them at random without replacement (exponential race
    with the drafter's own noise), the others by falling probability."""

    def __init__(
        self, model: Model, pool: SlotPool, noise: NoiseRows, fan_out: int, draws: int, drawn: Drawn
    ) -> None:
        super().__init__(model, pool, noise, fan_out)
        self._own_noise = noise
        self._children = fan_out
        self._draws = draws
        self._drawn = drawn
        self._latest: dict[int, Floats] = {}

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        self._drawn.distributions.clear()
        super().open(request, tokens, parameters, mix(seed, _DRAFTER))

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        known = self._drawn.distributions
        self._drawn.distributions = {name: known[name] for name in kept if name in known}
        super().commit(request, tokens, path, kept)

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> Sequence[Candidates | None]:
        self._latest.clear()
        found = super().expand(picks, scales)
        for pick, candidates in zip(picks, found, strict=True):
            if candidates is not None:
                self._drawn.distributions[pick.node] = self._latest[id(candidates)]
        return found

    def _rank(self, logits: torch.Tensor, wish: RowsToRank) -> list[Candidates]:
        """Candidates in the order of testing. Their reach needs no scale."""
        choices = wish.keys
        values = draft_scores(logits, torch.tensor(choices.temperatures), None)
        chances = torch.softmax(values.to(torch.float64), dim=1)  # [rows, vocabulary]
        race = values - self._own_noise.rows(choices.seeds, choices.positions)
        drawn = torch.topk(race, self._draws, dim=1).indices.numpy()
        likely = torch.topk(chances, self._children + self._draws, dim=1).indices.numpy()
        found: list[Candidates] = []
        for row, q in enumerate(chances.numpy()):
            first: list[int] = drawn[row].tolist()
            rest = [token for token in likely[row].tolist() if token not in first]
            tokens = (first + rest)[: self._children]
            left = np.clip(1 - np.concatenate(([0.0], np.cumsum(q[tokens])[:-1])), 1e-12, 1.0)
            values_ = np.array(self._drawn.log_reach((q[tokens] / left).tolist()), dtype=np.float32)
            scores = np.log(np.maximum(q[tokens], 1e-30)).astype(np.float32)
            candidates = Candidates(np.array(tokens, dtype=np.int32), values_, scores, float(scores[0]))
            self._latest[id(candidates)] = q
            found.append(candidates)
        return found


def reject(
    p: Floats, q: Floats, drawn: Sequence[int], random: np.random.Generator, seen: Drawn | None = None
) -> tuple[int, int | None]:
    """The token of one position: the first accepted of `drawn`, with its rank, or one of the residual.

    `p` and `q` are [vocabulary], sums 1; `drawn` are draws from q without replacement, in their order.
    """
    p, q = p.copy(), q.copy()
    for rank, token in enumerate(drawn):
        chance = float(q[token])
        accepted = bool(random.random() * chance < p[token])
        if seen is not None:
            seen.observe(rank, chance, accepted)
        if accepted:
            return token, rank
        residual = np.maximum(p - q, 0.0)
        if residual.sum() > 0:
            p = residual / residual.sum()
        q[token] = 0.0
        if q.sum() <= 0:
            break
        q /= q.sum()
    return int(random.choice(len(p), p=p)), None


class RejectionRounds(VirtualRounds):
    """Rounds that walk by rejection sampling. Temperatures above 0 only: no truncation, no penalties."""

    def __init__(
        self,
        model: Model,
        noise: NoiseRows,
        eos: tuple[int, ...],
        clock: Clock,
        forward_s: Callable[[Forward], float],
        drawn: Drawn,
    ) -> None:
        super().__init__(model, noise, eos, clock, forward_s)
        self._drawn = drawn

    def finish(self, flight: InFlight) -> list[Walk]:
        flight.wait()
        walks: list[Walk] = []
        start = 0
        for each in flight.work:
            walks.append(self._walked(each, flight.result.logits[start : start + each.wanted]))
            start += each.wanted
        return walks

    def _walked(self, work: RequestStep, logits: torch.Tensor) -> Walk:
        request = work.part.request
        if not work.part.final:
            return Walk(work, (), (), "", ())
        root = request.replica.tree.root.name if request.replica is not None else 0
        chances = torch.softmax(logits.to(torch.float64) / request.parameters.temperature, dim=1).numpy()
        tree = work.tree
        tokens: list[int] = []
        accepted: list[int] = []
        here, name, ended = -1, root, ""
        while not ended:
            # In the order of drawing: no rank is ever verified without those before it.
            children = [index for index, parent in enumerate(tree.parents) if parent == here]
            position = len(request.tokens) + len(tokens)
            random = np.random.default_rng([request.seed, position, _VERIFIER])
            p = chances[here + 1]
            q = self._drawn.distributions[name] if children else p
            token, rank = reject(p, q, [tree.tokens[index] for index in children], random, self._drawn)
            tokens.append(token)
            if token in request.ends:
                ended = "stop"
            elif len(tokens) >= request.left:
                ended = "length"
            if rank is None or ended:
                break
            here, name = children[rank], mix(name, token)
            accepted.append(here)
        return Walk(work, tuple(accepted), tuple(tokens), ended, ())
