"""The other process of `python -m lab.channels`: sends every message back. A script: an address to
listen on, and the key on stdin."""

import sys

from ssd_serve.cluster.channels.listener import Listener


def main(address: str) -> int:
    """Listen at a path, or on loopback for `tcp`; print where; echo until the peer has gone."""
    key = sys.stdin.readline().strip()
    listener = Listener.tcp("127.0.0.1", 0, key) if address == "tcp" else Listener.unix(address)
    print(listener.address, flush=True)
    channel = listener.await_peer(60.0)
    while channel is not None and not channel.closed:
        channel.wait(1.0)
        for message in channel.receive():
            channel.send(message)
    listener.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
