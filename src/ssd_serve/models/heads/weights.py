"""The weights of an EAGLE head: their names in each layout, and how they are read.

Knows names and shapes; not how matrices are stored or multiplied. Missing, misshapen and unexpected tensors
are a `CheckpointError` that lists them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ssd_serve.base.errors import CheckpointError
from ssd_serve.kernels.rows import RmsNorm
from ssd_serve.models.architectures.dense.weights import LayerBlocks, read_blocks
from ssd_serve.models.heads.config import EagleConfig
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.weights.checkpoint import Checkpoint, shorten
from ssd_serve.models.weights.linear import DenseLinear, Linear, Linears, MatrixShare

_LAYERS = ("midlayer", "layers.0", "transformer", "model.midlayer", "model.layers.0")
"""Names of the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleWeights:
    """Weights of a whole head. `embedding` or `head` None: the target's is used."""

    embedding: torch.Tensor | None  # [target's vocabulary, hidden]
    token_norm: RmsNorm | None  # [hidden], of embeddings
    feature_norms: tuple[RmsNorm, ...]  # [fused * target_hidden], or [target_hidden] each, or none
    fuse: Linear  # fused * target_hidden -> hidden; EAGLE-1: a token and a vector, 2 * hidden -> hidden
    hidden_norm: RmsNorm | None  # [hidden], of what the layer adds to, for its attention
    blocks: LayerBlocks  # qkv reads 2 * hidden; EAGLE-1: hidden
    norm: RmsNorm | None  # [hidden]
    head: Linear | None  # hidden -> draft vocabulary
    proposed: torch.Tensor | None  # int64 [draft vocabulary], ids of the target; None: all


def read_head(config: EagleConfig, checkpoint: Checkpoint, make: Linears) -> EagleWeights:
    """Read all weights; a head is never shared by ranks."""
    survey = TensorCheck(checkpoint, make.parallel)
    _HeadReader(config, checkpoint, survey).read()
    survey.finish()
    weights = _HeadReader(config, checkpoint, make).read()
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
            proposed=_read_proposed(c, self._checkpoint),
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
        return self._make.embedding(name, (c.vocabulary, c.hidden)) if name in self._checkpoint else None

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


def _read_proposed(config: EagleConfig, checkpoint: Checkpoint) -> torch.Tensor | None:
    """The target's ids of the tokens that the head knows: id + d2t[id]."""
    count = config.draft_vocabulary
    checkpoint.ignore("t2d")  # the inverse of d2t
    if "d2t" not in checkpoint:
        if count != config.vocabulary:
            raise CheckpointError(
                f"{checkpoint.folder} proposes {count} of {config.vocabulary} tokens, and has no d2t"
            )
        return None
    ids = checkpoint.read("d2t", (count,)).to(torch.int64) + torch.arange(count)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocabulary or len(set(ids.tolist())) < count:
        raise CheckpointError(
            f"{checkpoint.folder}: d2t names tokens that the target does not have, or one twice"
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

    def wrap(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return DenseLinear(weight, bias)

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
