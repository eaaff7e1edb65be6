"""Exit code 0 when the gateway of this machine serves: for a container's HEALTHCHECK, ``python -m``.

By HTTP, which keeps connections for who asks once and briefly; gRPC has none to spare in a flood.
"""

import http.client
import os
import sys
from urllib.error import HTTPError
from urllib.request import urlopen

from cluster.errors import ConfigError
from cluster.wire.tls import ClientCredentials

TIMEOUT_S = 3.0


def check(address: str, credentials: ClientCredentials) -> str:
    """``ok``, or what is wrong with the page ``/healthz`` of ``host:port``; TLS as clients have it. Raises
    ``ConfigError``: a file of TLS cannot be used."""
    scheme, context = "https" if credentials.tls else "http", credentials.http_context()
    try:
        with urlopen(f"{scheme}://{address}/healthz", timeout=TIMEOUT_S, context=context):
            return "ok"
    except HTTPError as error:
        return f"the gateway answers {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no gateway at {address}: {error}; SIGHTLINE_HTTP is its HOST:PORT"


def main() -> int:
    """Asks ``SIGHTLINE_HTTP``, or port 9464 of this machine."""
    address = os.environ.get("SIGHTLINE_HTTP", "127.0.0.1:9464")
    try:
        told = check(address, ClientCredentials.from_environment())
    except ConfigError as error:
        told = str(error)
    print(told)
    return 0 if told == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
