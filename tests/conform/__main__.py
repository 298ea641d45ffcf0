"""``make conform``: a server of its own on loopback, and every case against it.

The first argument is the model; the others are those of ``trio-tlserve conform``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tlserve import ServeConfig, spawn
from tlserve.cli import conform

KEY = "sk-conform"  # with keys, so that no case is skipped for want of them
HEADER_TIMEOUT_MS = 2000  # the case that waits for it need not wait for long


def main(model: str, *arguments: str) -> int:
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text(f"{KEY}\n")
        config = ServeConfig.for_model(
            model,
            api_keys_file=keys,
            header_timeout_ms=HEADER_TIMEOUT_MS,
            http_listen="127.0.0.1:0",
            health_listen="127.0.0.1:0",
        )
        with spawn(config) as server:
            host, port = server.health_addr
            urls = ["--base-url", server.base_url, "--health-url", f"http://{host}:{port}"]
            return conform.main([*urls, "--api-key", KEY, *arguments])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
