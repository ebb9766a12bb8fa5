"""TLS between processes that know one key: nobody else can be a peer, or read or change a byte unnoticed.

Both ends derive the same private key and certificate from the cluster key, and trust that certificate and no
other. Knows bytes, no sockets and no messages.

Why not pre-shared keys (TLS-PSK): Python offers them from 3.13 on, and their first message gives whoever
listens something to try keys against. Here only who connects himself gets that, and each try costs a slow
function. One way serves every Python.
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
"""Names the protocol: who speaks another one has another certificate."""
_SCRYPT_COST = 1 << 15
_NAME = "ssd-serve"
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.timezone.utc)
"""The certificate is as valid as the key is, and a clock that is wrong locks nobody out."""
_WELCOME = b"\n"
_RECORD_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """What a key makes of a process, as a listener and as a connector."""

    listening: ssl.SSLContext
    connecting: ssl.SSLContext


@lru_cache(maxsize=4)
def identity(key: str) -> Identity:
    """Takes some tens of milliseconds, on purpose, and is remembered."""
    certificate, private_key, password = _credentials(key)
    try:
        # Only from a file does Python take a private key: nobody who finds it has the password.
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
    listening.num_tickets = 0  # nobody resumes
    return Identity(listening, connecting)


def _trusting(certificate: bytes, context: ssl.SSLContext, path: str, password: str) -> ssl.SSLContext:
    """The same context, which shows and takes this certificate and no other."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key says who it is, wherever it is
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(path, password=password)
    context.load_verify_locations(cadata=certificate.decode())
    return context


def _credentials(key: str) -> tuple[bytes, bytes, str]:
    """The certificate, the encrypted private key and its password. The certificate's bytes are the same for
    the same key, everywhere: Ed25519 signs without chance."""
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
    """One end of an encrypted connection. It needs no farewell: messages tell their length, so that one who
    cuts the connection gains nothing."""

    def __init__(self, identity: Identity, *, listening: bool) -> None:
        context = identity.listening if listening else identity.connecting
        self._listening = listening
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=listening)

    def shake(self, received: bytes, send: Callable[[bytes], None]) -> bool:
        """Go on with the handshake; True when both ends have proved that they know the key. Raises
        `ssl.SSLError` when they do not, of which the peer is told too."""
        self._arrived.write(received)
        try:
            self._tls.do_handshake()
            # TLS lets a connector go on before the listener has seen who he is.
            if self._listening:
                self._tls.write(_WELCOME)
            else:
                self._tls.read(len(_WELCOME))
        except ssl.SSLWantReadError:
            return False
        finally:
            leaving = self._leaving.read()
            if leaving:
                send(leaving)
        return True

    def seal(self, data: bytes | bytearray) -> bytes:
        """The encrypted bytes that go over the wire for these."""
        self._tls.write(data)
        return self._leaving.read()

    def open(self, received: bytes | memoryview) -> bytes:
        """What the peer has sealed, as far as it has arrived. Raises `ssl.SSLError` where somebody else has
        changed it."""
        self._arrived.write(received)
        parts: list[bytes] = []
        try:
            # Asked first, since an exception takes longer than a small message.
            while self._arrived.pending or self._tls.pending():
                part = self._tls.read(_RECORD_BYTES)
                if not part:
                    raise ssl.SSLZeroReturnError("a farewell, which ends the stream")
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        return b"".join(parts)
