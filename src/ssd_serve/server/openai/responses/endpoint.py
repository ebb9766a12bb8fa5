"""`/v1/responses`: its requests are chat requests in other words."""

from dataclasses import dataclass, replace

from fastapi import Request, Response

from ssd_serve.server.openai.answers import Job
from ssd_serve.server.openai.chat import ChatEndpoint
from ssd_serve.server.openai.endpoint import checked_run_answered
from ssd_serve.server.openai.message_answers import Spoken
from ssd_serve.server.openai.responses.request import ResponsesRequest
from ssd_serve.server.openai.responses.voice import ResponseVoice
from ssd_serve.server.service import Service


@dataclass(frozen=True, slots=True)
class ResponsesEndpoint:
    """Handles the route."""

    service: Service

    async def handle(self, request: Request) -> Response:
        """Check, run, answer."""
        return await checked_run_answered(self.service, request, ResponsesRequest, self._plan)

    async def _plan(self, body: ResponsesRequest, name: str) -> Job:
        job = await ChatEndpoint(self.service).job(body.chat(), name)
        return replace(job, manner=Spoken(ResponseVoice(job.head, body.echo())))
