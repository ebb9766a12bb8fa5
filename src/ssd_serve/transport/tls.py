"""TLS between processes that know one key, so that no other peer can join, read or change bytes unnoticed.

Both ends derive the same private key and certificate from the cluster key, and trust only that certificate.
Knows bytes, no sockets and no messages.

Pre-shared keys (TLS-PSK) exist in Python from 3.13 on only, and their first message lets a listener test keys
offline. Here an attacker must connect, and each guess costs a slow key derivation.
"""

import datetime
import secrets
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ssd_serve.base.errors import PermissionProblemError, SettingsError

_SALT = b"ssd-serve link 1"
"""Names the protocol: another version has another certificate."""
_SCRYPT_COST = 1 << 15
_NAME = "ssd-serve"
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.timezone.utc)
"""The certificate never expires, so a wrong clock does no harm."""
_CONFIRMATION = b"\n"
_RECORD_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """The TLS contexts of a key, for listening and for connecting."""

    listening: ssl.SSLContext
    connecting: ssl.SSLContext


@lru_cache(maxsize=4)
def identity(key: str) -> Identity:
    """Derive the contexts; takes tens of milliseconds by design, and is cached."""
    certificate, private_key, password = _credentials(key)
    try:
        # Python loads private keys from files only; this one is encrypted with a random password.
        with tempfile.NamedTemporaryFile(prefix="ssd-") as file:
            file.write(private_key + certificate)
            file.flush()
            listening, connecting = (
                _trusting(certificate, ssl.SSLContext(kind), file.name, password)
                for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
            )
    except ssl.SSLError as error:
        raise SettingsError(f"this Python's TLS cannot be used between processes: {error}") from error
    except OSError as error:
        raise PermissionProblemError(
            f"no temporary file can be made for the key of TLS: {error.strerror}; set TMPDIR to a folder you "
            "can write to"
        ) from error
    listening.num_tickets = 0  # no session resumption
    return Identity(listening, connecting)


def _trusting(certificate: bytes, context: ssl.SSLContext, path: str, password: str) -> ssl.SSLContext:
    """Make a context present and accept only this certificate."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key identifies the peer, at any address
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(path, password=password)
    context.load_verify_locations(cadata=certificate.decode())
    return context


def _credentials(key: str) -> tuple[bytes, bytes, str]:
    """The certificate, the encrypted private key and its password.

    Equal keys give equal certificates everywhere, because Ed25519 signatures are deterministic.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
    except ImportError as error:
        raise SettingsError(
            "links over TCP are encrypted, for which the package cryptography is missing: "
            "pip install cryptography"
        ) from error
    seed = Scrypt(salt=_SALT, length=32, n=_SCRYPT_COST, r=8, p=1).derive(key.encode())
    private_key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    builder = (
        x509.CertificateBuilder()
        .issuer_name(name)
        .subject_name(name)
        .public_key(private_key.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )
    password = secrets.token_hex(32)
    return (
        builder.sign(private_key, None).public_bytes(serialization.Encoding.PEM),
        private_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password.encode()),
        ),
        password,
    )


class TlsStream:
    """An end of an encrypted connection, without `close_notify`: messages have lengths, so truncation is
    detected."""

    def __init__(self, identity: Identity, *, listening: bool) -> None:
        context = identity.listening if listening else identity.connecting
        self._listening = listening
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=listening)

    def handshake(self, received: bytes, send: Callable[[bytes], None]) -> bool:
        """Continue the handshake; True when both ends have proved that they know the key.

        Raises `ssl.SSLError` if they do not; the peer gets the alert.
        """
        self._incoming.write(received)
        try:
            self._tls.do_handshake()
            # In TLS 1.3 a connector finishes before the listener has verified it.
            if self._listening:
                self._tls.write(_CONFIRMATION)
            else:
                self._tls.read(len(_CONFIRMATION))
        except ssl.SSLWantReadError:
            return False
        finally:
            pending = self._outgoing.read()
            if pending:
                send(pending)
        return True

    def encrypt(self, data: bytes | bytearray) -> bytes:
        self._tls.write(data)
        return self._outgoing.read()

    def decrypt(self, received: bytes | memoryview) -> bytes:
        """Decrypt what has arrived. Raises `ssl.SSLError` for data that was tampered with."""
        self._incoming.write(received)
        parts: list[bytes] = []
        try:
            # Checked first, since an exception takes longer than a small message.
            while self._incoming.pending or self._tls.pending():
                part = self._tls.read(_RECORD_BYTES)
                if not part:
                    raise ssl.SSLZeroReturnError("the peer ended the stream")
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        return b"".join(parts)
