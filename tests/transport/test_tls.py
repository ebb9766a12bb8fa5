"""TLS as functions of bytes: only the peer can decrypt, in portions of any size."""

import hashlib
import ssl
import sys
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ssd_serve.base.errors import PermissionProblemError, SettingsError
from ssd_serve.transport.tls import Identity, TlsStream, identity
from tests.examples import examples
from tests.transport.tls_peers import KEY, met, shaken_pair


def test_equal_keys_make_equal_certificates() -> None:
    before = identity(KEY)
    identity.cache_clear()
    again = identity(KEY)
    assert again is not before
    assert met(TlsStream(before, listening=False), TlsStream(again, listening=True)) == (True, True)


@pytest.mark.parametrize("part", [1, 2, 3, 100])
def test_a_handshake_byte_by_byte_succeeds(part: int) -> None:
    own = identity(KEY)
    assert met(TlsStream(own, listening=False), TlsStream(own, listening=True), part) == (True, True)


def test_the_listener_rejects_another_key() -> None:
    other = identity("another key of the tests")
    trusting = Identity(other.listening, other.connecting)
    trusting.connecting.verify_mode = ssl.CERT_NONE
    try:
        with pytest.raises(ssl.SSLCertVerificationError):
            met(TlsStream(trusting, listening=False), TlsStream(identity(KEY), listening=True))
    finally:
        identity.cache_clear()


def test_a_connector_without_a_certificate_is_refused() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    nobody = TlsStream(Identity(context, context), listening=False)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE"):
        met(nobody, TlsStream(identity(KEY), listening=True))


def test_tls_before_1_3_is_refused() -> None:
    own = identity(KEY)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="PROTOCOL"):
        met(TlsStream(Identity(old, old), listening=False), TlsStream(own, listening=True))


@hypothesis_settings(max_examples=examples(50), deadline=None)
@given(
    texts=st.lists(st.integers(1, 70_000), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 40_000), min_size=1, max_size=10),
)
def test_encrypted_bytes_decrypt_in_any_portions(texts: list[int], cuts: list[int]) -> None:
    one, other = shaken_pair()
    plain = [bytes([number % 256]) * size for number, size in enumerate(texts)]
    wire = b"".join(one.encrypt(text) for text in plain)
    assert not any(text[:32] in wire for text in plain if len(text) >= 32)
    opened, at, turn = b"", 0, 0
    while at < len(wire):
        size = cuts[turn % len(cuts)]
        opened += other.decrypt(wire[at : at + size])
        at, turn = at + size, turn + 1
    assert opened == b"".join(plain)


@hypothesis_settings(max_examples=examples(50), deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_detected(data: st.DataObject) -> None:
    one, other = shaken_pair()
    wire = bytearray(one.encrypt(b"tokens" * 10))
    bit = data.draw(st.integers(0, 8 * len(wire) - 1))
    wire[bit // 8] ^= 1 << (bit % 8)
    try:
        opened = other.decrypt(bytes(wire))
    except ssl.SSLError:
        return
    assert opened == b"", "a length that has grown is waited for"


def test_replayed_records_are_rejected() -> None:
    one, other = shaken_pair()
    wire = one.encrypt(b"once")
    assert other.decrypt(wire) == b"once"
    with pytest.raises(ssl.SSLError):
        other.decrypt(wire)


def honest_connector(listener: TlsStream) -> tuple[ssl.SSLObject, ssl.MemoryBIO]:
    arrived, leaving, heard = ssl.MemoryBIO(), ssl.MemoryBIO(), bytearray()
    one = identity(KEY).connecting.wrap_bio(arrived, leaving)
    with pytest.raises(ssl.SSLWantReadError):
        one.do_handshake()
    listener.handshake(leaving.read(), heard.extend)
    arrived.write(heard)
    one.do_handshake()
    assert listener.handshake(leaving.read(), heard.extend)
    return one, leaving


def test_close_notify_ends_the_stream() -> None:
    other = TlsStream(identity(KEY), listening=True)
    one, leaving = honest_connector(other)
    with pytest.raises(ssl.SSLWantReadError):
        one.unwrap()
    with pytest.raises(ssl.SSLZeroReturnError):
        other.decrypt(leaving.read() + b"more" * 1000)


def test_the_certificate_of_a_key_is_stable() -> None:
    """A failure means that versions cannot authenticate each other: change the salt."""
    one, _ = honest_connector(TlsStream(identity(KEY), listening=True))
    certificate = one.getpeercert(binary_form=True) or b""
    assert (
        hashlib.sha256(certificate).hexdigest()
        == "ae463d3a68ba2fd46ada57a559b28b1d80298bd6ce965d3381ec0c68b7fd4d34"
    )
    assert one.version() == "TLSv1.3"


def test_without_cryptography_the_error_says_what_to_install() -> None:
    with (
        patch.dict(sys.modules, {"cryptography": None}),
        pytest.raises(SettingsError, match="pip install cryptography"),
    ):
        identity("a key that nobody has used yet")


def test_without_a_temporary_folder_the_error_names_tmpdir() -> None:
    with (
        patch("tempfile.NamedTemporaryFile", side_effect=OSError(30, "Read-only file system")),
        pytest.raises(PermissionProblemError, match="Read-only file system; set TMPDIR"),
    ):
        identity("another key that nobody has used")
