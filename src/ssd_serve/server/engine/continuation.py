"""Answers that go on behind tokens which earlier answers to the same request gave before they broke off.

Shared noise makes that possible: a token follows from the seed and its position, whichever server computes
it. What the tokens so far had ended is told by the engine as ever. Knows request fields; runs nothing.
"""

from collections.abc import Sequence

from ssd_serve.base.messages import Ready
from ssd_serve.sampling.validation import check_vocabulary
from ssd_serve.server.errors import ApiError, bad_request
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.service import Service

_FIELD = "generated_token_ids"


async def generated_tokens(
    service: Service, ready: Ready, body: GenerationRequest, most: Sequence[int]
) -> Sequence[tuple[int, ...]]:
    """What the client has already of each choice, over all prompts: nothing, where the request is a new one.
    `most` are the tokens that each choice may have."""
    told = body.generated_token_ids
    if not told:
        return [()] * len(most)
    if body.seed is None:
        raise _wrong('needs the seed of the answer that they come from; its first chunk tells it ("seed")')
    if len(told) != len(most):
        raise _wrong(f"has {len(told)} lists; the request has {len(most)} choices, and each needs one")
    for ids, limit in zip(told, most, strict=True):
        if len(ids) > limit:
            raise _wrong(f"{len(ids)} tokens are more than the {limit} that the answer may have")

    def check() -> Steps[None]:
        for ids in told:
            check_vocabulary(ids, ready, _FIELD)
            yield

    await service.worker_pool.steps(sum(map(len, told)), check())
    return told


def _wrong(message: str) -> ApiError:
    return bad_request(f"{_FIELD}: {message}", _FIELD, "invalid_value")
