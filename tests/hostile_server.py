"""A server that accepts connections and then does not do what a server should, at the level of bytes."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator

Attack = Callable[[socket.socket, threading.Event], None]

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_ENDLESS = _HEAD + b"Transfer-Encoding: chunked\r\n"


def dies(connection: socket.socket, over: threading.Event) -> None:
    """Hangs up without a word."""


def dies_within_the_body(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(_HEAD + b"Content-Length: 1000\r\n\r\n[")


def stalls(connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def redirects(connection: socket.socket, over: threading.Event) -> None:
    where = connection.getsockname()[1]
    answer = f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{where}/elsewhere\r\n"
    connection.sendall(answer.encode() + b"Content-Length: 0\r\n\r\n")


def talks_nonsense(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"\x00\xffSSH-2.0-OpenSSH_9.6\r\n\r\n" * 10)


def drips(connection: socket.socket, over: threading.Event) -> None:
    """A byte at a time, each before a timeout of one read."""
    connection.sendall(_HEAD + b"Content-Length: 1000000\r\n\r\n")
    while not over.wait(0.05):
        connection.sendall(b" ")


def drips_headers(connection: socket.socket, over: threading.Event) -> None:
    for byte in _HEAD + b"X-Padding: " + b"x" * 10_000:
        if over.wait(0.05):
            return
        connection.sendall(bytes([byte]))


def sends_gigabytes(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(_ENDLESS + b"\r\n")
    piece = b"100000\r\n" + b"[" * (1 << 20) + b"\r\n"
    while not over.is_set():
        connection.sendall(piece)


def sends_a_compressed_bomb(connection: socket.socket, over: threading.Event) -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
    length = f"Content-Length: {len(bomb)}\r\n\r\n".encode()
    connection.sendall(_HEAD + b"Content-Encoding: gzip\r\n" + length + bomb)


def sends_headers_for_ever(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(_HEAD)
    while not over.is_set():
        connection.sendall(b"X-Padding: " + b"x" * 1000 + b"\r\n")


def sends_lists_of_lists(connection: socket.socket, over: threading.Event) -> None:
    """Small text, large objects."""
    body = json.dumps([[]] * 20_000).encode()
    connection.sendall(_HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)


ATTACKS: tuple[Attack, ...] = (
    *(dies, dies_within_the_body, stalls, redirects, talks_nonsense, drips, drips_headers),
    *(sends_gigabytes, sends_a_compressed_bomb, sends_headers_for_ever, sends_lists_of_lists),
)


class HostileServer:
    """Does `attack` to every connection; `connections` of them so far."""

    def __init__(self, attack: Attack) -> None:
        self._attack, self._over = attack, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(1 << 16)
            self._attack(connection, self._over)

    def close(self) -> None:
        self._over.set()
        self._listener.close()


@contextlib.contextmanager
def hostile(attack: Attack) -> Iterator[HostileServer]:
    server = HostileServer(attack)
    try:
        yield server
    finally:
        server.close()
