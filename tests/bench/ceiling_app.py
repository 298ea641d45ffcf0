"""A server that costs nothing: a thread for each connection writes ready-made events as fast as they are taken.

What ``trio-tlserve load`` reports of it is the ceiling of the load generator itself.
"""

from __future__ import annotations

import json
import re
import socketserver
import sys

from tests.bench.events_app import DONE, TOKEN, event

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = json.dumps({"data": [{"id": "none"}]}).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

    def handle(self) -> None:
        while line := self.rfile.readline():
            length = 0
            while (header := self.rfile.readline().strip()) != b"":
                if match := re.fullmatch(rb"content-length: (\d+)", header.lower()):
                    length = int(match[1])
            body = self.rfile.read(length)
            if line.startswith(b"GET"):
                self.wfile.write(HEAD % b"application/json" + chunk(MODELS) + chunk(b""))
            else:
                self._stream(json.loads(body)["max_tokens"])

    def _stream(self, max_tokens: int) -> None:
        usage = {"prompt_tokens": 1, "completion_tokens": max_tokens, "total_tokens": max_tokens + 1}
        self.wfile.write(HEAD % b"text/event-stream")
        token = chunk(TOKEN)
        for _ in range(max_tokens):
            self.wfile.write(token)  # each by itself, as a server whose tokens come one by one would
        self.wfile.write(chunk(event(choices=[], usage=usage)) + chunk(DONE) + chunk(b""))


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    with Server(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        server.serve_forever()
