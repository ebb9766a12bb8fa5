"""Following texts through schemas: what is timed, what is counted, and schemas that are what they seem."""

import jsonschema
import pytest
from tokenizers import Tokenizer as Backend

from lab.grammars.experiment import compare
from lab.grammars.matchers import Library, Llguidance, Matcher, Schema
from lab.grammars.schemas import make_schema
from ssd_serve.models.hub import embedded_folder

TOKENIZER = Backend.from_file(str(embedded_folder("target") / "tokenizer.json"))
END = 0


class Choosy:
    """Compiles few schemas, and has few texts."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def begin(self, schema: Schema) -> Matcher:
        if len(schema["properties"]) > 1:
            raise ValueError("too many")
        return self._library.begin({"type": "object", "properties": {}, "additionalProperties": False})


def test_two_that_are_alike_refuse_nothing_of_each_other() -> None:
    library = Llguidance(TOKENIZER, END)
    found = compare({"one": library, "two": library}, TOKENIZER.get_vocab_size(), END, 6)
    for seen in found.values():
        told = seen.told()
        assert (told["schemas"], told["not_compiled"], told["texts_refused"]) == (6, 0, 0)
        assert len(seen.first_masks) == 12
        assert min(seen.masks) > 0


def test_what_one_refuses_is_counted() -> None:
    library = Llguidance(TOKENIZER, END)
    libraries: dict[str, Library] = {"whole": library, "choosy": Choosy(library)}
    found = compare(libraries, TOKENIZER.get_vocab_size(), END, 12)
    several = sum(len(make_schema(seed)["properties"]) > 1 for seed in range(12))
    assert found["choosy"].not_compiled == several
    assert found["choosy"].refused > 0


@pytest.mark.parametrize("seed", range(20))
def test_schemas_are_valid_and_the_same_for_the_same_seed(seed: int) -> None:
    schema = make_schema(seed)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema == make_schema(seed)
    assert schema["type"] == "object"
