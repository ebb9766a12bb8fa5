"""PARD and PARD-2 drafts, against transformers' models that read tokens and masks as one causal text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import CheckpointError, ProtocolError
from ssd_serve.base.logs import get_logger
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.settings import Settings
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.assembly import load_draft
from ssd_serve.drafter.sources.contract import Block, NodeRequest
from ssd_serve.drafter.sources.pard.config import PardConfig, parse_pard
from ssd_serve.drafter.sources.pard.source import Pard2Source, PardSource
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.models.interface import feature_name
from ssd_serve.models.load import ModelOptions, load_model
from tests.end_to_end.tiny_pair import byte_tokenizer
from tests.models import checkpoints

GREEDY = SamplingParameters(temperature=0.0)
MASK, POSITIONS, FAN_OUT, VOCABULARY, CONTEXT = 190, 4, 3, 257, 96
TARGET_LAYERS = [-1, -3, 2]
FAMILIES = ["llama3-gqa-tied", "qwen3-qk-norm"]


def sized(name: str, **changes: Any) -> Any:
    return checkpoints.make(name, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, **changes)


def write(model: Any, folder: Path, **keys: Any) -> Path:
    """A checkpoint with a tokenizer and further keys of `config.json`."""
    checkpoints.save(model, folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


class Drafted:
    """Sources of a random draft in float32, and its reference.

    `features` are of all positions; the reference's row at position t adds the projection of features t - 1.
    """

    def __init__(self, family: str, folder: Path, pard2: bool = False, bias: bool = False) -> None:
        self.model = sized(family, num_hidden_layers=2)
        self.target = write(sized("llama", hidden_size=32), folder / "target")
        keys: dict[str, Any] = {"pard_token": MASK, "spd_type": "pard"}
        self.weight = 0.2 * torch.randn(64, 3 * 32, generator=torch.Generator().manual_seed(3))
        self.bias = 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(4)) if bias else None
        if pard2:
            keys |= {"spd_type": "pard2", "pard2_scale": 0.7, "pard2_target_dim": 96}
            keys |= {"pard2_proj_bias": bias, "pard2_target_layers": TARGET_LAYERS}
        self.folder = write(self.model, folder / "draft", **keys)
        if pard2:
            tensors = {"target_proj.weight": self.weight} | ({"target_proj.bias": self.bias} if bias else {})
            torch.save(tensors, self.folder / "warp_model.bin")
        self.features = torch.randn(CONTEXT, 96, generator=torch.Generator().manual_seed(5))
        self.pard2 = pard2
        self.source = self.load()
        self.trees: dict[int, SpeculationTree] = {}
        self.tokens: dict[int, list[int]] = {}
        self.first: dict[int, int] = {}

    def load(self, **settings: Any) -> PardSource:
        more: dict[str, Any] = {"allow_pickle": True, **settings}
        wanted = Settings(
            target=str(self.target),
            draft=str(self.folder),
            dtype="fp32",
            native_kernels=False,
            draft_kv_memory_mb=16,
            draft_width=4,
            draft_depth=POSITIONS,
            draft_fan_out=FAN_OUT,
            **more,
        ).engine_config()
        self.loaded = load_draft(wanted, str(self.folder), "cpu", None, get_logger("d0"))
        assert isinstance(self.loaded.source, PardSource)
        return self.loaded.source

    def open(self, request: int, tokens: Sequence[int]) -> None:
        self.source.open(request, tokens, GREEDY, 0)
        self.tokens[request], self.trees[request] = list(tokens), SpeculationTree(request, 1000)
        self.first[request] = -1

    def read(self, request: int, first: int, end: int) -> None:
        if isinstance(self.source, Pard2Source):
            self.source.read(request, first, self.features[first:end])

    def commit(self, request: int, tokens: Sequence[int]) -> None:
        before = len(self.tokens[request])
        self.read(request, before - 1, before - 1 + len(tokens))
        tree = self.trees[request]
        advance = tree.advance(tokens)
        self.tokens[request] += tokens
        tree.clear()
        self.source.commit(request, tokens, [node.name for node in advance.path], [])

    def expand(self, *anchors: tuple[int, Node]) -> list[Block | None]:
        found = self.source.expand([NodeRequest(*each) for each in anchors], [[1.0]] * len(anchors))
        for (request, node), block in zip(anchors, found, strict=True):
            if block is not None and not node.expanded:
                self.trees[request].expand(
                    node, block.tokens[0].tolist(), block.log_probabilities[0].tolist()
                )
        return list(found)

    @torch.inference_mode()
    def expected(self, request: int, node: Node) -> torch.Tensor:
        """Log-probabilities [positions, vocabulary] below an anchor."""
        path, committed = [each.token for each in self.trees[request].path(node)], self.tokens[request]
        count = min(POSITIONS, CONTEXT + 1 - len(committed) - len(path))
        text = [*committed, *path, *[MASK] * (count - 1)]
        first = self.first[request] + 1
        embedded = self.model.get_input_embeddings()(torch.tensor(text[first:]))
        if self.pard2:
            shifted = torch.cat((torch.zeros(1, 96), self.features))[: len(committed)]
            shifted = torch.cat((shifted, shifted[-1:].expand(len(text) - len(committed), -1)))[first:]
            projected = shifted @ self.weight.T + (0 if self.bias is None else self.bias)
            embedded = embedded + 0.7 * projected
        places = torch.arange(first, len(text))[None]
        logits = self.model(inputs_embeds=embedded[None], position_ids=places).logits[0, -count:]
        logits[:, MASK] = -torch.inf
        found: torch.Tensor = logits.log_softmax(-1)
        return found

    def check(self, request: int, node: Node, block: Block | None) -> None:
        assert block is not None
        wanted = self.expected(request, node)
        chosen = wanted.gather(1, torch.from_numpy(block.tokens).long())
        for expected in (chosen, wanted.topk(FAN_OUT).values):  # two tokens may be alike
            np.testing.assert_allclose(block.log_probabilities, expected.numpy(), atol=1e-4)

    def check_all(self, *anchors: tuple[int, Node]) -> None:
        for (request, node), block in zip(anchors, self.expand(*anchors), strict=True):
            self.check(request, node, block)


@pytest.fixture(params=[(family, pard2) for family in FAMILIES for pard2 in (False, True)], ids=str)
def drafted(request: pytest.FixtureRequest, tmp_path: Path) -> Drafted:
    return Drafted(request.param[0], tmp_path, request.param[1], bias=request.param[0] == FAMILIES[0])


def test_blocks_of_many_anchors_of_several_requests_in_one_forward(drafted: Drafted) -> None:
    texts = {1: [5, 9, 60, 33, 2, 71], 2: [7, 7, 8], 3: [11]}
    for request, text in texts.items():
        drafted.open(request, text)
        drafted.read(request, 0, len(text) - 1)
    roots = {request: drafted.trees[request].root for request in texts}
    drafted.check_all(*roots.items())
    children = [
        (each, drafted.trees[each].child_at(root, rank)) for each, root in roots.items() for rank in (0, 2)
    ]
    drafted.check_all(*reversed(children))
    grandchild = drafted.trees[1].child_at(children[1][1], 1)
    other = drafted.trees[1].child_at(roots[1], 1)
    drafted.check_all((1, grandchild), (3, drafted.trees[3].child_at(children[4][1], 0)), (1, other))


def test_leaves_of_a_block_are_anchors_though_nodes_above_have_no_kv(drafted: Drafted) -> None:
    drafted.open(1, [5, 9, 60, 33])
    drafted.read(1, 0, 3)
    tree = drafted.trees[1]
    (block,) = drafted.expand((1, tree.root))
    assert block is not None
    node = tree.root
    for level in range(1, POSITIONS):  # as the core attaches a block
        node = tree.child_at(node, 1)
        tree.expand(node, block.tokens[level].tolist(), block.log_probabilities[level].tolist())
    leaf = tree.child_at(node, 0)
    drafted.check_all((1, leaf), (1, tree.root), (1, node))
    drafted.check_all((1, node), (1, leaf))  # their logits are computed again


def test_blocks_after_hits_and_misses_and_no_kv_of_masks(drafted: Drafted) -> None:
    drafted.open(1, [5, 9, 60, 33])
    drafted.read(1, 0, 3)
    tree = drafted.trees[1]
    drafted.check_all((1, tree.root))
    assert drafted.source.pool.used == 4
    child = tree.child_at(tree.root, 0)
    drafted.check_all((1, child))
    assert drafted.source.pool.used == 5
    drafted.commit(1, [child.token, 77])
    for committed in ([78, 79, 80], [81], []):
        drafted.check_all((1, tree.root))
        assert drafted.source.pool.used == len(drafted.tokens[1])
        if committed:
            drafted.commit(1, committed)
    drafted.source.close(1)
    assert drafted.source.pool.used == 0


def test_blocks_end_with_the_context(drafted: Drafted) -> None:
    drafted.open(1, [3 + place % 90 for place in range(CONTEXT - 1)])
    drafted.read(1, 0, CONTEXT - 2)
    (block,) = drafted.expand((1, drafted.trees[1].root))
    drafted.check(1, drafted.trees[1].root, block)
    assert block is not None
    assert len(block.tokens) == 2


@pytest.mark.parametrize("drafted", [("qwen3-qk-norm", True)], indirect=True)
def test_pard2_waits_for_outputs_and_restarts_after_a_gap(drafted: Drafted) -> None:
    drafted.open(1, [5, 9, 60, 33, 8])
    root = drafted.trees[1].root
    assert drafted.expand((1, root)) == [None]
    drafted.read(1, 0, 2)
    assert drafted.expand((1, root)) == [None]
    drafted.read(1, 2, 4)
    drafted.check_all((1, root))
    drafted.open(1, [5, 9, 60, 33, 8, 13])
    drafted.read(1, 2, 5)
    drafted.first[1] = 2
    drafted.check_all((1, drafted.trees[1].root))
    drafted.read(1, 0, 5)
    drafted.first[1] = -1
    assert drafted.source.pool.used == 0
    drafted.check_all((1, drafted.trees[1].root))
    assert isinstance(drafted.source, Pard2Source)
    with pytest.raises(ProtocolError, match="width 95, not 96"):
        drafted.source.read(1, 5, torch.zeros(1, 95))


def test_the_mask_token_is_never_proposed(tmp_path: Path) -> None:
    drafted = Drafted(FAMILIES[0], tmp_path)
    for _ in range(2):
        drafted.open(1, [5, 9, 60])
        (block,) = drafted.expand((1, drafted.trees[1].root))
        assert block is not None
        best = int(block.tokens[0, 0])
        config = json.loads((drafted.folder / "config.json").read_text())
        assert best != config["pard_token"]
        (drafted.folder / "config.json").write_text(json.dumps(config | {"pard_token": best}))
        drafted.source = drafted.load()


def test_masks_and_tokens_of_another_vocabulary_are_translated(tmp_path: Path) -> None:
    """The target's ids are the draft's in reverse, without the mask."""
    drafted = Drafted(FAMILIES[1], tmp_path)
    file = drafted.target / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    names = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    tokenizer["model"]["vocab"] = {
        name: (VOCABULARY - place) % VOCABULARY for place, name in enumerate(names)
    }
    file.write_text(json.dumps(tokenizer))
    drafted.source = drafted.load()
    drafted.open(1, [5, 9, 60])
    wanted = drafted.expected(1, drafted.trees[1].root)
    drafted.open(2, [VOCABULARY - each for each in (5, 9, 60)])
    (block,) = drafted.expand((2, drafted.trees[2].root))
    assert block is not None
    chosen = wanted.gather(1, (VOCABULARY - torch.from_numpy(block.tokens).long()) % VOCABULARY)
    np.testing.assert_allclose(block.log_probabilities, chosen.numpy(), atol=1e-4)


def test_outputs_are_those_of_transformers_hidden_states(tmp_path: Path) -> None:
    """-1 is the normed output of the last layer, i the output of layer i - 1, counted from 0."""
    model = sized("llama", hidden_size=32)
    folder, tokens = checkpoints.save(model, tmp_path / "target"), [5, 9, 60, 33]
    raw = {"vocab_size": 9, "pard_token": 1, "pard2": True, "pard2_target_dim": 96}
    layers = parse_pard(raw | {"pard2_target_layers": TARGET_LAYERS}, 8, 3, 32).features
    assert layers == (FINAL, 0, 1)
    ours = load_model(
        folder, ModelOptions(device="cpu", dtype="fp32", slots=8, context=None, features=layers)
    )
    places, nothing = range(4), np.zeros(0, np.int32)
    result = ours.forward(build_batch([RequestRows(tokens, places, places, nothing, wanted=[3])]))
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for layer, index in zip(layers, TARGET_LAYERS, strict=True):
        torch.testing.assert_close(
            result.features[feature_name(layer)], states[index][0], atol=1e-4, rtol=1e-4
        )
    published = parse_pard(
        {**raw, "pard2_target_dim": 16384, "pard2_target_layers": [-1, -8, -16, -24]}, 16, 36, 4096
    )
    assert published == PardConfig(1, 12, (FINAL, 28, 20, 12), 16384, 0.02, False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pard_token": 9}, r"pard_token 9 is none of the draft's 9 tokens \(0 to 8\)"),
        ({"pard_token": "x"}, "pard_token 'x' is none of"),
        ({"pard2_target_layers": None}, "must name outputs of layers"),
        ({"pard2_target_layers": [0, 1, 2]}, "0, the embedding, is not"),
        ({"pard2_target_layers": [-1, 9, 2]}, "the draft reads outputs of layers .8, 1., the target has 3"),
        ({"pard2_target_dim": 128}, "it belongs to another target"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    raw = {"vocab_size": 9, "pard_token": 1, "pard2": True, "pard2_target_layers": TARGET_LAYERS}
    with pytest.raises(CheckpointError, match=message):
        parse_pard({**raw, "pard2_target_dim": 96, **keys}, 8, 3, 32)


def test_the_projection_is_read_from_each_published_place(tmp_path: Path) -> None:
    drafted = Drafted(FAMILIES[1], tmp_path, pard2=True)
    pickled = drafted.folder / "warp_model.bin"
    with pytest.raises(CheckpointError, match=r"warp_model\.bin is not safetensors; such files are pickles"):
        drafted.load(allow_pickle=False)
    pickled.unlink()
    with pytest.raises(CheckpointError, match=r"lacks target_proj\.weight"):
        drafted.load()
    whole = drafted.folder / "model.safetensors"
    plain, more = load_file(whole), {"target_proj.weight": drafted.weight}
    for file, tensors in ((whole, plain | more), (drafted.folder / "warp_model.safetensors", more)):
        save_file(tensors, file)
        drafted.source = drafted.load(allow_pickle=False)
        drafted.open(1, [5, 9])
        drafted.read(1, 0, 1)
        drafted.check_all((1, drafted.trees[1].root))
        save_file(plain, whole)
    save_file(
        {"target_proj.weight": drafted.weight.T.contiguous()}, drafted.folder / "warp_model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"has shape \(96, 64\), config.json says \(64, 96\)"):
        drafted.load()


@pytest.mark.parametrize(("mode", "block"), [("sd", POSITIONS), ("ssd", None)])
def test_only_roots_are_anchors_in_mode_sync(mode: str, block: int | None, tmp_path: Path) -> None:
    drafted = Drafted(FAMILIES[0], tmp_path)
    drafted.load(mode=mode)
    assert drafted.loaded.description.block == block
