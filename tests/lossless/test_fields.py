"""Every field of every API gives the same answer in every mode, whole and streamed."""

import os
import sys
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lossless.answer_contents import contents_of_choices, contents_of_message, contents_of_response
from tests.lossless.field_cases import APIS, Api
from tests.servers import free_port, running

pytestmark = pytest.mark.slow
CONTENTS: Mapping[str, Callable[[str, bool], Any]] = {
    "/v1/completions": contents_of_choices,
    "/v1/chat/completions": contents_of_choices,
    "/v1/responses": contents_of_response,
    "/v1/messages": contents_of_message,
}
AT_ONCE, OF_PLAIN = 16, 6
WHOLE_ONLY = {"prompt_logprobs"}


@contextmanager
def serving(mode: str, folder: Path) -> Generator[httpx.Client, None, None]:
    port = free_port()
    command = [sys.executable, "-m", "ssd_serve", "serve", "--mode", mode, "--port", str(port)]
    # A target on all cores would wait for the one that other tests use.
    command += ["--tool-parser", "hermes", "--no-speculation-may-stop", "--target-device", "cpu:0"]
    with (
        running(command, os.environ, folder, port) as (_, url, _),
        httpx.Client(base_url=url, timeout=60.0) as client,
    ):
        yield client


Answers = Mapping[tuple[str, str, bool], "Future[Any]"]
"""Answers by path, field, and streamed or not."""


def answers(mode: str, folder: Path, at_once: int = AT_ONCE) -> Answers:
    with serving(mode, folder) as client, ThreadPoolExecutor(at_once) as pool:
        return {
            (api.path, field, stream): pool.submit(contents, client, api, field, stream)
            for api in APIS
            for field in api.values
            for stream in (False, True)
            if not (stream and field in WHOLE_ONLY)
        }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers of a server without speculation, with fewer requests at once."""
    return answers("ar", tmp_path_factory.mktemp("plain"), OF_PLAIN)


@pytest.fixture(scope="module", params=["sd", "ssd"])
def of_mode(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    mode: str = request.param
    return answers(mode, tmp_path_factory.mktemp(mode))


def contents(client: httpx.Client, api: Api, field: str, stream: bool) -> Any:
    body = {"stream_options": {"include_usage": True}, **api.body(field)}
    if not stream:
        del body["stream_options"]
    answer = client.post(api.path, json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    return CONTENTS[api.path](answer.text, stream)


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_api_fields_give_the_same_answer_in_every_mode(plain: Answers, of_mode: Answers, api: Api) -> None:
    answers = {key: answer for key, answer in of_mode.items() if key[0] == api.path}
    assert len(answers) >= 2 * len(api.values) - len(WHOLE_ONLY)
    for (_, field, stream), answer in answers.items():
        assert answer.result() == plain[api.path, field, False].result(), (field, stream)


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_every_api_field_has_a_case(api: Api) -> None:
    assert set(api.kind.model_fields) - set(api.values) == api.not_built | {"stream"}
