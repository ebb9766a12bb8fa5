"""What request fields mean for a text, where that takes the tokenizer. Knows no HTTP."""

from collections.abc import Sequence
from typing import TypeVar

from ssd_serve.sampling.validation import TokenSequences, bad_word_sequences, stop_token_set
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.service import Service
from ssd_serve.server.text.output import TextRules
from ssd_serve.server.text.stops import StopStrings

Value = TypeVar("Value")


def given(value: Value | None, default: Value) -> Value:
    """`value`, or the default where it is null."""
    return default if value is None else value


async def bad_word_tokens(service: Service, words: Sequence[str] | None) -> TokenSequences:
    """The token sequences of all bad words."""

    def work() -> Steps[TokenSequences]:
        found: dict[tuple[int, ...], None] = {}
        for word in words or ():
            found |= dict.fromkeys(bad_word_sequences(service.tokenizer, word))
            yield
        return tuple(found)

    return await service.worker_pool.steps(2 * sum(map(len, words or ())), work())


async def text_rules(service: Service, request: GenerationRequest) -> TextRules:
    """What the server itself does with the tokens."""
    given_stops = () if request.stop is None else request.stop
    stops = (given_stops,) if isinstance(given_stops, str) else tuple(given_stops)
    return TextRules(
        stops=await service.worker_pool.run(4 * sum(map(len, stops)), lambda: StopStrings(stops)),
        include_stop=given(request.include_stop_str_in_output, False),
        min_tokens=given(request.min_tokens, 0),
        stop_token_set=stop_token_set(request.stop_token_ids, request.ignore_eos, service.tokenizer.eos_ids),
    )
