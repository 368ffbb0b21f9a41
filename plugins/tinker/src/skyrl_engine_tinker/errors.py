"""Refusals that travel to the client: a mistake of its own is answered in words, and never ends the server."""


class RequestError(Exception):
    """A request that cannot be done as it stands; the SDK raises it as RequestFailedError of the category `user`."""
