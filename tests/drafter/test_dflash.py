"""DFlash, DFlash 2 and DSpark heads, against a reference in plain torch with absolute positions and whole texts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssd_serve.base.engine_config import Mode
from ssd_serve.base.errors import CheckpointError, ProtocolError
from ssd_serve.base.logs import get_logger
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.settings import Settings
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.assembly import load_draft
from ssd_serve.drafter.sources.contract import Block, NodeRequest
from ssd_serve.drafter.sources.dflash.config import parse_dflash
from ssd_serve.drafter.sources.dflash.source import DFlashSource, describe_dflash
from ssd_serve.drafter.sources.registry import SourceDescription
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.sampling.noise import log_exponential
from tests.drafter import dflash_reference as reference
from tests.drafter.dflash_reference import BLOCK, CONTEXT, FORMS, HIDDEN, MASK, VOCABULARY, Reference
from tests.end_to_end.tiny_pair import byte_tokenizer
from tests.models import checkpoints

GREEDY, FAN_OUT = SamplingParameters(temperature=0.0), 6
TARGETS = {"dflash": "llama3-gqa-tied", "dflash of speculators": "llama3-gqa-tied"}


class Drafted:
    """A source with a random head in float32, and its reference. `features` are of all positions."""

    def __init__(
        self, form: str, folder: Path, more: dict[str, torch.Tensor] | None = None, **keys: Any
    ) -> None:
        self.form, self.folder = form, folder
        target = checkpoints.make(
            TARGETS.get(form, "qwen3-qk-norm"),
            **{"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "num_hidden_layers": 3},
        )
        checkpoints.save(target, folder / "target")
        byte_tokenizer().save(str(folder / "target" / "tokenizer.json"))
        self.tensors = reference.write(form, folder / "draft", more, **keys)
        self.embedding = target.get_input_embeddings().weight.detach()
        self.head = target.get_output_embeddings().weight.detach()
        self.features = torch.randn(CONTEXT, 2 * HIDDEN, generator=torch.Generator().manual_seed(5))
        self.offset = 0 if "dspark" in form else 1
        self.gap = "context_gap" in str(keys)
        self.source = self.load()
        self.trees: dict[int, SpeculationTree] = {}
        self.tokens: dict[int, list[int]] = {}
        self.first: dict[int, int] = {}
        self.parameters: dict[int, tuple[SamplingParameters, int]] = {}

    def load(self, native: NativeLibrary | None = None) -> DFlashSource:
        settings = Settings(
            target=str(self.folder / "target"),
            draft=str(self.folder / "draft"),
            dtype="fp32",
            native_kernels=False,
            draft_kv_memory_mb=16,
            draft_width=4,
            draft_fan_out=FAN_OUT,
        ).engine_config()
        self.config = settings
        self.loaded = load_draft(settings, str(self.folder / "draft"), "cpu", native, get_logger("d0"))
        assert isinstance(self.loaded.source, DFlashSource)
        return self.loaded.source

    def open(
        self, request: int, tokens: Sequence[int], parameters: SamplingParameters = GREEDY, seed: int = 0
    ) -> None:
        self.source.open(request, tokens, parameters, seed)
        self.tokens[request], self.trees[request] = list(tokens), SpeculationTree(request, 1000)
        self.first[request], self.parameters[request] = 0, (parameters, seed)

    def read(self, request: int, first: int, end: int) -> None:
        if end > first:
            self.source.read(request, first, self.features[first:end])

    def commit(self, request: int, tokens: Sequence[int]) -> None:
        before = len(self.tokens[request])
        self.read(request, before - 1, before - 1 + len(tokens))
        advance = self.trees[request].advance(tokens)
        self.tokens[request] += tokens
        self.trees[request].clear()
        self.source.commit(request, tokens, [node.name for node in advance.path], [])

    def expand(self, *anchors: tuple[int, Node]) -> list[Block]:
        wanted = [NodeRequest(*each) for each in anchors], [[1.0]] * len(anchors)
        found = self.source.expand(*wanted)
        while self.source.pending_prefill:
            found = self.source.expand(*wanted)
        for (request, node), block in zip(anchors, found, strict=True):
            assert isinstance(block, Block)
            if not node.expanded:
                self.trees[request].expand(
                    node, block.tokens[0].tolist(), block.log_probabilities[0].tolist()
                )
        return [block for block in found if block is not None]

    @torch.inference_mode()
    def expected(
        self, request: int, node: Node, wrong: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor, Reference]:
        """Logits [positions, vocabulary] below an anchor, the rows that give them, and the reference."""
        ours = Reference(self.form, self.tensors, self.embedding, self.head, wrong)
        path, committed = [each.token for each in self.trees[request].path(node)], self.tokens[request]
        text, start, first = [committed[-1], *path], len(committed) - 1, self.first[request]
        if self.gap:
            text, start = text[-1:], start + len(path)
        rows = ours.rows(self.features[first : len(committed) - 1], first, text, start)
        offset = 1 - self.offset if wrong == "slot" else self.offset
        rows = rows[len(text) - 1 + offset :]
        return ours.logits(rows), rows, ours

    def error(self, request: int, node: Node, block: Block, wrong: str = "") -> float:
        """Largest difference of the marginals' log-probabilities; later rows alone where pairs change the first."""
        found, _, _ = self.expected(request, node, wrong)
        skipped = 0 if block.pairs is None else 1
        values = found.log_softmax(-1)[skipped : len(block.tokens)]
        tokens = torch.from_numpy(block.tokens[skipped:]).long()[: len(values)]
        drafted = torch.from_numpy(block.log_probabilities[skipped:])[: len(values)]
        return float((drafted - values.gather(1, tokens)).abs().max())

    def check_all(self, *anchors: tuple[int, Node]) -> None:
        for (request, node), block in zip(anchors, self.expand(*anchors), strict=True):
            depth = node.depth - self.trees[request].root.depth
            full = BLOCK - self.offset
            assert len(block.tokens) == (full if self.gap else full - depth)
            assert self.error(request, node, block) < 1e-4
            values = self.expected(request, node)[0].log_softmax(-1)[1:].topk(FAN_OUT).values
            np.testing.assert_allclose(block.log_probabilities[1:], values.numpy(), atol=1e-4)


@pytest.fixture(params=FORMS)
def drafted(request: pytest.FixtureRequest, tmp_path: Path) -> Drafted:
    return Drafted(request.param, tmp_path)


def test_blocks_of_many_anchors_of_several_requests_in_one_forward(drafted: Drafted) -> None:
    texts = {1: [5, 9, 60, 33, 2, 71, 8, 9, 4, 100, 7], 2: [7, 7, 8], 3: [11, 4]}
    for request, text in texts.items():
        drafted.open(request, text)
        drafted.read(request, 0, len(text) - 1) if len(text) > 1 else None
    roots = {request: drafted.trees[request].root for request in texts}
    drafted.check_all(*roots.items())
    children = [
        (each, drafted.trees[each].child_at(root, rank)) for each, root in roots.items() for rank in (0, 2)
    ]
    drafted.check_all(*reversed(children))
    grandchild = drafted.trees[1].child_at(children[1][1], 1)
    drafted.check_all((1, grandchild), (3, drafted.trees[3].child_at(children[4][1], 0)), (1, roots[1]))


def test_context_is_kept_through_commits_gaps_and_prefix_hits(drafted: Drafted) -> None:
    drafted.open(1, [5, 9, 60, 33, 8, 2])
    tree = drafted.trees[1]
    assert drafted.source.expand([NodeRequest(1, tree.root)], [[1.0]]) == [None]
    drafted.read(1, 0, 2)
    assert drafted.source.expand([NodeRequest(1, tree.root)], [[1.0]]) == [None]
    drafted.read(1, 2, 5)
    drafted.check_all((1, tree.root))
    assert drafted.source.pool.used == 5
    child = tree.child_at(tree.root, 0)
    drafted.check_all((1, child))
    drafted.commit(1, [child.token, 77])
    for committed in ([78, 79, 80], [81], []):
        drafted.check_all((1, tree.root))
        assert drafted.source.pool.used == len(drafted.tokens[1]) - 1
        if committed:
            drafted.commit(1, committed)
    drafted.open(2, [5 + place for place in range(20)])
    drafted.read(2, 7, 19)
    drafted.first[2] = 7
    drafted.check_all((2, drafted.trees[2].root))
    drafted.read(2, 15, 19)
    drafted.first[2] = 15
    drafted.check_all((2, drafted.trees[2].root), (1, tree.root))
    drafted.source.close(1)
    drafted.source.close(2)
    assert drafted.source.pool.used == 0


def full_scores(drafted: Drafted, request: int, node: Node) -> list[Any]:
    """For each position a function from the token before to noisy scores of all tokens."""
    logits, rows, ours = drafted.expected(request, node)
    parameters, seed = drafted.parameters[request]
    heat, position = parameters.temperature or 1.0, len(drafted.tokens[request]) + node.depth
    noise: Any = np.zeros((len(rows), VOCABULARY))
    if parameters.temperature:
        noise = log_exponential(
            [seed] * len(rows), [position + each for each in range(len(rows))], VOCABULARY
        )

    def scores(place: int, before: int | None) -> torch.Tensor:
        pair = 0.0 if before is None else ours.pair(before, rows[place])
        return (logits[place] + pair) / heat - torch.from_numpy(noise[place]).float()

    return [lambda before, place=place: scores(place, before) for place in range(len(rows))]


@pytest.mark.parametrize(
    "drafted", [form for form in FORMS if "2" in form or "dspark" in form], indirect=True
)
@pytest.mark.parametrize("heat", [0.0, 0.7])
def test_pairs_share_noise_and_the_probability_of_the_candidates(drafted: Drafted, heat: float) -> None:
    """The first position is ranked after the anchor: DSpark's over the vocabulary, DFlash 2's over its candidates."""
    for request, text in {1: [5, 9, 60, 33, 8, 2], 2: [7, 8, 9]}.items():
        drafted.open(request, text, SamplingParameters(temperature=heat), seed=11)
        drafted.read(request, 0, len(text) - 1)
    roots = [(each, drafted.trees[each].root) for each in (1, 2)]
    drafted.expand(*roots)
    anchors = [(1, drafted.trees[1].child_at(roots[0][1], 1)), roots[1]]
    for (request, node), block in zip(anchors, drafted.expand(*anchors), strict=True):
        assert block.pairs is not None
        found = full_scores(drafted, request, node)
        anchor = node.token if node.parent is not None else drafted.tokens[request][-1]
        own = found[0](anchor)
        if "dspark" in drafted.form:
            values = own.log_softmax(-1)
            best = values.topk(FAN_OUT).indices.tolist()
        else:
            candidates = found[0](None).topk(FAN_OUT).indices
            share = found[0](None).log_softmax(-1)[candidates].logsumexp(0)
            values = torch.full((VOCABULARY,), -torch.inf)
            values[candidates] = own[candidates].log_softmax(-1) + share
            best = values.topk(FAN_OUT).indices.tolist()
        assert block.tokens[0].tolist() == best
        np.testing.assert_allclose(block.log_probabilities[0], values[best].numpy(), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(block.scores[0], own[best].numpy(), atol=1e-4)
        for place in range(1, len(found)):
            marginal = found[place](None)
            tokens = marginal.topk(FAN_OUT).indices
            assert block.tokens[place].tolist() == tokens.tolist()
            share = marginal.log_softmax(-1)[tokens].logsumexp(0)
            for rank, before in enumerate(block.tokens[place - 1].tolist()):
                wanted = found[place](before)[tokens].log_softmax(-1) + share
                np.testing.assert_allclose(block.pairs[place - 1, rank], wanted.numpy(), atol=1e-4)


def test_compiled_kernels_give_the_same_blocks(drafted: Drafted, native: NativeLibrary) -> None:
    found: list[Block] = []
    for library in (None, native):
        drafted.source = drafted.load(library)
        drafted.open(1, [5, 9, 60, 33, 8, 2, 9, 11], SamplingParameters(temperature=0.7), seed=3)
        drafted.read(1, 0, 7)
        found += drafted.expand((1, drafted.trees[1].root))
    for ours, theirs in zip(*found, strict=True):
        if ours is not None and theirs is not None:
            np.testing.assert_allclose(ours, theirs, atol=1e-3)


TRAPS = {
    "slot": list(FORMS),
    "rotary": list(FORMS),
    "full layers": ["dflash sliding", "dflash of speculators", "dflash 2"],
    "causal": ["dflash", "dflash of speculators", "dflash 2", "dspark"],
    "not causal": ["dflash sliding"],
    "context through the input norm": list(FORMS),
    "context normed again": ["dflash"],
    "context a position late": list(FORMS),
    "no hidden norm": list(FORMS),
    "no head norms": list(FORMS),
    "no convolution": ["dflash 2"],
    "block width": ["dflash", "dspark", "dflash 2"],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_known_trap_would_change_the_block(form: str, tmp_path: Path) -> None:
    drafted = Drafted(form, tmp_path)
    drafted.open(1, [5, 9, 60, 33, 2, 71, 8, 9, 4, 100, 7])
    drafted.read(1, 0, 10)
    root = drafted.trees[1].root
    (block,) = drafted.expand((1, root))
    assert drafted.error(1, root, block) < 1e-4
    for wrong in (each for each, forms in TRAPS.items() if form in forms):
        assert drafted.error(1, root, block, wrong) > 0.01, wrong


def test_a_mask_embedding_replaces_the_mask_tokens(tmp_path: Path) -> None:
    drafted = Drafted("dflash", tmp_path, {"mask_embedding": torch.randn(HIDDEN)})
    drafted.open(1, [5, 9, 60, 33])
    drafted.read(1, 0, 3)
    root = drafted.trees[1].root
    drafted.check_all((1, root))
    drafted.check_all((1, drafted.trees[1].child_at(root, 0)))
    assert drafted.error(1, root, drafted.expand((1, root))[0], "mask embedding") > 0.01


def test_heads_that_were_trained_for_the_gap_begin_blocks_at_the_anchor(tmp_path: Path) -> None:
    keys: Any = {"dflash_config": {**FORMS["dflash"]["dflash_config"], "context_gap": 3}}
    drafted = Drafted("dflash", tmp_path, **keys)
    drafted.open(1, [5, 9, 60, 33])
    drafted.read(1, 0, 3)
    tree = drafted.trees[1]
    drafted.check_all((1, tree.root))
    child = tree.child_at(tree.root, 1)
    drafted.check_all((1, child))
    drafted.check_all((1, tree.child_at(child, 0)), (1, tree.root))


def test_anchors_are_roots_unless_the_head_says_otherwise(tmp_path: Path) -> None:
    cases: Any = (({}, {"block": 4}), ({"draft_ahead": True}, {"depth": 4}))
    for keys, ahead in cases:
        drafted = Drafted("dflash", tmp_path, **keys)
        for mode, wanted in ((Mode.SD, cases[0][1]), (Mode.SSD, ahead)):
            config = replace(drafted.config, mode=mode)
            described = SourceDescription(features=(0, 2), keeps_tree=False, **wanted)
            assert describe_dflash(config, tmp_path / "draft") == described
        shallow = replace(drafted.config, mode=Mode.SD, draft_depth=2)
        assert describe_dflash(shallow, tmp_path / "draft").block == 2


def test_a_block_is_whole_at_the_end_of_the_context(tmp_path: Path) -> None:
    drafted = Drafted("dflash", tmp_path)
    drafted.open(1, [3 + place % 90 for place in range(CONTEXT)])
    drafted.read(1, 0, CONTEXT - 1)
    drafted.check_all((1, drafted.trees[1].root))


def test_numbers_of_layers_are_those_of_each_layout() -> None:
    """z-lab and DeepSeek name outputs of layers, speculators inputs; without names they are evenly spaced."""
    assert parse_dflash(FORMS["dflash"], {}).features == parse_dflash(FORMS["dspark"], {}).features == (0, 2)
    assert parse_dflash(FORMS["dflash of speculators"], {}).features == (0, 2)
    whole = {key: value for key, value in FORMS["dflash"].items() if key != "dflash_config"}
    whole |= {"mask_token_id": MASK, "num_hidden_layers": 5}
    assert parse_dflash(whole | {"num_target_layers": 36}, {}).features == (1, 9, 17, 25, 33)
    assert parse_dflash(whole | {"num_target_layers": 32}, {}).features == (1, 8, 15, 22, 29)
    assert parse_dflash(whole | {"num_target_layers": 32, "num_hidden_layers": 1}, {}).features == (16,)


@pytest.mark.parametrize(
    ("form", "keys", "causal"),
    [
        ("dflash sliding", {}, (True, False, True)),
        ("dflash sliding", {"is_causal": False}, (False,) * 3),
        (
            "dflash",
            {"dflash_config": {"causal": True, "target_layer_ids": [0], "mask_token_id": 1}},
            (True,) * 3,
        ),
        ("dflash of speculators", {}, (False,) * 3),
        ("dflash of speculators", {"sliding_window_non_causal": False}, (True, False, True)),
        ("dspark", {}, (False,) * 3),
    ],
)
def test_causal_layers(form: str, keys: dict[str, Any], causal: tuple[bool, ...]) -> None:
    assert parse_dflash(FORMS[form] | keys, {}).causal == causal


@pytest.mark.parametrize(
    ("form", "keys", "message"),
    [
        ("dflash", {"model_type": "gemma4"}, "layers of gemma4 is not supported, only of qwen3, llama"),
        ("dflash", {"attention_sink_bias": True}, "with attention_sink_bias True is not supported"),
        ("dflash", {"is_neox_style": False}, "with is_neox_style False is not"),
        ("dflash 2", {"final_logit_softcapping": 30.0}, "with final_logit_softcapping 30.0 is not"),
        ("dflash", {"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id must be the number"),
        ("dflash sliding", {"sliding_window": None}, "need sliding_window"),
        ("dspark", {"markov_head_type": "rnn"}, "depend on more than two neighbouring tokens"),
        ("dspark", {"target_layer_ids": None}, "names no target layers"),
        ("dspark", {"block_size": 1}, "a block of 1 rows"),
    ],
)
def test_heads_that_cannot_be_computed_are_refused(form: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_dflash(FORMS[form] | keys, {})


def test_heads_and_features_of_other_targets_are_refused(tmp_path: Path) -> None:
    drafted = Drafted("dflash", tmp_path)
    drafted.open(1, [5, 9])
    with pytest.raises(ProtocolError, match="width 127, not 128"):
        drafted.source.read(1, 0, torch.zeros(1, 127))
    cases: Any = (
        ({"num_target_layers": 4}, "for targets of 4 layers; .* has 3"),
        ({"vocab_size": 300}, "a head for targets of width 64 with 300 tokens"),
        ({"draft_vocab_size": 99}, r"proposes 99 of 257 tokens, and has no (d2t|lm_head)"),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 1}}, r"outputs of layers \[0, 3\]"),
        (
            {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 257}},
            "mask_token_id 257 is none of",
        ),
        ({"num_hidden_layers": 4}, "lacks layers.3"),
    )
    for keys, message in cases:
        reference.write("dflash", tmp_path / "draft", **keys)
        with pytest.raises(CheckpointError, match=message):
            drafted.load()
