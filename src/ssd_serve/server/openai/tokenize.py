"""`/tokenize` and `/detokenize`: ids of a text or a conversation, and the text of ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from fastapi import Request, Response

from ssd_serve.base.messages import Ready
from ssd_serve.sampling.validation import check_vocabulary, context_length_error
from ssd_serve.server.errors import bad_request
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.checks import given
from ssd_serve.server.openai.prompts import chat_text, text_ids
from ssd_serve.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from ssd_serve.server.openai.unknown_fields import ignored_header
from ssd_serve.server.service import Service
from ssd_serve.server.text.tokenizer import token_units

_STRINGS_PER_STEP = 64


@dataclass(frozen=True, slots=True)
class TokenizingEndpoints:
    """Handlers of the routes."""

    service: Service

    async def tokenize(self, request: Request) -> Response:
        ready = self.service.require_ready()
        answer = await self.service.bodies.use(
            request, TokenizeRequest, ready, lambda body: self._ids(body, ready)
        )
        return _json(answer, request)

    async def detokenize(self, request: Request) -> Response:
        ready = self.service.require_ready()
        answer = await self.service.bodies.use(
            request, DetokenizeRequest, ready, lambda body: self._text(body, ready)
        )
        return _json(answer, request)

    async def _ids(self, body: TokenizeRequest, ready: Ready) -> dict[str, object]:
        service = self.service
        service.require_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt", "invalid_value")
        text = body.prompt or ""
        if body.messages is not None:
            text = await chat_text(service, service.tokenize_pool, body)
        param = "prompt" if body.messages is None else "messages"
        special = given(body.add_special_tokens, body.messages is None)
        ids = await service.tokenize_pool.steps(
            len(text), text_ids(service.tokenizer, ready, text, special, param)
        )
        answer: dict[str, object] = {"count": len(ids), "max_model_len": ready.context, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = await service.tokenize_pool.steps(
                token_units([len(ids)]), self._strings(ids)
            )
        return answer

    def _strings(self, ids: Sequence[int]) -> Steps[list[str]]:
        found: list[str] = []
        for place in range(0, len(ids), _STRINGS_PER_STEP):
            found += map(self.service.texts.text_of, ids[place : place + _STRINGS_PER_STEP])
            yield
        return found

    async def _text(self, body: DetokenizeRequest, ready: Ready) -> dict[str, object]:
        service = self.service
        service.require_model(body.model)
        if len(body.tokens) > ready.context:
            raise context_length_error(str(len(body.tokens)), ready.context, "tokens")
        check_vocabulary(body.tokens, ready, "tokens")
        text = await service.tokenize_pool.run(
            token_units([len(body.tokens)]),
            lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False),
        )
        return {"prompt": text}


def _json(answer: dict[str, object], request: Request) -> Response:
    headers = ignored_header(request)
    return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)
