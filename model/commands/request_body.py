"""The JSON object that a client sends, or the status with which it is refused."""

import asyncio
import json

BODY_SECONDS = 30  # within which a body must be there


class Refused(Exception):
    """A request that gets `status` and an error body."""

    def __init__(self, status, message, kind="invalid_request_error", headers=None):
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, headers


async def read_json(request, most_bytes):
    """The JSON object in the body of a request; raises Refused if there is none, or a too large one."""
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise Refused(415, "send JSON, with the header Content-Type: application/json")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= most_bytes:
                    parts.append(part)  # the rest is read too: most clients see an answer only once they have sent all
    except TimeoutError:
        raise Refused(408, f"the body was not there within {BODY_SECONDS} s") from None
    if size > most_bytes:
        raise Refused(413, f"the body has more than {most_bytes:,} bytes: shorten it", headers={"connection": "close"})
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body
