"""Failures of a server."""


class ServerFault(Exception):  # noqa: N818 no error of the run: another server, or this one started again, serves
    """A server failed, or said what no vLLM server says; `cause` is part of a sentence that names the server."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(cause)


class LostMeanwhile(ServerFault):
    """A server was lost while a request was there, for a reason that need not be this request's."""


class Refusal(ServerFault):
    """A server understood a request and refused it: it is no use to send it again."""
