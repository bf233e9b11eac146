"""Answers that are a part of some content, as the `Range` header asks (RFC 9110, section 14)."""

import re

from tests.servers.loopback import HttpError, Request, Response


def content_response(request: Request, content: bytes, headers: dict[str, str]) -> Response:
    """Answer with all of the content, or the bytes asked for.

    Raises:
        HttpError: they begin past the end.
    """
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
    if not match:
        return Response(200, content, headers)
    start, stop = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
    if start >= len(content):
        raise HttpError(416, "InvalidRange", "The range is past the end.", {"Content-Range": f"bytes */{len(content)}"})
    content_range = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
    return Response(206, content[start:stop], headers | content_range)
