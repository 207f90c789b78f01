"""The operators' page: static files, which need no key because they contain no data."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent.parent / "page"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    # The page may load only files of this server, must not contain inline code, and cannot be
    # embedded in a frame of another page.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_files() -> Mapping[str, Path]:
    """Return the files of the page by their paths on the server."""
    files = {
        f"/page/{path.name}": path
        for path in sorted(FOLDER.iterdir())
        if path.suffix in MEDIA_TYPES and path.suffix != ".html"
    }
    return {"/": FOLDER / "index.html", **files}


def page_routes() -> list[Route]:
    """Return the routes of the page."""
    return [Route(name, _file(path)) for name, path in page_files().items()]


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    content, media_type = path.read_bytes(), MEDIA_TYPES[path.suffix]

    async def send(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return send
