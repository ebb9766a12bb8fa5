"""`/tokenize` and `/detokenize`: what the model's tokenizer makes of a text, a conversation or ids."""

from dataclasses import dataclass

import msgspec
from fastapi import Request, Response

from ssd_serve.server.body import read_body
from ssd_serve.server.errors import bad_request
from ssd_serve.server.prompts import chat_text, check_vocabulary, encode
from ssd_serve.server.protocol import DetokenizeRequest, TokenizeRequest
from ssd_serve.server.sampling import given
from ssd_serve.server.service import Service


@dataclass(frozen=True, slots=True)
class TokenizingEndpoints:
    """Handlers of the routes."""

    service: Service

    async def tokenize(self, request: Request) -> Response:
        """Ids of a text or of a conversation."""
        service = self.service
        body = await read_body(request, TokenizeRequest, service.limits)
        service.require_model(body.model)
        ready = service.require_ready()
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt", "invalid_value")
        text = body.prompt or ""
        if body.messages is not None:
            generation_prompt = given(body.add_generation_prompt, True)
            text = await chat_text(service, body.messages, body.chat_template_kwargs, generation_prompt)
        param = "prompt" if body.messages is None else "messages"
        ids = await encode(service, text, given(body.add_special_tokens, body.messages is None), param)
        answer: dict[str, object] = {"count": len(ids), "max_model_len": ready.context, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = await service.off_loop.run(
                len(text), lambda: [service.texts.of(token) for token in ids]
            )
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        """Text of ids, special tokens included."""
        service = self.service
        body = await read_body(request, DetokenizeRequest, service.limits)
        service.require_model(body.model)
        check_vocabulary(body.tokens, service.require_ready(), "tokens")
        text = await service.off_loop.run(
            len(body.tokens), lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return _json({"prompt": text})


def _json(answer: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
