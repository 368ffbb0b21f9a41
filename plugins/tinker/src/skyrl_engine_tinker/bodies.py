"""Bodies of requests: read, decompressed and parsed, within the limit of `serve.body_bytes`."""

import asyncio
import json
from typing import Any

import zstandard
from fastapi import HTTPException, Request

from skyrl_engine_tinker.errors import RequestError


async def read_body(request: Request, limit: int) -> bytes:
    """Read and decompress a body, never more than `limit` bytes of either."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise HTTPException(413, f"the request is larger than {limit:,} bytes (serve.body_bytes)")
        parts.append(part)
    body = b"".join(parts)
    if request.headers.get("content-encoding") != "zstd":
        return body
    try:
        body = await asyncio.to_thread(decompress, body, limit + 1)
    except zstandard.ZstdError as error:
        raise HTTPException(422, f"the body is no zstd: {error}") from error
    if len(body) > limit:
        raise HTTPException(413, f"the request is larger than {limit:,} bytes when it is decompressed (serve.body_bytes)")
    return body


def decompress(body: bytes, most: int) -> bytes:
    """Decompress zstd, `most` bytes at most."""
    with zstandard.ZstdDecompressor().stream_reader(body) as reader:
        return bytes(reader.read(most))


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object; an empty body is an empty one. Raises RequestError, also for JSON that is nested too deeply or has a huge number."""
    try:
        value = json.loads(body or b"{}")
    except RecursionError as error:
        raise RequestError("the body is JSON that is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body is no JSON object")
    return value
