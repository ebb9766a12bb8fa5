"""Messages between verifier and drafter.

Both directions: Hello, Heartbeat, Refusal (which ends the connection), Resync. Verifier to drafter: Open,
Outcome, Features, SharedMemory, Close, Pause. Drafter to verifier: Growth, SharedMemoryRead.

All are msgspec structs, encoded as msgpack with a tag; arrays travel as raw little-endian buffers. They know
nothing about sockets, trees or tensors.
"""

import msgspec

from ssd_serve.base.messages import SamplingParameters, ServerMessage, VerifierReport

PROTOCOL_VERSION = 7
NOISE_SCHEME = "philox4x32-10/exponential-race/1"
FINAL = -1
"""In place of a layer's number: what the target's head reads, the normed output of its last layer."""


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message both ways between verifier and drafter; a mismatch is refused with `Refusal`. Only the
    version has no default, so that the Hello of any version can be read and refused for it."""

    protocol: int
    noise: str = ""
    tokenizer: str = ""
    """SHA-256 of the vocabulary, ids included."""
    vocabulary: int = 0
    context: int = 0
    name: str = ""
    instance: int = 0
    """Drawn by each process of a drafter: who comes back is told from another one of the same name."""
    source: str = ""
    """What a drafter guesses with: those that name the same share the requests."""
    step_ms: float = 0.0
    """The drafter's measured step time, 0 when unknown."""
    prefill_ms: float = 0.0
    """For how long it reads a token of a text, about; 0 when unknown."""
    features: tuple[int, ...] = ()
    """Layers of the target whose outputs a drafter reads, and `FINAL`."""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why a peer will not work with the other; the connection is closed after it."""

    message: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """Start drafting for a request, or start again. The root is the last committed token, `root` its name."""

    request: int
    epoch: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    parameters: SamplingParameters
    seed: int
    root: int
    salt: bytes = b""
    """Told within the verifier's own process only."""


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """What a round committed. `position` is that of the first token; `root` is the name of the new root."""

    request: int
    epoch: int
    position: int
    tokens: tuple[int, ...]
    root: int


class Features(msgspec.Struct, frozen=True, tag=True):
    """What the target has computed of committed tokens, from `position` on: outputs of the layers that the
    drafter's `Hello` names, side by side, as rows of `width` bfloat16 numbers. Never needed for a text."""

    request: int
    epoch: int
    position: int
    width: int
    data: bytes
    shared: tuple[int, int] | None = None
    """Where they are in the `SharedMemory`, if not in `data`: from which byte on, and how many bytes."""


class SharedMemory(msgspec.Struct, frozen=True, tag=True):
    """Verifier to a drafter of this machine: with this message comes an open file, which is memory of so many
    bytes, for features. Who can read it answers with `SharedMemoryRead`."""

    size: int


class SharedMemoryRead(msgspec.Struct, frozen=True, tag=True):
    """Drafter to verifier: so many pieces of the shared memory were read, of all that were told of. Their
    places may be written on again."""

    total: int


class Growth(msgspec.Struct, frozen=True, tag=True):
    """Expansions of a request's tree, as parallel buffers; `cache/expansions.py` packs and unpacks them.

    Expansion i is of the node that `steps[i]` (i32 token) leads to from the node named `parents[i]` (u64), or
    of that node itself where the step is -1 (a root). It brings `counts[i]` (u16) candidates: `tokens` (i32),
    best first, with `log_probabilities` (f32) conditional on the expanded node. `sequence` counts the growth
    messages of (request, epoch) from 0; a `snapshot` holds the whole tree below the drafter's root.
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


class Resync(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> verifier: my root differs, send `Open`. Verifier -> drafter: send a snapshot."""

    request: int
    epoch: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """Verifier to drafter: the request ended, and its tree may be forgotten."""

    request: int
    epoch: int


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Speculation is switched off (`paused`) or on again for all requests, under load."""

    paused: bool


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """I am alive. A drafter adds its measured step time and how many nodes it holds."""

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
