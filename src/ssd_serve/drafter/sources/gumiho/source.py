"""A Gumiho head as a draft source: the first two levels node by node, each later subtree in one block.

Below the root and its children the layers draft as EAGLE's do. A node two or more tokens below the root gets a block of
the remaining heads; they read the first two tokens of its path, and no KV.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.cache.node import Node
from ssd_serve.drafter.sources.contract import Block, Candidates, NodeRequest, Scales
from ssd_serve.drafter.sources.draft_model import RankingInputs, blocks_of
from ssd_serve.drafter.sources.eagle import EagleSource, describe_eagle, load_head_source
from ssd_serve.drafter.sources.lm_heads.source import HeadRows
from ssd_serve.drafter.sources.loading import LoadedSource, SourceConfig
from ssd_serve.drafter.sources.registry import RegisteredSource, SourceDescription
from ssd_serve.models.heads.gumiho import GumihoHead
from ssd_serve.models.heads.load import count_guesses

SERIAL = 2
"""Tokens that the layers draft."""


class GumihoSource(EagleSource):
    """Expands nodes down to the depth of the last head."""

    def expand(
        self, requests: Sequence[NodeRequest], scales: Sequence[Scales]
    ) -> Sequence[Candidates | Block | None]:
        """Run the layers for nodes near the root, and the heads for all others."""
        paths = [_path(each.at) for each in requests]
        near = [index for index, path in enumerate(paths) if len(path) < SERIAL]
        ranked = super().expand([requests[each] for each in near], [scales[each] for each in near])
        if len(near) == len(requests):
            return ranked
        found = {**dict(zip(near, ranked, strict=True)), **self._blocks(requests, scales, paths)}
        return [found.get(index) for index in range(len(requests))]

    def _blocks(
        self, requests: Sequence[NodeRequest], scales: Sequence[Scales], paths: Sequence[Sequence[Node]]
    ) -> dict[int, Block]:
        """Blocks of the nodes that some head reaches, by index."""
        if not isinstance(self._head, GumihoHead):
            raise TypeError("the head guesses no later tokens")
        head, rows = self._head, HeadRows[int]()
        tokens, vectors = list[list[int]](), list[torch.Tensor]()
        for index, (request, path) in enumerate(zip(requests, paths, strict=True)):
            heads = range(len(path) - SERIAL, head.guesses)
            known = self._opening(request.request, path) if heads and len(path) >= SERIAL else None
            if known is None:
                continue
            held = self.held[request.request]
            key = held.seed, held.temperature, held.start + len(held.tokens) + len(path)
            rows.add(index, heads, request, scales[index], key, len(tokens))
            tokens.append([node.token for node in path[:SERIAL]])
            vectors.append(known)
        if not rows.ready:
            return {}
        joined = head.join(torch.tensor(tokens), torch.stack(vectors))
        logits = rows.logits(lambda each, anchors: head.guess(each, joined[list(anchors)]))
        lines = self._lines(rows.keys, rows.allowed)
        ranked = self._rank(logits, RankingInputs(rows.keys, lines, rows.scales, rows.allowed, rows.counts))
        return dict(zip(rows.ready, blocks_of(ranked, rows.counts), strict=True))

    def _opening(self, request: int, path: Sequence[Node]) -> torch.Tensor | None:
        """The vectors before the first two tokens of a path [2, hidden]; None if one is unknown."""
        outputs, root = self._outputs[request], path[0].parent
        names = [-1 if root is None else root.name, path[0].name]
        return torch.stack([outputs[name] for name in names]) if outputs.keys() >= set(names) else None


def _path(node: Node) -> list[Node]:
    path = list[Node]()
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def describe_gumiho(config: EngineConfig, folder: Path | None) -> SourceDescription:
    """A head reads the target's normed last hidden state, and drafts a fixed number of tokens."""
    described = describe_eagle(config, folder)
    return (
        described if folder is None else replace(described, depth=SERIAL + count_guesses(folder), lends=True)
    )


def load_gumiho(source: SourceConfig) -> LoadedSource:
    """Load a head for the configured target and measure the step of its layers."""
    return load_head_source(source, GumihoSource)


SOURCE = RegisteredSource(load_gumiho, describe_gumiho)
