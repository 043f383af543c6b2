"""Keeps the engine's endpoints, the control endpoints among them, to those who know the key.

Runs inside of vLLM's server, whose own key does not cover the control endpoints.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY_VARIABLE = "MEGATRON_CREDIT_SERVER_KEY"
OPEN_PATHS = ("/health",)
"""What a load balancer or a start-up check may ask without the key."""


class RequireKey:
    """ASGI middleware: 401 for requests without `Authorization: Bearer KEY`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable, send: Callable) -> None:
        """Passes authorised requests on."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN_PATHS:
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self._expected):
                await refuse(send)
                return
        await self._app(scope, receive, send)


async def refuse(send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """Answers 401."""
    await send({"type": "http.response.start", "status": 401, "headers": []})
    await send({"type": "http.response.body", "body": b"unauthorized"})
