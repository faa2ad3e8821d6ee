"""The block map page over HTTP: one static page, and what it shows, as JSON of the control service's messages.

The page itself says nothing, so anybody who reaches the port may load it. What it shows is let out as by gRPC: to
callers whose token opens the method, over the same TLS. The page asks its user for a token where one is needed.
"""

import asyncio
import base64
import hashlib
import logging
import re
import ssl
from collections.abc import Awaitable, Callable
from importlib.resources import files

import structlog
from aiohttp import web
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from paged.addresses import is_loopback
from paged.v1 import control_pb2
from scheduler_svc import errors
from scheduler_svc.api import watching
from scheduler_svc.api.authentication import RefusedCalls
from scheduler_svc.api.caller import ANYBODY, CALLER
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.api.permissions import check_may_call
from scheduler_svc.api.tokens import Tokens

_SERVICE = "/paged.v1.ControlService"
_STUCK_S = 30.0  # a reader that takes nothing for so long is gone
_CLOSING_S = 1.0
_IDLE_CONNECTION_S = 15.0
_MAX_PART_CHARS = 4096  # of a request's line, and of each of its headers

_STATUSES: dict[type[errors.PagedError], int] = {
    errors.InvalidRequest: 400,
    errors.Unauthenticated: 401,
    errors.PermissionDenied: 403,
    errors.NotThere: 404,
    errors.TooManyWatchers: 429,
}

# Of the library, which tells of bytes that are no request with a traceback and what was sent. Faults of ours we log.
_UNHEARD = logging.Logger("block_map", logging.CRITICAL)

log = structlog.get_logger()


class BlockMapServer:
    """`start` once, then `stop` once. `tokens` None asks nobody for one; `tls` None means no encryption."""

    def __init__(
        self, engine: Engine, address: str, tokens: Callable[[], Tokens] | None, tls: ssl.SSLContext | None
    ) -> None:
        self._engine = engine
        self._address = address
        self._tokens = tokens
        self._tls = tls
        self._refused = RefusedCalls()
        self._page = files("scheduler_svc.api").joinpath("block_map.html").read_text()
        self._headers = _security_headers(self._page)
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/", self._show),
                web.get("/watch", self._watch),
                web.get("/requests/{id}", self._tables),
                web.get("/prefixes", self._prefixes),
            ]
        )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_UNHEARD,
            handle_signals=False,
            shutdown_timeout=_CLOSING_S,
            keepalive_timeout=_IDLE_CONNECTION_S,
            max_line_size=_MAX_PART_CHARS,
            max_field_size=_MAX_PART_CHARS,
        )

    async def start(self) -> str:
        """Take calls; returns the real address as HOST:PORT. Raises OSError."""
        host, _, port = self._address.rpartition(":")
        await self._runner.setup()
        site = web.TCPSite(self._runner, host.strip("[]"), int(port), ssl_context=self._tls)
        await site.start()
        address = f"{host}:{self._runner.addresses[0][1]}"
        log.info("block_map_listening", address=address, tls=self._tls is not None, tokens=self._tokens is not None)
        return address

    async def stop(self) -> None:
        """Ends all streams."""
        await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            self._check_host(request)
            return await handler(request)
        except errors.PagedError as error:
            status = next((_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES), 500)
            return web.json_response({"error": str(error)}, status=status, headers=self._headers)
        except (web.HTTPException, ConnectionError):
            raise
        except Exception:  # the boundary: logged, and nothing of it told
            log.exception("page_failed", handler=request.match_info.handler.__name__)
            return web.json_response({"error": "internal error; the log says more"}, status=500, headers=self._headers)

    def _check_host(self, request: web.Request) -> None:
        """Where everybody on this machine may look, pages of other sites must not make a browser here do so: they
        could have their own name resolve to this machine."""
        if self._tokens is None and is_loopback(self._address.rpartition(":")[0]):
            name = re.sub(r":\d*$", "", request.host)
            if not is_loopback(name):
                raise errors.PermissionDenied(f"the page is not called {name[:128]!r}; open it by a loopback address")

    def _let_in(self, request: web.Request, method: str) -> None:
        """Raises Unauthenticated, PermissionDenied."""
        caller, name = ANYBODY, ""
        if self._tokens is not None:
            try:
                scheme, _, token = request.headers.get("Authorization", "").partition(" ")
                if scheme.lower() != "bearer":
                    raise errors.Unauthenticated("a token is needed: send it as Authorization: Bearer TOKEN")
                caller = self._tokens().caller(token.strip())
                name = caller.name
                check_may_call(caller, f"{_SERVICE}/{method}")
            except errors.PagedError as error:
                self._refused.note(request.remote or "", f"{_SERVICE}/{method}", name, str(error))
                raise
        CALLER.set(caller)

    def _is_let_in(self, method: str) -> bool:
        """Whether the caller whom `_let_in` has found is still."""
        try:
            if self._tokens is not None:
                check_may_call(self._tokens().again(CALLER.get()), f"{_SERVICE}/{method}")
        except errors.PagedError:
            return False
        return True

    async def _show(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self._page, content_type="text/html", headers=self._headers)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events, a WatchResponse each."""
        self._let_in(request, "Watch")
        asked = control_pb2.WatchRequest(period_ms=_number(request, "period_ms"))
        response = web.StreamResponse(headers={**self._headers, "Content-Type": "text/event-stream"})
        messages = watching.watch(self._engine, asked)
        try:
            message = await anext(messages)  # what is wrong shows here, while there is still a status to say so
            await response.prepare(request)
            while self._is_let_in("Watch"):
                async with asyncio.timeout(_STUCK_S):
                    await response.write(b"data: " + _json(message) + b"\n\n")
                message = await anext(messages)
            return response
        except (ConnectionError, TimeoutError):
            return response  # it has gone
        finally:
            await messages.aclose()

    async def _tables(self, request: web.Request) -> web.StreamResponse:
        self._let_in(request, "GetBlockTables")
        asked = control_pb2.GetBlockTablesRequest(request_id=request.match_info["id"])
        return self._answer(watching.block_tables(self._engine, asked))

    async def _prefixes(self, request: web.Request) -> web.StreamResponse:
        self._let_in(request, "GetPrefixTree")
        executor, most = request.query.get("executor", ""), _number(request, "max_blocks")
        asked = control_pb2.GetPrefixTreeRequest(executor=executor, max_blocks=most)
        return self._answer(await watching.prefix_tree(self._engine, asked))

    def _answer(self, message: Message) -> web.Response:
        return web.Response(body=_json(message), content_type="application/json", headers=self._headers)


def _json(message: Message) -> bytes:
    return MessageToJson(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
    ).encode()


def _number(request: web.Request, name: str) -> int | None:
    """Raises InvalidRequest."""
    text = request.query.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise errors.InvalidRequest(errors.FieldViolation(name, f"is {text[:32]!r}; must be a whole number"))
    return int(text)


def _security_headers(page: str) -> dict[str, str]:
    """The page may run its own script, ask this server, and nothing else."""
    policy = [
        "default-src 'none'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        policy.append(f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
