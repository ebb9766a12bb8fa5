"""Two ends of an encrypted connection without sockets, for tests."""

from ssd_serve.transport.tls import TlsStream, identity

KEY = "a key of the tests"


def shaken_pair() -> tuple[TlsStream, TlsStream]:
    """A connector and a listener that have shaken hands."""
    connector, listener = TlsStream(identity(KEY), listening=False), TlsStream(identity(KEY), listening=True)
    assert met(connector, listener) == (True, True)
    return connector, listener


def met(connector: TlsStream, listener: TlsStream, part: int = 1 << 20) -> tuple[bool, bool]:
    """Who has come to an end of the handshake, when all is delivered in parts of so many bytes."""
    over = {connector: False, listener: False}
    peers = {connector: listener, listener: connector}
    waiting: dict[TlsStream, bytearray] = {connector: bytearray(), listener: bytearray()}
    over[connector] = connector.handshake(b"", waiting[listener].extend)
    while any(waiting.values()):
        for end, data in waiting.items():
            portion = bytes(data[:part])
            del data[:part]
            if portion and not over[end]:
                over[end] = end.handshake(portion, waiting[peers[end]].extend)
    return over[connector], over[listener]
