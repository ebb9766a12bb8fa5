"""Loads EAGLE heads: names of their weights in each layout, and weights that a head shares with its target.

Knows names and shapes; not how matrices are stored or multiplied. Missing, misshapen and unexpected tensors
are a `CheckpointError` that lists them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import CheckpointError
from ssd_serve.base.logs import Logger
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.packed import NativePackedLinear
from ssd_serve.kernels.rows import RmsNorm
from ssd_serve.models.architectures.contract import Architecture, Description, Matrices, Sizes
from ssd_serve.models.architectures.dense.config import dense_sizes
from ssd_serve.models.architectures.dense.weights import DecoderLayer, read_blocks
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.heads.config import PARSERS, EagleConfig, check_features, usual_features
from ssd_serve.models.heads.eagle import EagleHead, EagleWeights
from ssd_serve.models.heads.gumiho import GumihoHead
from ssd_serve.models.heads.kinds import HeadKind, head_kind, tensor_names
from ssd_serve.models.load import ModelOptions, load_sized
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.sizes import PACKED, ModelSizes, model_dtype, sizes_of
from ssd_serve.models.weights.checkpoint import Checkpoint, shorten
from ssd_serve.models.weights.formats import read_config
from ssd_serve.models.weights.linear import DenseLinear, Linear, Linears, MatrixShare, Table
from ssd_serve.models.weights.matrices import ScaledMatrix

W = TypeVar("W")
_LAYERS = ("midlayer", "layers.0", "transformer", "model.midlayer", "model.layers.0")
"""Names of the layer."""
_BLOCKS = 6
"""Matrices of each of Gumiho's heads."""


def head_config(folder: Path, target: Path, features: Sequence[int] | None = None) -> EagleConfig:
    """A head for a target; an EAGLE-3 or P-EAGLE head reads the layers among `features`, if there are any, instead of
    those that it names. Raises `CheckpointError` where the two do not fit each other."""
    if (kind := head_kind(folder)) is None:
        raise CheckpointError(f"{folder} is no head")
    theirs = load_description(target)
    layers = len(theirs.sizes(Parallel()).kv)
    config = PARSERS[kind](read_config(folder), {})
    if kind is HeadKind.GUMIHO:
        config = replace(config, guesses=count_guesses(folder))
    if not config.joins:
        named = tuple(each for each in features or () if each != FINAL)
        wanted = named or config.features or usual_features(layers)
        config = replace(config, features=check_features(wanted, layers))
    if (config.target_hidden, config.vocabulary) != (theirs.config.hidden, theirs.config.vocabulary):
        raise CheckpointError(
            f"{folder} is a head for targets of width {config.target_hidden} with {config.vocabulary} "
            f"tokens; {target} has width {theirs.config.hidden} and {theirs.config.vocabulary} tokens"
        )
    return replace(config, layer=replace(config.layer, eos_token_ids=theirs.config.eos_token_ids))


def count_guesses(folder: Path) -> int:
    """The heads of a Gumiho head."""
    names = {name.removeprefix("model.").removeprefix("mlp.") for name in tensor_names(folder)}
    return len({name for name in names if re.fullmatch(r"(mlp\.)?\d+\.0\.linear\.weight", name)})


def head_sizes(
    folder: Path,
    target: Path,
    *,
    device: str,
    dtype: str,
    features: Sequence[int] | None = None,
    allow_pickle: bool = False,
    native: NativeLibrary | None = None,
) -> ModelSizes:
    """Sizes of such a head."""
    config = head_config(folder, target, features)
    keeps = native if model_dtype(target, dtype, device, native) == PACKED else None
    description = Description(_architecture(config, target, allow_pickle, keeps), config)
    return sizes_of(description, folder, device=device, dtype=dtype, allow_pickle=allow_pickle, native=native)


def load_head(folder: Path, options: ModelOptions, sizes: ModelSizes, log: Logger | None = None) -> EagleHead:
    """Load it with its KV cache. Raises `CheckpointError` and `MemoryShortError`."""
    head = load_sized(folder, options, sizes, log=log)
    if not isinstance(head, EagleHead):
        raise CheckpointError(f"{folder} is no head")
    return head


def _architecture(
    config: EagleConfig, target: Path, allow_pickle: bool, native: NativeLibrary | None
) -> Architecture[EagleConfig, EagleWeights]:
    def read(config: EagleConfig, checkpoint: Checkpoint, make: Linears) -> EagleWeights:
        weights = read_head(config, checkpoint, make)
        sizes = config.vocabulary, config.hidden
        if weights.embedding is None:
            if config.hidden != config.target_hidden:
                raise CheckpointError(
                    f"the head has no embedding, and is {config.hidden} wide, its target's "
                    f"{config.target_hidden}"
                )
            embedding = target_table(target, *sizes, allow_pickle, native)
            weights = replace(weights, embedding=embedding)
        if weights.head is None:
            head = target_head(target, *sizes, allow_pickle=allow_pickle)
            head = head if weights.proposed is None else head[weights.proposed]
            weights = replace(weights, head=make.wrap(head))
        return weights

    build = GumihoHead if config.kind is HeadKind.GUMIHO else EagleHead
    return Architecture(
        models=config.kind, parse=PARSERS[config.kind], sizes=_sizes, read_weights=read, build=build
    )


def target_embedding(
    target: Path, vocabulary: int, hidden: int, *, allow_pickle: bool = False
) -> torch.Tensor:
    """The embedding [vocabulary, hidden] of a whole model, as it lies in its folder."""
    with Checkpoint(target, partly=True, allow_pickle=allow_pickle) as checkpoint:
        return checkpoint.read("model.embed_tokens.weight", (vocabulary, hidden))


def target_table(
    target: Path, vocabulary: int, hidden: int, allow_pickle: bool, native: NativeLibrary | None
) -> Table:
    """Return the embedding of a whole model; with `native` in the blocks of its file, if it has some."""
    with Checkpoint(target, partly=True, allow_pickle=allow_pickle) as checkpoint:
        if native is not None:
            matrices = checkpoint.format.matrices(checkpoint, None, native)
            stored = matrices.read("model.embed_tokens", (vocabulary, hidden))
            kept = matrices.product([stored], None, "cpu")
            if isinstance(kept, NativePackedLinear):
                return kept
    return target_embedding(target, vocabulary, hidden, allow_pickle=allow_pickle)


def target_head(target: Path, vocabulary: int, hidden: int, *, allow_pickle: bool = False) -> torch.Tensor:
    """The head [vocabulary, hidden] of a whole model, the embedding where that is both."""
    theirs, embedding = load_description(target), "model.embed_tokens.weight"
    with Checkpoint(target, partly=True, allow_pickle=allow_pickle) as checkpoint:
        if theirs.sizes(Parallel()).tied and not checkpoint.differs("lm_head.weight", embedding):
            return checkpoint.read(embedding, (vocabulary, hidden))
        stored = checkpoint.format.matrices(checkpoint, theirs.config.fp8).read(
            "lm_head", (vocabulary, hidden)
        )
        if isinstance(stored, ScaledMatrix) and stored.scales is None:
            return stored.numbers
        weight = torch.empty((vocabulary, hidden))
        stored.write(weight)
        return weight


def target_norm(target: Path, hidden: int) -> torch.Tensor:
    """The norm before the head of a whole model, [hidden]."""
    with Checkpoint(target, partly=True) as checkpoint:
        return checkpoint.read("model.norm.weight", (hidden,))


def _sizes(config: EagleConfig, parallel: Parallel) -> Sizes:
    usual = dense_sizes(config.layer, parallel)
    qkv, *rest = usual.matrices
    wide = [] if config.joins else [replace(qkv, inputs=2 * config.hidden, count=1)]
    return replace(
        usual,
        matrices=(
            *wide,
            replace(qkv, count=qkv.count - len(wide)),
            *rest,
            Matrices((config.hidden,), config.fuse_inputs),
            *[Matrices((config.hidden,), (_BLOCKS + 1) * config.hidden) for _ in range(config.guesses)],
        ),
        head=Matrices((config.draft_vocabulary,), config.hidden),
        ranks=(1,),
    )


def read_head(config: EagleConfig, checkpoint: Checkpoint, make: Linears) -> EagleWeights:
    """Read all weights; a head is never shared by ranks."""
    return read_checked(checkpoint, make, lambda make: _HeadReader(config, checkpoint, make).read())


def read_checked(checkpoint: Checkpoint, make: Linears, read: Callable[[Linears], W]) -> W:
    """Return what `read` reads of a file. Before it, `read` runs without numbers, to compare names and shapes.

    Raises `CheckpointError` where the file's tensors are not those that are read.
    """
    survey = TensorCheck(checkpoint, make.parallel)
    read(survey)
    survey.finish()
    weights = read(make)
    checkpoint.finish()
    return weights


class _HeadReader:
    """Knows the names of one head's tensors."""

    def __init__(self, config: EagleConfig, checkpoint: Checkpoint, make: Linears) -> None:
        self._config, self._checkpoint, self._make = config, checkpoint, make
        found = (each for each in _LAYERS if f"{each}.self_attn.q_proj.weight" in checkpoint)
        self._layer = next(found, "layers.0" if config.joins else _LAYERS[0])
        self._outside = "model." if self._layer.startswith("model.") else ""

    def read(self) -> EagleWeights:
        c = self._config
        token_norm, hidden_norm, norm = (None if name is None else self._norm(name) for name in self._norms())
        return EagleWeights(
            embedding=self._embedding(),
            token_norm=token_norm,
            feature_norms=self._feature_norms(),
            fuse=self._fuse(),
            hidden_norm=hidden_norm,
            blocks=read_blocks(c.layer, self._make, self._layer, c.hidden if c.joins else 2 * c.hidden),
            norm=norm,
            head=self._head(),
            proposed=read_proposed(c.vocabulary, c.draft_vocabulary, self._checkpoint),
            more_layers=tuple(self._decoder_layer(index) for index in range(1, c.layer.layers)),
            guesses=tuple(self._guess(index) for index in range(c.guesses)),
            mask=None if c.mask is None else self._mask(),
        )

    def _mask(self) -> torch.Tensor:
        """The features of a mask; published with no, one or two dimensions before them."""
        name, width = f"{self._outside}mask_hidden", self._config.fused * self._config.target_hidden
        dimensions = len(self._checkpoint.shape(name)) if name in self._checkpoint else 3
        return self._make.tensor(name, (1,) * (dimensions - 1) + (width,)).reshape(-1)

    def _decoder_layer(self, index: int) -> DecoderLayer:
        name, c = f"{self._outside}layers.{index}", self._config
        blocks = read_blocks(c.layer, self._make, name, c.hidden)
        return DecoderLayer(input_norm=self._norm(f"{name}.input_layernorm"), blocks=blocks)

    def _guess(self, index: int) -> tuple[Linear, ...]:
        """One of Gumiho's heads."""
        hidden, name = self._config.hidden, f"{self._outside}mlp"
        name = (
            f"{name}.mlp.{index}"
            if f"{name}.mlp.0.0.linear.weight" in self._checkpoint
            else f"{name}.{index}"
        )
        return tuple(
            self._make.by_outputs(
                [MatrixShare(f"{name}.{block}.linear", hidden)], hidden if block else 2 * hidden, bias=True
            )
            for block in range(_BLOCKS)
        )

    def _norms(self) -> tuple[str | None, str | None, str | None]:
        if not self._config.joins:
            return f"{self._layer}.input_layernorm", f"{self._layer}.hidden_norm", f"{self._outside}norm"
        if self._config.layer_norms:
            return "embedding_layernorm", f"{self._layer}.input_layernorm", "pre_lm_head_layernorm"
        return None, None, None

    def _norm(self, name: str, width: int | None = None) -> RmsNorm:
        weight = self._make.tensor(f"{name}.weight", (width or self._config.hidden,))
        return RmsNorm(weight, self._config.layer.norm_epsilon)

    def _embedding(self) -> torch.Tensor | None:
        c, name = self._config, f"{self._outside}embed_tokens.weight"
        return self._make.tensor(name, (c.vocabulary, c.hidden)) if name in self._checkpoint else None

    def _feature_norms(self) -> tuple[RmsNorm, ...]:
        c = self._config
        if c.one_norm:
            return (self._norm(f"{self._outside}input_norm", c.fused * c.target_hidden),)
        count = c.fused if c.norm_each else 0
        return tuple(self._norm(f"{self._outside}fc_norm.{index}", c.target_hidden) for index in range(count))

    def _fuse(self) -> Linear:
        c, name = self._config, f"{self._outside}fc"
        if "fusion_fc.weight" in self._checkpoint:
            name = "fusion_fc"
        bias = c.fuse_bias or f"{name}.bias" in self._checkpoint
        return self._make.by_outputs([MatrixShare(name, c.hidden)], c.fuse_inputs, bias=bias)

    def _head(self) -> Linear | None:
        """EAGLE-1 heads seldom have one of their own."""
        c = self._config
        if c.joins and "lm_head.weight" not in self._checkpoint:
            return None
        return self._make.by_outputs([MatrixShare("lm_head", c.draft_vocabulary)], c.hidden, bias=False)


def read_proposed(
    vocabulary: int, count: int, checkpoint: Checkpoint, named: str = ""
) -> torch.Tensor | None:
    """The target's ids of the `count` tokens that a head knows: id + d2t[id], or those of the tensor `named`."""
    checkpoint.ignore("t2d")  # the inverse of d2t
    name = named if named in checkpoint else "d2t"
    if name not in checkpoint:
        if count != vocabulary:
            known = f"d2t, nor {named}" if named else "d2t"
            raise CheckpointError(
                f"{checkpoint.folder} proposes {count} of {vocabulary} tokens, and has no {known}"
            )
        return None
    ids = checkpoint.read(name, (count,)).to(torch.int64)
    ids = ids if name == named else ids + torch.arange(count)
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or len(set(ids.tolist())) < count:
        raise CheckpointError(
            f"{checkpoint.folder}: {name} names tokens that the target does not have, or one twice"
        )
    return ids


_Shape = tuple[int, ...]


class TensorCheck:
    """`Linears` that notes what is asked for and gives tensors without numbers."""

    def __init__(self, checkpoint: Checkpoint, parallel: Parallel) -> None:
        self._checkpoint = checkpoint
        self._parallel = parallel
        self._asked: dict[str, _Shape] = {}

    @property
    def parallel(self) -> Parallel:
        return self._parallel

    def tensor(self, name: str, shape: _Shape) -> torch.Tensor:
        self._asked[name] = shape
        return torch.empty(shape, device="meta")

    def embedding(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self.tensor(name, shape)

    def by_outputs(self, parts: Sequence[MatrixShare], inputs: int, *, bias: bool) -> Linear:
        for part in parts:
            self.by_inputs(part, inputs, bias=bias)
        return self.wrap(torch.empty((0, inputs), device="meta"))

    def by_inputs(self, part: MatrixShare, inputs: int, *, bias: bool) -> Linear:
        if bias:
            self.tensor(f"{part.name}.bias", (part.outputs,))
        return self.wrap(self.tensor(f"{part.name}.weight", (part.outputs, inputs)))

    def wrap(self, weight: Table, bias: torch.Tensor | None = None) -> Linear:
        return DenseLinear(weight, bias) if isinstance(weight, torch.Tensor) else weight

    def finish(self) -> None:
        """Raise `CheckpointError` where the file's tensors are not those that were asked for."""
        file, asked = self._checkpoint, self._asked
        missing = [f"{name} {list(shape)}" for name, shape in asked.items() if name not in file]
        misshapen = [
            f"{name} {list(found)} instead of {list(shape)}"
            for name, shape in asked.items()
            if name in file and (found := file.shape(name)) != shape
        ]
        # Tensors that belong to a requested matrix, such as its scales, are checked when the matrix is read.
        parents = {name.rpartition(".")[0] for name in asked}
        others = [
            f"{name} {list(file.shape(name))}"
            for name in file.unread()
            if name not in asked and name.rpartition(".")[0] not in parents
        ]
        problems_of = {"lacks": missing, "has misshapen": misshapen, "has unknown": others}
        if problems := [f"{what} {shorten(names)}" for what, names in problems_of.items() if names]:
            raise CheckpointError(
                f"{file.folder} does not hold what its config.json describes: it {', it '.join(problems)}"
            )
