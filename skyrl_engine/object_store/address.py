"""Addresses of object stores, such as `s3://bucket/runs/x`: what is one, and that none holds a secret."""

import re
from typing import Final

from skyrl_engine.errors import StoreError

_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_PASSWORD: Final = re.compile(r"(://)[^/?#\s@]*:[^/?#\s]*@")
_KEY: Final = re.compile(
    r"([?&][^=&\s]*(?:token|secret|password|passwd|key|signature|sig|credential|auth)[^=&\s]*=)[^&\s#'\"]+", re.IGNORECASE
)


def is_address(text: str) -> bool:
    """Return True for a text that begins with a protocol, such as `s3://`."""
    return _ADDRESS.match(text) is not None


def hide_secrets(text: str) -> str:
    """Return a text without the passwords and keys that its addresses hold."""
    return _KEY.sub(r"\g<1>(hidden)", _PASSWORD.sub(r"\g<1>(hidden)@", text))


def refuse_secrets(address: str) -> None:
    """Raise StoreError for an address that holds a password or a key: configurations, manifests and logs repeat addresses."""
    if (shown := hide_secrets(address)) != address:
        raise StoreError(f"the address {shown} holds a secret, which a run would write into its files", remedy=PLACE_OF_SECRETS)


PLACE_OF_SECRETS: Final = (
    "Leave it out, and give it where the store's client looks for it, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
