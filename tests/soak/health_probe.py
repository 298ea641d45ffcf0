"""Asks a server how it is, from a process of its own, until its stdin ends; then prints what it saw as JSON.

A process of its own, so that what it measures is the server and not the program that loads it.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time

INTERVAL = 0.02  # seconds from one answer to the next question
TIMEOUT = 10.0


def main() -> None:
    port = int(sys.argv[1])
    ended = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    seconds, num_failed = [], 0
    while not ended.wait(INTERVAL):
        began = time.perf_counter()
        num_failed += not is_healthy(port)
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds, "num_failed": num_failed}))


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    main()
