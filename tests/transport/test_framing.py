"""Frames survive any split of the byte stream; nonsense ends the stream and loses nothing before it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.base.draft_messages import (
    Growth,
    Heartbeat,
    Message,
    Open,
    Outcome,
)
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.messages import (
    Abort,
    Committed,
    SamplingParameters,
    Submit,
)
from ssd_serve.transport.framing import FrameReader, FrameWriter

identifiers = st.integers(0, 2**63 - 1)
names = st.integers(0, 2**64 - 1)
tokens = st.lists(st.integers(0, 200_000), max_size=40).map(tuple)
floats = st.floats(0, 2, allow_nan=False)
parameters = st.builds(
    SamplingParameters,
    temperature=floats,
    logit_bias=st.dictionaries(st.integers(0, 1000), floats, max_size=3),
    stop_token_ids=tokens,
    logprobs=st.none() | st.integers(0, 20),
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Abort, identifiers),
    st.builds(Submit, identifiers, tokens, parameters, names),
    st.builds(Committed, identifiers, tokens),
    st.builds(Outcome, identifiers, identifiers, identifiers, tokens, names),
    st.builds(Open, identifiers, identifiers, tokens, tokens, parameters, names, root=names),
    st.builds(Growth, identifiers, identifiers, identifiers, st.binary(), st.binary(), st.binary()),
)


@given(st.lists(messages, max_size=8), st.lists(st.integers(0, 2000), max_size=20))
def test_any_split_of_the_stream_decodes_to_the_same_messages(sent: list[Message], cuts: list[int]) -> None:
    writer, reader = FrameWriter(), FrameReader()
    stream = b"".join(bytes(writer.encode(message)) for message in sent)
    received: list[Message] = []
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in itertools.pairwise(edges):
        reader.feed(stream[start:end])
        received += reader.take()
    assert received == sent


@given(st.lists(messages, max_size=5), st.binary(min_size=1, max_size=64))
def test_malformed_frames_do_not_lose_earlier_messages(sent: list[Message], nonsense: bytes) -> None:
    writer, reader = FrameWriter(max_frame_bytes=4096), FrameReader(max_frame_bytes=4096)
    stream = b"".join(bytes(writer.encode(message)) for message in sent)
    reader.feed(stream + len(nonsense).to_bytes(4, "little") + b"\xc1" + nonsense[1:])
    assert (reader.take() if sent else []) == sent
    with pytest.raises(ProtocolError, match="does not decode"):
        reader.take()
    reader.feed(bytes(writer.encode(Abort(1))))
    with pytest.raises(ProtocolError):
        reader.take()


@given(st.binary(max_size=300))
def test_random_bytes_raise_protocol_error_only(data: bytes) -> None:
    reader = FrameReader(max_frame_bytes=100)
    reader.feed(data)
    try:
        reader.take()
    except ProtocolError:
        assert reader.failed


def test_a_frame_above_the_limit_is_refused_from_its_header_alone() -> None:
    reader = FrameReader(max_frame_bytes=100)
    reader.feed((101).to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match="101 bytes is larger"):
        reader.take()


def test_a_message_above_the_limit_is_not_encoded() -> None:
    writer = FrameWriter(max_frame_bytes=100)
    with pytest.raises(ProtocolError, match="Submit message"):
        writer.encode(Submit(1, tuple(range(200)), SamplingParameters(), 0))
    assert writer.encode(Abort(1))


def test_a_number_that_msgpack_cannot_hold_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="cannot be encoded"):
        FrameWriter().encode(Abort(2**64))


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def nested(depth: int) -> bytes:
    """A Heartbeat with an unknown field of nested lists."""
    return b"\x82\xa4type\xa9Heartbeat\xa7unknown" + b"\x91" * depth + b"\x00"


@pytest.mark.parametrize("depth", [1_500, 100_000])
def test_deeply_nested_unknown_fields_are_rejected(depth: int) -> None:
    reader = FrameReader()
    reader.feed(framed(nested(10)) + framed(nested(depth)))
    assert reader.take() == [Heartbeat()]
    with pytest.raises(ProtocolError, match="nested too deeply"):
        reader.take()


def test_a_list_length_beyond_memory_is_a_protocol_error() -> None:
    reader = FrameReader()
    reader.feed(framed(b"\x82\xa4type\xa9Committed\xa6tokens\xdd\xff\xff\xff\xff"))
    with pytest.raises(ProtocolError, match="does not decode"):
        reader.take()


def test_only_accepted_message_types_decode() -> None:
    reader = FrameReader(kinds=Abort | Heartbeat)
    writer = FrameWriter()
    reader.feed(writer.encode(Heartbeat()) + writer.encode(Outcome(1, 1, 1, (1,), 1)))
    assert reader.take() == [Heartbeat()]
    with pytest.raises(ProtocolError, match="does not decode"):
        reader.take()
