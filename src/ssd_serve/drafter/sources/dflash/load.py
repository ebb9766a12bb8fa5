"""Loads DFlash heads: names of their weights in each layout, and weights that they share with their target."""

from dataclasses import replace
from pathlib import Path

import torch

from ssd_serve.base.errors import CheckpointError
from ssd_serve.drafter.sources.dflash.config import DFlashConfig, PairConfig, parse_dflash
from ssd_serve.drafter.sources.dflash.model import (
    BlockLayer,
    Convolution,
    DFlashHead,
    DFlashWeights,
    PairScores,
)
from ssd_serve.drafter.sources.loading import SourceConfig
from ssd_serve.kernels.rows import RmsNorm
from ssd_serve.models.architectures.contract import Architecture, Description, Matrices, Sizes
from ssd_serve.models.architectures.dense.config import dense_sizes
from ssd_serve.models.architectures.dense.weights import read_blocks
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.heads.config import check_features
from ssd_serve.models.heads.load import read_checked, read_proposed, target_head, target_table
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.rope import interleave
from ssd_serve.models.sizes import PACKED, ModelSizes, model_dtype, sizes_of
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.formats import read_config
from ssd_serve.models.weights.linear import Linear, Linears, MatrixShare

_UNUSED = ("confidence_head.", "rotary_emb.")
"""Prefixes of tensors that drafting does not need: trees end by probability, not by a trained confidence."""


def dflash_config(folder: Path, target: Path) -> DFlashConfig:
    """Read a head's configuration for a target. Raises `CheckpointError` where they do not fit each other."""
    raw, theirs = read_config(folder), load_description(target)
    config, layers = parse_dflash(raw, {}), len(theirs.sizes(Parallel()).kv)
    if raw.get("num_target_layers") not in (None, layers):
        raise CheckpointError(
            f"{folder} is a head for targets of {raw['num_target_layers']} layers; {target} has {layers}"
        )
    own, wanted = (config.hidden, config.vocabulary), (theirs.config.hidden, theirs.config.vocabulary)
    if own != wanted:
        raise CheckpointError(
            f"{folder} is a head for targets of width {own[0]} with {own[1]} tokens; {target} has width {wanted[0]} "
            f"and {wanted[1]} tokens"
        )
    layer = replace(config.layer, eos_token_ids=theirs.config.eos_token_ids)
    return replace(config, layer=layer, features=check_features(config.features, layers))


def dflash_sizes(source: SourceConfig, folder: Path, target: Path) -> ModelSizes:
    """Return the sizes of a head, which `load_sized` loads."""
    config, own, native = source.config, dflash_config(folder, target), source.native
    pickle, dtype, device = config.allow_pickle, config.dtype, source.device
    packed = model_dtype(target, dtype, device, native) == PACKED

    def read(config: DFlashConfig, checkpoint: Checkpoint, make: Linears) -> DFlashWeights:
        weights = read_checked(checkpoint, make, lambda make: _Reader(config, checkpoint, make).read())
        sizes, table = (config.vocabulary, config.hidden), weights.embedding
        if table is None:
            table = target_table(target, *sizes, pickle, native if packed else None)
        if weights.head is not None:
            return replace(weights, embedding=table)
        both = not isinstance(table, torch.Tensor) and load_description(target).sizes(Parallel()).tied
        head = table if both else target_head(target, *sizes, allow_pickle=pickle)
        return replace(weights, embedding=table, head=make.wrap(head))

    described = Architecture(
        models="DFlash", parse=parse_dflash, sizes=_sizes, read_weights=read, build=DFlashHead
    )
    return sizes_of(
        Description(described, own), folder, device=device, dtype=dtype, allow_pickle=pickle, native=native
    )


def _sizes(config: DFlashConfig, parallel: Parallel) -> Sizes:
    c, usual = config.layer, dense_sizes(config.layer, parallel)
    keys = c.layers * c.kv_heads * c.head_dim
    more = [Matrices((c.hidden,), len(config.features) * c.hidden), Matrices((keys, keys), c.hidden)]
    if config.taps:
        outputs = 2 * config.taps * (c.hidden // config.group)
        more.append(Matrices((outputs,), c.hidden, 2 * c.layers))
    tables = 0
    if config.pairs is not None:
        tables = config.pairs.rank * (config.vocabulary + config.draft_vocabulary)
    return replace(
        usual,
        matrices=(*usual.matrices, *more),
        head=Matrices((config.draft_vocabulary,), c.hidden),
        embedding=usual.embedding + tables,
        ranks=(1,),
    )


class _Reader:
    """Knows the names of a head's tensors."""

    def __init__(self, config: DFlashConfig, checkpoint: Checkpoint, make: Linears) -> None:
        self._config, self._checkpoint, self._make = config, checkpoint, make
        self._outside = "model." if "model.fc.weight" in checkpoint else ""

    def read(self) -> DFlashWeights:
        c, make, outside = self._config, self._make, self._outside
        for name in self._checkpoint.names():
            if name.removeprefix(outside).startswith(_UNUSED):
                self._checkpoint.ignore(name)
        table, fuse = f"{outside}embed_tokens.weight", MatrixShare(f"{outside}fc", c.hidden)
        owned = table in self._checkpoint
        return DFlashWeights(
            embedding=make.tensor(table, (c.vocabulary, c.hidden)) if owned else None,
            mask=self._mask(),
            fuse=make.by_outputs([fuse], len(c.features) * c.hidden, bias=False),
            fused_norm=self._norm(f"{outside}hidden_norm"),
            context=make.by_outputs(self._context(), c.hidden, bias=c.layer.qkv_bias),
            context_norm=self._context_norm(),
            layers=tuple(self._layer(f"{outside}layers.{index}") for index in range(c.layer.layers)),
            norm=self._norm(f"{outside}norm"),
            head=self._head(),
            proposed=read_proposed(c.vocabulary, c.draft_vocabulary, self._checkpoint),
            pairs=None if c.pairs is None else self._pairs(c.pairs),
        )

    def _head(self) -> Linear | None:
        c = self._config
        if "lm_head.weight" in self._checkpoint:
            return self._make.by_outputs([MatrixShare("lm_head", c.draft_vocabulary)], c.hidden, bias=False)
        if c.draft_vocabulary != c.vocabulary:
            raise CheckpointError(
                f"{self._checkpoint.folder} proposes {c.draft_vocabulary} of {c.vocabulary} tokens, and has no lm_head"
            )
        return None

    def _norm(self, name: str) -> RmsNorm:
        weight = self._make.tensor(f"{name}.weight", (self._config.hidden,))
        return RmsNorm(weight, self._config.layer.norm_epsilon)

    def _mask(self) -> torch.Tensor | None:
        names = (f"{self._outside}mask_embedding{end}" for end in ("", ".weight"))
        name = next((each for each in names if each in self._checkpoint), None)
        if name is not None:
            return self._make.tensor(name, self._checkpoint.shape(name)).view(self._config.hidden)
        if not 0 <= self._config.mask < self._config.vocabulary:
            raise CheckpointError(
                f"config.json: mask_token_id {self._config.mask} is none of {self._config.vocabulary} tokens, and "
                "there is no mask_embedding"
            )
        return None

    def _context(self) -> list[MatrixShare]:
        c = self._config.layer
        keys, order = c.kv_heads * c.head_dim, interleave(c.head_dim, c.kv_heads)
        names = [f"{self._outside}layers.{index}.self_attn" for index in range(c.layers)]
        return [
            *(MatrixShare(f"{name}.k_proj", keys, order) for name in names),
            *(MatrixShare(f"{name}.v_proj", keys) for name in names),
        ]

    def _context_norm(self) -> RmsNorm:
        c, order = self._config.layer, interleave(self._config.layer.head_dim, 1)
        names = (f"{self._outside}layers.{index}.self_attn.k_norm.weight" for index in range(c.layers))
        norms = [self._make.tensor(name, (c.head_dim,))[order].expand(c.kv_heads, -1) for name in names]
        return RmsNorm(torch.cat(norms), c.norm_epsilon)

    def _layer(self, name: str) -> BlockLayer:
        c = self._config.layer
        return BlockLayer(
            input_norm=self._norm(f"{name}.input_layernorm"),
            blocks=read_blocks(c, self._make, name, c.hidden),
            attention_conv=self._convolution(f"{name}.attention_conv"),
            mlp_conv=self._convolution(f"{name}.mlp_conv"),
        )

    def _convolution(self, name: str) -> Convolution | None:
        c = self._config
        if not c.taps:
            return None
        groups = c.hidden // c.group
        base = self._make.tensor(f"{name}.base_kernel", (2, c.taps, c.hidden))
        share = MatrixShare(f"{name}.kernel_projection", 2 * c.taps * groups)
        projection = self._make.by_outputs([share], c.hidden, bias=False)
        return Convolution(base.view(2, c.taps, groups, c.group), projection)

    def _pairs(self, pairs: PairConfig) -> PairScores:
        c, make, rank, selects = self._config, self._make, pairs.rank, pairs.form == "selector"
        outside, hidden = self._outside + ("candidate_selector" if selects else "markov_head"), None
        names = ("predecessor_codebook", "successor_codebook") if selects else ("markov_w1", "markov_w2")
        found = [
            name if (name := f"{outside}.{each}") in self._checkpoint else f"{name}.weight" for each in names
        ]
        if pairs.form != "markov":
            share = MatrixShare(f"{outside}.{'hidden_projection' if selects else 'gate_proj'}", rank)
            hidden = make.by_outputs([share], c.hidden + (0 if selects else rank), bias=not selects)
        before = make.tensor(found[0], (c.vocabulary, rank))
        return PairScores(
            before, make.tensor(found[1], (c.draft_vocabulary, rank)), hidden, whole=not selects
        )
