"""What the endpoints that generate have in common: the way of a request from its body to its answer."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response

from ssd_serve.server.http.middleware import request_id
from ssd_serve.server.openai.answers import Job, answer
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.service import Service

Body = TypeVar("Body", bound=GenerationRequest)


async def checked_run_answered(
    service: Service,
    request: Request,
    kind: type[Body],
    plan: Callable[[Body, str], Coroutine[Any, Any, Job]],
) -> Response:
    """Read a body of this kind, let `plan` check it and make a job of it and the request's name, run that,
    answer."""
    ready = service.require_ready()
    service.require_room(1)
    job = await service.bodies.use(
        request, kind, ready, lambda body: plan(body, request_id(request, body.request_id))
    )
    return await answer(service, request, job)
