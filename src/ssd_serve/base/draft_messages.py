"""Messages between verifier and drafter.

Both directions: Hello, Heartbeat, Refusal (which ends the connection), Resync. Verifier to drafter: Open,
Outcome, Features, SharedMemory, Close, Pause. Drafter to verifier: Growth, SharedMemoryRead.

All are msgspec structs, encoded as tagged msgpack; arrays are raw little-endian buffers.
"""

import msgspec

from ssd_serve.base.messages import SamplingParameters, ServerMessage, VerifierReport

PROTOCOL_VERSION = 7
NOISE_SCHEME = "philox4x32-10/exponential-race/1"
FINAL = -1
"""Stands for a layer's number: the normed output of the last layer, the input of the target's LM head."""


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message in both directions; a mismatch is answered by `Refusal`.

    Only the version is required, so that the `Hello` of every version decodes and can be refused.
    """

    protocol: int
    noise: str = ""
    tokenizer: str = ""
    """SHA-256 of the vocabulary with its ids."""
    vocabulary: int = 0
    context: int = 0
    name: str = ""
    instance: int = 0
    """A random number of the process: it distinguishes a reconnection from another drafter of the same
    name."""
    source: str = ""
    """The draft source; drafters with the same source share the requests."""
    step_ms: float = 0.0
    """The measured step time; 0: unknown."""
    prefill_ms: float = 0.0
    """Prefill time of a token; 0: unknown."""
    features: tuple[int, ...] = ()
    """Numbers of the target layers, or `FINAL`; the drafter reads their outputs."""
    depth: int = 0
    """Most tokens below a root that the drafter guesses; 0: no limit."""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The reason why the peers do not match; the connection is closed after it."""

    message: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """Start or restart drafting for a request; `root` names the last committed token."""

    request: int
    epoch: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    parameters: SamplingParameters
    seed: int
    root: int
    salt: bytes = b""
    """Sent only to drafters in the verifier's own process."""


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """The tokens that a round committed, from `position` on; `root` names the new root."""

    request: int
    epoch: int
    position: int
    tokens: tuple[int, ...]
    root: int


class Features(msgspec.Struct, frozen=True, tag=True):
    """Target outputs of committed tokens from `position` on: the layers of the drafter's `Hello`,
    concatenated.

    Rows have `width` bfloat16 numbers. Losslessness never depends on them.
    """

    request: int
    epoch: int
    position: int
    width: int
    data: bytes
    shared: tuple[int, int] | None = None
    """Offset and length in the `SharedMemory`, if the rows are not in `data`."""


class SharedMemory(msgspec.Struct, frozen=True, tag=True):
    """Verifier to a drafter on the same machine: shared memory of `size` bytes. Its descriptor comes with the
    message.

    A drafter that can map it replies with `SharedMemoryRead`.
    """

    size: int


class SharedMemoryRead(msgspec.Struct, frozen=True, tag=True):
    """Drafter to verifier: the number of spans read so far, which may be overwritten."""

    total: int


class Growth(msgspec.Struct, frozen=True, tag=True):
    """Expansions of a request's tree, as parallel buffers; `cache/expansions.py` packs and unpacks them.

    Expansion i is of the node that `steps[i]` (i32 token) leads to from the node named `parents[i]` (u64), or
    of that node itself where the step is -1 (a root). It brings `counts[i]` (u16) candidates: `tokens` (i32),
    best first, with `log_probabilities` (f32) conditional on the expanded node. `sequence` counts the growth
    messages of (request, epoch) from 0; a `snapshot` holds the whole tree below the drafter's root.

    A block of positions sends the candidates of each position once: `rows[i]` (u16) is then the row of expansion i, and
    `counts` are those of the rows.
    """

    request: int
    epoch: int
    sequence: int
    parents: bytes
    steps: bytes
    counts: bytes
    tokens: bytes
    log_probabilities: bytes
    source: str = "model"
    snapshot: bool = False
    rows: bytes = b""


class Resync(msgspec.Struct, frozen=True, tag=True):
    """Drafter to verifier: the roots differ, send `Open`. Verifier to drafter: send a snapshot."""

    request: int
    epoch: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """Verifier to drafter: the request ended; free its tree."""

    request: int
    epoch: int


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Pause or resume drafting for all requests."""

    paused: bool


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A sign of life; a drafter adds its step time and its number of nodes."""

    step_ms: float = 0.0
    nodes: int = 0


DrafterMessage = (
    Hello
    | Refusal
    | Open
    | Outcome
    | Features
    | SharedMemory
    | SharedMemoryRead
    | Growth
    | Resync
    | Close
    | Pause
    | Heartbeat
)
Message = ServerMessage | VerifierReport | DrafterMessage
