"""Messages between server and verifier, and the parameters of a request.

Submit, SubmitChoices, Abort, Finish -> ; <- Ready, Progress, Committed, Finished, Refused, Status.

All are msgspec structs, encoded as msgpack with a tag. They know nothing about sockets, trees or tensors.
"""

from enum import Enum

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Most tokens of thoughts, their end not counted. `begin` and `end` are the tokens of their marks. Empty,
    `begin` says that an output begins among thoughts; else there are thoughts where it begins with that."""

    tokens: int
    begin: tuple[int, ...]
    end: tuple[int, ...]


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a request's tokens besides weights, prompt and seed.

    `top_k` 0 and `top_p` 1.0 mean off; penalties follow the OpenAI and vLLM definitions. `stop` strings are
    the server's business: the verifier never reads them.
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
    """The only tokens that may be chosen; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output never holds: the last token is masked after the others."""
    grammar: str = ""
    """What the output must match, as llguidance reads it; empty: anything may come."""
    thinking_budget: ThinkingBudget | None = None
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities; k >= 0: the chosen token's and those of the k most probable tokens."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens from the second on, under the model's own distribution."""


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


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request, new or gone on with. `request` is unique for the life of the verifier; seeds are 64-bit."""

    request: int
    prompt: tuple[int, ...]
    parameters: SamplingParameters
    seed: int
    output: tuple[int, ...] = ()
    """What a verifier before this one has generated: the text goes on behind it, with the tokens that it
    would have had."""
    scored: int = 0
    """Prompt tokens, from the second on, whose log-probabilities were told before."""
    options: RequestOptions = RequestOptions()


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """What tells a choice from the others of its prompt; see `Submit`."""

    request: int
    seed: int
    output: tuple[int, ...] = ()
    scored: int = 0


class SubmitChoices(msgspec.Struct, frozen=True, tag=True):
    """Several requests that differ only in what `Choice` says: the prompt is told, checked and kept once."""

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
    """Log-probabilities at one position under the processed distribution before noise.

    There may be hundreds of thousands of them, in which Python need not look for cycles.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


class SourceFigures(msgspec.Struct, frozen=True, array_like=True):
    """Nodes that one draft source had proposed: how many were verified, and how many accepted."""

    verified: int
    accepted: int


class Figures(msgspec.Struct, kw_only=True):
    """Speculation figures of one request since it began, or of all; rounds exclude prompt chunks.

    The verifier counts in them, so they are not frozen: a message about what goes on takes a copy.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    """Nodes verified."""
    accepted: int = 0
    verified_depths: list[int] = []
    """Rounds by the depth of the deepest node that they verified; 0: there was none. A node is verified with
    everything above it, so this tells of every depth how many rounds had a node there."""
    accepted_depths: list[int] = []
    """The same of accepted nodes: rounds by how many they accepted."""
    sources: dict[str, SourceFigures] = {}
    """By draft source; a node that several had proposed counts for each. Told, not counted in."""
    hits: int = 0
    """Rounds after which the new root was in the replica."""
    misses: int = 0
    ready_depth: int = 0
    """Sum over rounds of the depth of the ready tree below the root when the round was planned."""
    ready_nodes: int = 0
    cached_prompt_tokens: int = 0
    prompt_s: float = 0.0
    """Seconds from when it was taken from the queue to its first token."""
    preemptions: int = 0


class Committed(msgspec.Struct, frozen=True, tag=True):
    """Tokens that one round committed for a request, in order. `logprobs` is empty or one for each token."""

    request: int
    tokens: tuple[int, ...]
    """Empty where a part of the prompt was read whose log-probabilities were asked for."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's next tokens; the first of them is the prompt's second token."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The request ended: `reason` is 'stop' (EOS, stop id or `Finish`), 'length', or 'error'."""

    request: int
    reason: str
    figures: Figures
    stop_token: int | None = None
    message: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request never started; `field` names the field at fault. `retry_after_s` > 0: the queue is full."""

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
    """Longest prompt + output in tokens."""
    vocabulary: int
    slots: int
    target_step_ms: float
    draft_step_ms: float
    protocol: int = 0
    """The verifier's `PROTOCOL_VERSION`; one so old that it does not say counts as 0."""
    sampling: dict[str, int | float] = {}
    """Values of sampling parameters for requests that leave them out."""


class AcceptanceHealth(Enum):
    """What speculation is worth; `verifier/acceptance.py` judges it."""

    GOOD = "good"
    COLLAPSED = "acceptance collapsed"
    NEVER_HITS = "never hits"


class DecisionReason(Enum):
    """Why a round speculated or not: set by `verifier/control/round_planner.py` and by the engine. Only
    the first two may have nodes."""

    PAYS = "speculation pays"
    TRYING = "another layout is tried, to see what it gives"
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
    """What a round should give: `tokens` in `seconds`, with `nodes` (None: nothing is drafted that could be
    counted)."""

    nodes: int | None
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second that this price stands for."""
        return self.tokens / max(self.seconds, 1e-9)


class DecisionMessage(msgspec.Struct, frozen=True, array_like=True):
    """What a round decided about drafts; see `verifier/control/decision.py`."""

    layout: str
    why: DecisionReason
    nodes: int
    waited_s: float
    chosen: CostEstimate | None
    other: CostEstimate | None


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
    """Drafters with a device of their own, as `drafter_restarts`."""
    drafter_restarts: int
    drafter_requests: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Requests that each drafter has, by its name."""
    drafter_moves: int = 0
    """Requests that went from one drafter to another."""
    expansions: int = 0
    """Nodes that drafters have expanded."""
    awaited_expansions: int = 0
    """Those of them that a round waited for; the others came while the target worked."""
    late_expansions: int = 0
    """Those that came for nodes which a text had left, and were dropped."""
    expected_tokens: float = 0.0
    """What rounds with drafts should have given by the reach of their nodes, and what they gave."""
    given_tokens: int = 0
    totals: Figures
    forward_s: float
    wait_s: float
    host_s: float
    layout: str = ""
    """How it speculates now: `async`, `sync` or `off`; empty where that cannot change."""
    layout_gains: dict[int, dict[str, float]] = msgspec.field(default_factory=dict[int, dict[str, float]])
    """By the middle number of requests of a level of load: what each layout gave, plain decoding being 1."""
    decision: DecisionMessage | None = None
    """The last round's; None before the first."""
    attention: str = ""
    """The target's tree attention backend."""
    attention_differences: int = 0
    """Checked outputs that differed from the second backend's."""
    health: AcceptanceHealth = AcceptanceHealth.GOOD
    memory_shortages: int = 0
    """Rounds for which a device had too little memory."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """What the verifier is doing while it starts (one line for people)."""

    text: str


ServerMessage = Submit | SubmitChoices | Abort | Finish
VerifierReport = Ready | Committed | Finished | Refused | Status | Progress
