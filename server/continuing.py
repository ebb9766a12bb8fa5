"""An answer that goes on behind tokens which an earlier answer to the same request gave before it broke off.

Shared noise makes that possible: a token follows from the seed and its position, whichever server computes
it. Knows request fields and text rules; runs nothing.
"""

from ssd_serve.messages import Ready
from ssd_serve.server.errors import bad_request
from ssd_serve.server.prompts import check_vocabulary
from ssd_serve.server.protocol import GenerationRequest
from ssd_serve.server.text import TextAssembler, TextRules

_FIELD = "generated_token_ids"


def generated_tokens(
    body: GenerationRequest, ready: Ready, rules: TextRules, choices: int, max_tokens: int
) -> tuple[int, ...]:
    """The tokens that the client has already; empty for a new request. `choices` over all prompts."""
    ids = body.generated_token_ids
    if not ids:
        return ()
    if body.seed is None:
        raise bad_request(
            f'{_FIELD}: needs the seed of the answer that they come from; its first chunk tells it ("seed")',
            "seed",
            "invalid_value",
        )
    if choices != 1:
        raise bad_request(
            f"{_FIELD}: only one choice of one prompt can go on; send one request for each",
            _FIELD,
            "invalid_value",
        )
    check_vocabulary(ids, ready, _FIELD)
    if len(ids) >= max_tokens:
        raise _ended(f"they are as many as the answer may have ({max_tokens})")
    ending = next((token for token in ids if token in rules.ending_tokens), None)
    if ending is not None:
        raise _ended(f"token {ending} ends it")
    return tuple(ids)


def go_on_behind(tokens: tuple[int, ...], assembler: TextAssembler) -> None:
    """Let the assembler know what the client has been told."""
    for token in tokens:
        assembler.push(token)
        if assembler.stopped_by is not None:
            raise _ended(f"the stop string {assembler.stopped_by!r} ends it")


def _ended(why: str) -> Exception:
    return bad_request(f"{_FIELD}: the answer is complete: {why}", _FIELD, "answer_complete")
