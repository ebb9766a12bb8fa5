"""Settings of models, devices and speculation. Other settings are in `settings.py`."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from ssd_serve.base.attention_backends import AUTO, described
from ssd_serve.base.engine_config import EMBEDDED, LOOKUPS, NGRAM, NO_DRAFT, EngineConfig, Mode
from ssd_serve.base.setting_values import Drafts, DType, Layers, TreeAttention


class EngineSettings(BaseSettings):
    """Settings of models, devices and speculation."""

    target: str = Field(
        default=EngineConfig.target,
        description="target model: a folder, a GGUF file, a hub id (also owner/name@revision, owner/name:Q4_K_M), "
        "a short name such as 'smollm2', or 'embedded'",
    )
    draft: Drafts | None = Field(
        default=None,
        description="drafts: a folder, a GGUF file, a hub id or 'embedded' for a model, 'embedded-head' for the "
        "EAGLE-3 head of the embedded target, 'self:N' for the target's first N layers, "
        "'ngram' for lookup in a request's own text, 'suffix' for lookup in other requests "
        "too, or 'none'; several with commas between draft in parallel; empty: the embedded "
        "model for the embedded target, else ngram",
    )
    drafters: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="drafter processes, which share the requests, or the draft models if there are more "
        "of these; empty: one for each draft model; 0: none here, drafters join at "
        "SSD_DRAFTER_ADDRESS",
    )
    mode: Mode = Field(
        default=EngineConfig.mode,
        description="ar (plain), sd (draft inline), ssd (draft on its own device) or auto",
    )
    target_device: str | None = Field(
        default=None,
        description="device of the target: cpu, cpu:0, cpu:0-1, cuda:0, for 4 ranks cuda:0-3; "
        "empty: chosen by the mode",
    )
    target_device_alone: str | None = Field(
        default=EngineConfig.target_device_alone,
        description="device of the target while no drafter works; mode auto chooses all cores",
    )
    tensor_parallel: int = Field(
        default=EngineConfig.tensor_parallel,
        ge=1,
        le=8,
        description="ranks that share the target: as many processes, each on a GPU or on a part of the cores",
    )
    draft_device: str | None = Field(
        default=EngineConfig.draft_device,
        description="device of the drafter, or those of several: cuda:4-7, cpu:2-5; "
        "empty: chosen by the mode",
    )
    drafter_address: str | None = Field(
        default=EngineConfig.drafter_address,
        description="address at which drafters of other machines join, e.g. tcp://127.0.0.1:4711 (`ssd "
        "draft --connect`); empty: none",
    )
    allow_cpu: bool = Field(
        default=False, description="compute on cores of a machine with a GPU that torch cannot use"
    )
    dtype: DType = Field(
        default=EngineConfig.dtype,
        description="weights and activations; auto: GGUF on CPUs as in the file, else bf16 where the device "
        "computes it fast, else fp32; int8: weights of 8 bits, activations in bf16, on CPUs",
    )
    tree_decode_backend: TreeAttention = Field(
        default=EngineConfig.tree_decode_backend,
        description=f"tree attention: {described()} or {AUTO}, the fastest that works",
    )
    tree_decode_check: Literal["", "sdpa"] = Field(
        default=EngineConfig.tree_decode_check,
        description="compute the attention of one batch in 64 with this backend too, and log differences; "
        "empty: no check",
    )
    batch_invariant: bool = Field(
        default=EngineConfig.batch_invariant,
        description="compute every row of the target alike whatever the batch contains, so that bf16 and "
        "fp16 texts are the same in every mode too; costs speed",
    )
    generation_config: Literal["auto", "none"] = Field(
        default=EngineConfig.generation_config,
        description="defaults of sampling parameters: auto: those of the target's generation_config.json or GGUF file; "
        "none: those of the API",
    )
    context: int | None = Field(
        default=EngineConfig.context,
        ge=16,
        description="longest prompt + output in tokens; empty: the model's",
    )
    kv_memory_mb: int | None = Field(
        default=EngineConfig.kv_memory_mb,
        ge=1,
        description="most memory for the target's KV cache in MiB; empty: of what is free a quarter, on GPUs 0.4",
    )
    draft_kv_memory_mb: int | None = Field(
        default=EngineConfig.draft_kv_memory_mb,
        ge=1,
        description="memory for a drafter's KV cache in MiB; empty: 256, or a tenth of a GPU of its own",
    )
    max_running: int = Field(
        default=EngineConfig.max_running,
        ge=1,
        le=1024,
        description="most requests that decode at the same time",
    )
    max_waiting: int = Field(
        default=EngineConfig.max_waiting,
        ge=0,
        description="most requests that wait; further ones are answered 429",
    )
    prefill_chunk: int = Field(
        default=EngineConfig.prefill_chunk,
        ge=16,
        description="most prompt tokens of one round, over all requests",
    )
    budget: int | None = Field(
        default=EngineConfig.budget,
        ge=0,
        le=1024,
        description="most nodes verified in a round, over all requests; empty: the cost model decides",
    )
    num_speculative_tokens: int | None = Field(
        default=EngineConfig.num_speculative_tokens,
        ge=1,
        le=1024,
        description="draft tokens that each round verifies for each request, regardless of cost; empty: as many as "
        "pay",
    )
    speculative_shape: Literal["chain", "tree"] = Field(
        default=EngineConfig.speculative_shape,
        description="shape of these draft tokens: the most probable chain, or the most probable nodes of the tree",
    )
    tree_nodes: int = Field(
        default=EngineConfig.tree_nodes, ge=1, le=65536, description="most candidates in one request's tree"
    )
    draft_width: int = Field(
        default=EngineConfig.draft_width,
        ge=1,
        le=256,
        description="most nodes that a drafter expands in a step",
    )
    eagle_layers: Layers | None = Field(
        default=EngineConfig.eagle_layers,
        description="layers of the target whose outputs an EAGLE head reads, counted from 0, e.g. "
        "1,15,28, and final, which EAGLE-1 reads; empty: those that the head names, or that "
        "follow from the target",
    )
    features_mb: int = Field(
        default=EngineConfig.features_mb,
        ge=0,
        description="most MiB of the target's layer outputs of cached tokens that are kept for EAGLE heads",
    )
    suffix_shared: int = Field(
        default=EngineConfig.suffix_shared,
        ge=0,
        le=1 << 22,
        description="tokens of finished requests that the draft 'suffix' searches too, always within "
        "requests of the same key and salt; 0: none",
    )
    draft_grammars: bool = Field(
        default=EngineConfig.draft_grammars,
        description="draft only tokens that the grammar of a structured output allows",
    )
    draft_fan_out: int = Field(
        default=EngineConfig.draft_fan_out, ge=1, le=64, description="candidates of an expanded node"
    )
    draft_depth: int = Field(
        default=EngineConfig.draft_depth, ge=1, le=128, description="deepest node below the root"
    )
    cache_dir: Path = Field(
        default=EngineConfig.cache_dir,
        description="folder of measured step times, compiled kernels and models in packages, which later starts "
        "reuse",
    )
    models_file: Path = Field(
        default=EngineConfig.models_file,
        description="your own short names of models, in YAML: name: folder, GGUF file or hub id (docs/models.md); "
        "need not exist",
    )
    native_kernels: bool = Field(
        default=EngineConfig.native_kernels,
        description="compile kernels for this CPU once, if there is a C compiler, and use them",
    )
    graphs: bool = Field(
        default=EngineConfig.graphs,
        description="on GPUs capture forwards as CUDA or HIP graphs and replay them; with flashinfer or "
        "triton attention",
    )
    tpot_target_ms: float | None = Field(
        default=EngineConfig.tpot_target_ms,
        gt=0,
        description="most milliseconds per output token (TPOT) of a running request; empty: highest "
        "throughput",
    )
    grow_first: bool = Field(
        default=EngineConfig.grow_first, description="wait for one more draft step if that is expected to pay"
    )
    speculation_may_stop: bool = Field(
        default=EngineConfig.speculation_may_stop,
        description="stop speculating while plain decoding is measured to be faster",
    )
    prefix_cache: bool = Field(
        default=EngineConfig.prefix_cache, description="reuse the KV of prompts with a common prefix"
    )
    allow_pickle: bool = Field(
        default=EngineConfig.allow_pickle,
        description="load weights from .bin files too, which can run code of their author",
    )

    @property
    def drafts(self) -> tuple[str, ...]:
        """Draft models and lookups. By default the embedded target has its own draft, and any other target
        uses ngram, unless drafters join from other machines."""
        usual = NGRAM if self.drafters != 0 else NO_DRAFT
        named = self.draft or (EMBEDDED if self.target == EMBEDDED else usual)
        return tuple(name for each in named.split(",") if (name := each.strip()) and name != NO_DRAFT)

    @property
    def draft_models(self) -> tuple[str, ...]:
        """Drafts that have weights."""
        return tuple(name for name in self.drafts if name not in LOOKUPS)

    @property
    def lookups(self) -> tuple[str, ...]:
        """Drafts that need neither weights nor a device."""
        return tuple(name for name in self.drafts if name in LOOKUPS)

    @property
    def draft_model(self) -> str | None:
        """The first of the models."""
        return next(iter(self.draft_models), None)

    @property
    def drafter_count(self) -> int:
        """Drafter processes that are started here where a mode has any; fewer than the draft models share
        these."""
        return self.drafters if self.drafters is not None else len(self.draft_models)

    @property
    def joining_drafters(self) -> int:
        """Number of drafters that these processes are to the verifier: one for each draft model."""
        return max(self.drafter_count, len(self.draft_models)) if self.drafter_count else 0
