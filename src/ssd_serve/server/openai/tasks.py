"""A generation request from its checked body to its end: its engine requests, usage and privacy.

Knows no shapes of responses.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
from fastapi import Request

from ssd_serve.server.access.auth import tenant_of
from ssd_serve.server.engine.choice import ChoiceEnd, ChoicePlan
from ssd_serve.server.engine.generation import GenerationStream
from ssd_serve.server.http.middleware import path_within
from ssd_serve.server.observability.timing import FinishedRequest, RequestTrace, log_finished
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.openai.serialize import ChoiceSerializer, ResponseHead, timings, usage
from ssd_serve.server.service import Service


class GenerationTask:
    """A checked request of one tenant. `plans` has all choices, those of a prompt in a row."""

    def __init__(
        self,
        service: Service,
        request: Request,
        body: GenerationRequest,
        head: ResponseHead,
        plans: Sequence[ChoicePlan],
        serializer: ChoiceSerializer,
    ) -> None:
        self.service = service
        self.request = request
        self.head = head
        self.plans = plans
        self.serializer = serializer
        self.tenant = tenant_of(request)
        self.streamed = bool(body.stream)
        self.traced = body.speculation is not None and bool(body.speculation.trace)
        """The response has the number of tokens of each round."""
        options = body.stream_options
        self.final_usage = options is not None and bool(options.include_usage)
        self.continuous_usage = self.final_usage and bool(options and options.continuous_usage_stats)
        self.stream_figures = options is None or options.include_speculation is not False
        """The last chunk has the figures of speculation."""
        self.obfuscated = options is not None and bool(options.include_obfuscation)
        """Chunks are padded, so that their length does not reveal their text."""
        salt = service.tenants.salt(self.tenant, body.cache_salt)
        self._options = msgspec.structs.replace(body.options(), salt=salt)
        self._choices = body.n or 1

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt counts once, however many choices it has."""
        return sum(len(self.plans[first].prompt) for first in range(0, len(self.plans), self._choices))

    def charge(self) -> None:
        """Charge the tenant for tokens to prefill. Raises 429 where its limit is used up."""
        generated = sum(len(plan.generated) for plan in self.plans)
        self.tenant.begin_prompt(self.prompt_tokens + generated)

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[GenerationStream, None]:
        """Run the choices; log and trace their end for any reason."""
        stream = GenerationStream(self.service, self.plans, self._options)
        try:
            async with stream:
                yield stream
        finally:
            if stream.courses:
                path, trace = path_within(self.request.scope), self._trace
                of = (path, self.tenant.name, self.prompt_tokens)
                log_finished(FinishedRequest(*of, stream.courses, stream.request_numbers), trace)

    @property
    def _trace(self) -> RequestTrace | None:
        return getattr(self.request.state, "trace", None)

    @property
    def _reveals_cache(self) -> bool:
        """True where cache hits may be reported: only the client's own prompts can have been cached, or the
        operator allows it."""
        return bool(self._options.salt) or self.service.settings.tell_cached_tokens

    def timings(self, tokens: int, ends: Mapping[int, ChoiceEnd]) -> dict[str, object]:
        """Return the timings object of a response with so many output tokens."""
        return timings(self.prompt_tokens, tokens, list(ends.values()), self._reveals_cache)

    def usage(self, tokens: int, ends: Mapping[int, ChoiceEnd]) -> dict[str, object]:
        """Return the usage object after so many output tokens. `ends` has the choices that ended, by index."""
        return usage(self.prompt_tokens, tokens, self.cached_tokens(ends))

    def cached_tokens(self, ends: Mapping[int, ChoiceEnd]) -> int | None:
        """Return prompt tokens found in the prefix cache; None where that is not reported."""
        if not self._reveals_cache:
            return None
        firsts = [first for first in range(0, len(self.plans), self._choices) if first in ends]
        # A resumed choice may have found some of its output in the cache too.
        return sum(
            min(ends[first].figures.cached_prompt_tokens, len(self.plans[first].prompt)) for first in firsts
        )
