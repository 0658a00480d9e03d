"""The page at `/`: files of this package and nothing from elsewhere, under a policy that lets nothing else in.

It asks the routes that every client has, with the key that a reader types in: the files themselves are no secret.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).with_name("web")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = ("index.html", "page.css", "page.js", "api.js", "live.js", "tokens.js", "icon.svg")
PAGE_PATHS = {"/" if name == "index.html" else f"/web/{name}": name for name in FILES}
"""Open without a key."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each file, read once."""
    return [Route(path, _serving(FOLDER / name)) for path, name in PAGE_PATHS.items()]


def _serving(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content, kind = file.read_bytes(), KINDS[file.suffix]

    async def serve(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return serve
