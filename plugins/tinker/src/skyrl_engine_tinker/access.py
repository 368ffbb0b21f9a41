"""Who may call a server without a key: only programs on this machine, unless the operator says otherwise.

A web page that this machine's browser shows is no such program: it could post to the loopback address, or reach it under a name of its own
(DNS rebinding). Browsers name the page in `Origin`, and the name that was asked for in `Host`.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


def is_loopback(host: str) -> bool:
    """Return True for an address, or a name all of whose addresses are, that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    if not host:
        return False
    try:
        addresses = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return False
    return bool(addresses) and all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in addresses)


def is_named_loopback(authority: str) -> bool:
    """Return True for a `Host` that names the loopback address by itself: `localhost` or an address, with any port. No name is looked up."""
    try:
        parts = urlsplit(f"//{authority}")
        host, _port = parts.hostname or "", parts.port
    except ValueError:
        return False
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return False
    if host in ("localhost", "localhost."):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LocalCallers:
    """Middleware that refuses every request under another host's name, and every request of a web page of another origin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = _describe_problem(scope) if scope["type"] in ("http", "websocket") else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        message = f"{problem}: without a key this server answers programs of its own machine; start it with --api-key-file"
        await JSONResponse({"detail": message}, status_code=403)(scope, receive, send)


def _describe_problem(scope: Scope) -> str | None:
    headers: dict[str, list[str]] = {"host": [], "origin": []}
    for name, value in scope["headers"]:
        if (header := name.decode("latin-1").lower()) in headers:
            headers[header].append(value.decode("latin-1"))
    if len(headers["host"]) != 1 or not is_named_loopback(headers["host"][0]):
        return "the request's Host is not this machine's loopback address"
    own = {f"{scheme}://{headers['host'][0]}" for scheme in ("http", "https")}
    if any(origin not in own for origin in headers["origin"]):
        return "the request's Origin is a web page from elsewhere"
    return None
