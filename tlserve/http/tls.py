"""TLS of a listener: certificate and key from PEM files."""

from __future__ import annotations

import ssl
from pathlib import Path

from tlserve.errors import ConfigError
from tlserve.regular_file import read_regular_file

MAX_FILE_BYTES = 1 << 20  # a chain of some hundred certificates


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 and up with this chain and key. Raises ConfigError naming the key of the configuration at fault."""
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        read_regular_file(path, f"{name} = {str(path)!r}", limit=MAX_FILE_BYTES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        detail = f" ({error.reason})" if error.reason else ""
        raise ConfigError(
            f"tls_cert = {str(cert)!r}, tls_key = {str(key)!r}: "
            f"must be a PEM certificate and its unencrypted PEM key{detail}"
        ) from None
    return context


def _no_password() -> str:
    """Without an answer here, an encrypted key would have OpenSSL ask for one on the terminal."""
    return ""
