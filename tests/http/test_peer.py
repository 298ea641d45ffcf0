"""Writing to a real socket: at once where it has room, in its own time where not, and to nobody."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import trio

from tlserve.http.access import Outcome
from tlserve.http.peer import Peer, PeerLeft


def connected() -> tuple[Peer, socket.socket]:
    """A peer on one end of a pair of sockets, and the other end, which blocks."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    return Peer(stream, write_timeout=60, max_ahead_bytes=4096), theirs


async def test_what_a_socket_has_room_for_goes_out_without_a_visit_to_the_event_loop() -> None:
    peer, theirs = connected()
    with theirs, trio.CancelScope() as scope:
        scope.cancel()  # which any wait would notice
        await peer.send(b"data: {}\n\n")
        assert theirs.recv(100) == b"data: {}\n\n"
    assert not scope.cancelled_caught
    await peer.aclose(linger=False)


async def test_what_it_has_no_room_for_follows_as_the_peer_reads() -> None:
    peer, theirs = connected()
    data = bytes(range(256)) * 4096
    received = bytearray()

    def read() -> None:
        while len(received) < len(data):
            received.extend(theirs.recv(65536))

    with theirs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, read)
            await peer.send(data)
    assert received == data
    await peer.aclose(linger=False)


async def test_a_peer_that_is_gone_has_left() -> None:
    peer, theirs = connected()
    theirs.close()
    with pytest.raises(PeerLeft):
        await peer.send(b"data: {}\n\n")
    assert peer.departure is Outcome.CLIENT_LEFT
    await peer.aclose(linger=False)


def test_a_peer_that_is_gone_does_not_end_a_program_that_leaves_sigpipe_at_its_default() -> None:
    program = (
        "import signal, trio\n"
        "from tests.http.test_peer import test_a_peer_that_is_gone_has_left\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "trio.run(test_a_peer_that_is_gone_has_left)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
