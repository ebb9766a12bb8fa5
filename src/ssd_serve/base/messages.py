"""Messages between server and verifier, and the parameters of a request.

Submit, SubmitChoices, Abort, Finish -> ; <- Ready, Progress, Committed, Finished, Refused, Status.

All are msgspec structs, encoded as tagged msgpack.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import accumulate, zip_longest

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Maximum reasoning tokens, without the end mark.

    `begin` and `end` are the marks' tokens. With an empty `begin` the output starts inside the reasoning;
    otherwise it has reasoning if it starts with `begin`.
    """

    tokens: int
    begin: tuple[int, ...]
    end: tuple[int, ...]


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that decide a request's tokens, apart from weights, prompt and seed.

    `top_k` 0 and `top_p` 1.0 mean off; penalties follow the OpenAI and vLLM definitions. Stop strings are
    handled by the server only.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens allowed; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not contain: the last token is masked after the others."""
    grammar: str = ""
    """The grammar of the output in llguidance's format; empty: none."""
    thinking_budget: ThinkingBudget | None = None
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities; k: those of the chosen token and of the k most probable tokens."""
    prompt_logprobs: int | None = None
    """`logprobs` for the prompt's tokens from the second on, under the model's own distribution."""


class FixedShape(msgspec.Struct, frozen=True):
    """A shape that a user forces, regardless of cost: a chain or a tree of `nodes` draft tokens a round."""

    nodes: int
    chain: bool = True


class RequestOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options of a request that do not change its tokens.

    A field of `GenerationRequest` with the same name sets the option.
    """

    salt: bytes = b""
    """Requests share the prefix cache only with requests of the same salt."""
    priority: int = 0
    """Lower values are scheduled first and preempted last."""
    max_nodes: int | None = None
    """Most draft tokens that a round verifies for the request; None: no limit but cost."""
    shape: FixedShape | None = None
    """Fixed shape of the draft tokens; None: the server's choice."""
    trace: bool = False
    """Reports have a `RoundTrace` for each round."""
    return_progress: bool = False
    """Chunks of the prompt are reported, all but the last."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request, new or gone on with. `request` is unique for the life of the verifier; seeds are 64-bit."""

    request: int
    prompt: tuple[int, ...]
    parameters: SamplingParameters
    seed: int
    output: tuple[int, ...] = ()
    """Output of an earlier verifier, which is continued as that verifier would have."""
    scored: int = 0
    """Number of prompt tokens, from the second on, with log-probabilities that were sent before."""
    options: RequestOptions = RequestOptions()


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """The fields that differ between choices of one prompt; see `Submit`."""

    request: int
    seed: int
    output: tuple[int, ...] = ()
    scored: int = 0


class SubmitChoices(msgspec.Struct, frozen=True, tag=True):
    """Several requests of one prompt, which is sent, checked and stored once."""

    prompt: tuple[int, ...]
    parameters: SamplingParameters
    choices: tuple[Choice, ...]
    options: RequestOptions = RequestOptions()

    def each(self) -> list[Submit]:
        """Return one `Submit` for each choice; they share the prompt object."""
        prompt, parameters, options = self.prompt, self.parameters, self.options
        return [
            Submit(each.request, prompt, parameters, each.seed, each.output, each.scored, options)
            for each in self.choices
        ]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client went away: free everything of this request now. Answered by nothing."""

    request: int


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The server found a stop string: end the request. Answered by `Finished`, unless it came first."""

    request: int


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position under the processed distribution, before noise.

    Not tracked by the garbage collector: there may be hundreds of thousands of them.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


class SourceFigures(msgspec.Struct, frozen=True, array_like=True):
    """Verified and accepted nodes of one draft source."""

    verified: int
    accepted: int


class Figures(msgspec.Struct, kw_only=True):
    """Speculation counters of one request since its start, or of all requests; rounds exclude prefill chunks.

    The verifier updates them in place; a message gets a copy.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    """Nodes verified."""
    accepted: int = 0
    verified_depths: list[int] = []
    """Rounds by the depth of the deepest verified node; 0: none. A node is verified with all its
    ancestors."""
    accepted_depths: list[int] = []
    """Rounds by their number of accepted nodes."""
    sources: dict[str, SourceFigures] = {}
    """Counters by draft source, filled in messages only; a node of several sources counts for each."""
    hits: int = 0
    """Rounds after which the new root was in the replica."""
    misses: int = 0
    ready_depth: int = 0
    """Sum over rounds of the depth of the tree when the round was planned."""
    ready_nodes: int = 0
    cached_prompt_tokens: int = 0
    prompt_s: float = 0.0
    """Seconds from the queue to the first token."""
    preemptions: int = 0


class TraceNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A verified node. `parent` is the index of a node, -1: the root; `rank` counts from 0 among its siblings.

    `logprob` is the draft's estimate that the target chooses the token; None: the replica has dropped it.
    """

    token: int
    parent: int
    depth: int
    sources: tuple[str, ...]
    logprob: float | None
    rank: int | None


class TraceGrowth(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Expansions of a draft source that arrived `at_s` seconds after the request."""

    at_s: float
    source: str
    expansions: int


class RoundTrace(msgspec.Struct, frozen=True, array_like=True):
    """A round of a traced request. Times are seconds since the verifier received the request."""

    start_s: float
    end_s: float
    forward_at_s: float
    forward_s: float
    waited_s: float
    context: int
    """Tokens before those of the round."""
    nodes: tuple[TraceNode, ...] = ()
    left_out: int = 0
    """Verified nodes that are not in `nodes`."""
    accepted: tuple[int, ...] = ()
    """Indices of the accepted nodes, in order."""
    bonus: int = -1
    """The token of the target after the accepted nodes."""
    growth: tuple[TraceGrowth, ...] = ()
    """Growth since the round before."""
    first: bool = False
    """True for the round that ended the prompt."""
    cut: bool = False
    """True for the round after the last one with details: later rounds have no trace."""


class PromptProgress(msgspec.Struct, frozen=True):
    """Prompt tokens in the KV cache, `cache` of which were found there, `time_ms` after the request left the queue:
    llama.cpp's object."""

    processed: int
    total: int
    cache: int
    time_ms: int


class Committed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Tokens that one round committed for a request, in order; `logprobs` is empty or has one for each."""

    request: int
    tokens: tuple[int, ...]
    """Empty for a prefill chunk with requested log-probabilities or progress."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's next tokens, from its second token on."""
    trace: RoundTrace | None = None
    """Details of the round, where traced."""
    progress: PromptProgress | None = None
    """Progress of the prompt, where requested."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The request ended; `reason` is 'stop' (EOS, stop id or `Finish`), 'length' or 'error'."""

    request: int
    reason: str
    figures: Figures
    stop_token: int | None = None
    message: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request never started; `field` is the invalid field. `retry_after_s` > 0: the queue is full."""

    request: int
    message: str
    field: str = ""
    retry_after_s: float = 0.0


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The verifier can generate tokens."""

    target: str
    draft: str
    mode: str
    target_device: str
    draft_device: str
    context: int
    """Maximum prompt and output in tokens."""
    vocabulary: int
    slots: int
    weight_bytes: int = 0
    kv_bytes: int = 0
    """Most bytes of the target's KV cache."""
    target_step_ms: float
    draft_step_ms: float
    guessed: bool = False
    """True if `target_step_ms` follows from figures of the processor alone: no round has been timed."""
    protocol: int = 0
    """The verifier's `PROTOCOL_VERSION`; 0: a version without this field."""
    sampling: dict[str, int | float] = {}
    """Default sampling parameters of the model."""


class AcceptanceHealth(Enum):
    """The health of speculation; `verifier/acceptance.py` judges it."""

    GOOD = "good"
    COLLAPSED = "acceptance collapsed"
    NEVER_HITS = "never hits"


class DecisionReason(Enum):
    """Why a round speculated or not: set by `verifier/control/planner.py` and by the engine. Only
    the first three may have nodes."""

    PAYS = "speculation pays"
    TRYING = "another layout is tried, to see what it gives"
    FIXED = "a fixed number of draft tokens is set"
    OFF = "the settings allow no drafts"
    NO_DRAFTER = "no drafter answers"
    SLOWER = "drafting gives less than plain decoding at this load"
    PROMPTS = "prompts are read"
    ENDING = "no request has a token to come after the next one"
    NOTHING_DRAFTED = "nothing is drafted yet below the last token"
    FULL = "prompts fill the round"
    LATE = "a token would take longer than SSD_TPOT_TARGET_MS"
    NOT_WORTH = "what is drafted is worth less than the time to verify it"
    MEMORY = "the device's memory is short"
    SLOTS = "the KV cache has no free slots for drafts"


class CostEstimate(msgspec.Struct, frozen=True, array_like=True):
    """The estimate of a round: `tokens` in `seconds` with `nodes` (None: unknown draft tokens)."""

    nodes: int | None
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)


class DecisionMessage(msgspec.Struct, frozen=True, array_like=True):
    """The decision of a round about draft tokens.

    `layout`: the mode's name. `nodes`: verified nodes; fewer than `chosen` has if memory is short. `chosen` is
    the estimate at the time of the choice. `other` is that of the alternative: no nodes for a round with nodes,
    one node for a round in which none paid, and drafting for plain decoding. None: unknown.
    """

    layout: str
    why: DecisionReason
    nodes: int
    waited_s: float
    chosen: CostEstimate | None = None
    other: CostEstimate | None = None


class Status(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sent about once a second and on change: gauges and counters since start."""

    running: int
    waiting: int
    slots_used: int
    slots: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    drafters_alive: int
    """Connected drafter processes."""
    drafter_restarts: int
    drafter_requests: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Requests by drafter name."""
    drafter_moves: int = 0
    """Requests moved from one drafter to another."""
    expansions: int = 0
    """Nodes expanded by drafters."""
    awaited_expansions: int = 0
    """Expansions that a round waited for; the others arrived during a forward."""
    late_expansions: int = 0
    """Expansions dropped because the root had moved past their node."""
    expected_tokens: float = 0.0
    """Tokens that rounds with draft tokens should have committed by the reach of their nodes."""
    given_tokens: int = 0
    """Tokens that those rounds committed."""
    totals: Figures
    forward_s: float
    wait_s: float
    host_s: float
    layout: str = ""
    """The current speculation mode: `async`, `sync` or `off`; empty if it cannot change."""
    layout_gains: dict[int, dict[str, float]] = msgspec.field(default_factory=dict[int, dict[str, float]])
    """Speed of each speculation mode relative to plain decoding, by power of two of running requests."""
    decision: DecisionMessage | None = None
    """The last round's decision; None before the first round."""
    attention: str = ""
    """The target's tree attention backend."""
    attention_differences: int = 0
    """Checked outputs that differed from the second backend's."""
    health: AcceptanceHealth = AcceptanceHealth.GOOD
    memory_shortages: int = 0
    """Rounds in which a device was out of memory."""
    machine_busy: bool = False
    """True if other programs take cores that the verifier needs."""
    other_cores: float = 0.0
    """Cores that they use on average, of those that the verifier may use; 0 if the machine is not busy."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A line about the progress of the verifier's start, for people."""

    text: str


ServerMessage = Submit | SubmitChoices | Abort | Finish
VerifierReport = Ready | Committed | Finished | Refused | Status | Progress


# Counts by depth, from histograms of depths. A round that reached a depth reached every depth above it.
# Position 0 is depth 1, as in vLLM's metrics.

POSITIONS = 16
"""Positions that are reported one by one; all deeper ones are reported as a sum."""


def sum_histograms(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Sum histograms, depth by depth."""
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def by_position(histogram: Sequence[int]) -> list[int]:
    """Cumulative counts by position, the deepest last: rounds that reached at least that position.
    `histogram[n]` rounds ended at depth n."""
    return list(accumulate(reversed(histogram[1:])))[::-1]


def bounded_positions(counts: Sequence[int]) -> list[int]:
    """The first `POSITIONS` of some counts by position, and the sum of all others."""
    first = [*counts[:POSITIONS], *[0] * (POSITIONS - len(counts))]
    return [*first, sum(counts[POSITIONS:])]


def acceptance_rates(verified: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """Acceptance rate by position, for at most `POSITIONS`: of the rounds that verified a node there, the
    share that accepted one. Arguments are histograms of depths."""
    pairs = zip_longest(by_position(verified), by_position(accepted), fillvalue=0)
    return [found / tried for tried, found in pairs if tried][:POSITIONS]
