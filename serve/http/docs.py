"""GET /docs: one page that shows /openapi.json and sends requests by hand; it loads nothing from anywhere else.

The browser is told to run this page's script and no other, and to connect to this server alone.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response


@cache
def docs_page() -> Response:
    """The page, with what the browser may do for it."""
    page = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return Response(page, headers=headers, media_type="text/html")
