"""The two things in which scripts over the SDK depend on its version, besides the key of the tests' servers."""

import http.client
import urllib.request
from typing import Any

KEY = "tml-test"


def settle(client: Any) -> Any:
    """Newer SDKs return a future of a client, older ones the client."""
    return client.result() if hasattr(client, "result") else client


def finish(address: str, client: Any) -> None:
    """End a client's session, as `close` of newer SDKs does."""
    session = client.holder._session_id
    request = urllib.request.Request(f"{address}/api/v1/sessions/{session}/finish", b"{}", {"X-API-Key": KEY}, method="POST")
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except http.client.RemoteDisconnected:
        # a network that lost the answer: asked again, as the SDK does
        urllib.request.urlopen(request, timeout=60).close()
