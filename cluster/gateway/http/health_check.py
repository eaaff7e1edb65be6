"""Exits with 0 if this machine's gateway is healthy: a container's HEALTHCHECK, run with ``python -m``.

It uses HTTP, which reserves connections for anonymous probes; gRPC may have none left under a flood.
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
    """Request ``/healthz`` of ``host:port``, with TLS as clients use it; returns ``ok`` or the problem. Raises
    ``ConfigError``: a TLS file cannot be used."""
    scheme, context = "https" if credentials.tls else "http", credentials.http_context()
    try:
        with urlopen(f"{scheme}://{address}/healthz", timeout=TIMEOUT_S, context=context):
            return "ok"
    except HTTPError as error:
        return f"the gateway answers {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no gateway at {address}: {error}; SIGHTLINE_HTTP is its HOST:PORT"


def main() -> int:
    """Check the gateway at ``SIGHTLINE_HTTP``, by default port 9464 of this machine."""
    address = os.environ.get("SIGHTLINE_HTTP", "127.0.0.1:9464")
    try:
        outcome = check(address, ClientCredentials.from_environment())
    except ConfigError as error:
        outcome = str(error)
    print(outcome)
    return 0 if outcome == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
