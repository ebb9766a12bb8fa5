"""A drafter's core with scripted guesses, and its messages."""

from ssd_serve.base.draft_messages import DrafterMessage, Open, Outcome
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.seeds import mix, root_name
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from tests.fakes import ScriptedSource, core_of

LIMITS = GrowthLimits(width=3, fan_out=3, depth=6, nodes=200)
PROMPT = (5, 6, 7)
ROOT = root_name(1, 1, 2)


def make(limits: GrowthLimits = LIMITS) -> tuple[DrafterCore, ScriptedSource]:
    source = ScriptedSource()
    return core_of(source, limits), source


def opening(request: int = 1, epoch: int = 1, output: tuple[int, ...] = (), max_tokens: int = 100) -> Open:
    root = root_name(request, epoch, len(PROMPT) + len(output) - 1)
    return Open(request, epoch, PROMPT, output, SamplingParameters(max_tokens=max_tokens), 9, root)


def outcome(*tokens: int, position: int = 3, root: int = ROOT, epoch: int = 1) -> Outcome:
    for token in tokens:
        root = mix(root, token)
    return Outcome(1, epoch, position, tokens, root)


def grown(core: DrafterCore) -> list[DrafterMessage]:
    found: list[DrafterMessage] = []
    while growth := core.step():
        found.extend(growth)
    return found
