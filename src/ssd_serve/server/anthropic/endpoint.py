"""`/v1/messages` and `/v1/messages/count_tokens`: their requests are chat requests in other words."""

from dataclasses import dataclass, replace

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from ssd_serve.base.messages import Ready
from ssd_serve.server.anthropic.request import CountRequest, MessagesRequest
from ssd_serve.server.anthropic.voice import AnthropicVoice
from ssd_serve.server.openai.answers import Job
from ssd_serve.server.openai.chat import ChatEndpoint
from ssd_serve.server.openai.conversation import TemplateInput
from ssd_serve.server.openai.endpoint import checked_run_answered
from ssd_serve.server.openai.envelope import told_ignored
from ssd_serve.server.openai.message_answers import Spoken
from ssd_serve.server.openai.prompts import chat_text, text_ids
from ssd_serve.server.service import Service


@dataclass(frozen=True, slots=True)
class MessagesEndpoint:
    """Handlers of the routes."""

    service: Service

    async def handle(self, request: Request) -> Response:
        """Check, run, answer."""
        return await checked_run_answered(self.service, request, MessagesRequest, self._plan)

    async def count(self, request: Request) -> Response:
        """How many tokens a conversation has."""
        ready = self.service.require_ready()
        count = await self.service.bodies.use(
            request, CountRequest, ready, lambda body: self._count(body, ready)
        )
        return JSONResponse({"input_tokens": count}, headers=told_ignored(request))

    async def _plan(self, body: MessagesRequest, name: str) -> Job:
        job = await ChatEndpoint(self.service).job(body.asked(), name)
        return replace(job, manner=Spoken(AnthropicVoice(job.head)))

    async def _count(self, body: CountRequest, ready: Ready) -> int:
        service = self.service
        service.require_model(body.model)
        conversation = TemplateInput.of(body.chat(), service.settings.system_prompt)
        text = await chat_text(service, service.tokenize_pool, conversation)
        steps = text_ids(service.tokenizer, ready, text, False, "messages")
        return len(await service.tokenize_pool.steps(len(text), steps))
