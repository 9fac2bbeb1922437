"""HTTP clients of rollout engines: requests get ids and ask for log-probs on their way out, answers are read back.

Watched are `httpx.Client` and `AsyncClient` (the OpenAI SDK stands on them), `requests.Session`,
`aiohttp.ClientSession`, and `PlainClient` for a bare URL. Streams are read as they pass with httpx; elsewhere a stream
is counted as unread.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, urlsplit

from foreshock.adapters.engine_answers import EventStream, Json
from foreshock.adapters.engine_plain import Asker
from foreshock.adapters.engine_watch import EngineWatch
from foreshock.guard import Guard, guarded

REFUSALS: Final = (400, 422)
"""Statuses with which an engine refuses fields that it does not know or allow."""
_log = getLogger("foreshock")
_PASSED_ON: Final = ("authorization", "x-api-key")


@dataclass(slots=True)
class Call:
    """A request on its way: `body` as it is to be sent (None: as it was), and who reads the answer."""

    body: dict[str, Any] | None
    answered: Callable[[int, Any], None]
    """Called with the status and the decoded JSON (or None)."""
    event: Callable[[Json], None] | None = None
    """Takes the events of a stream; then `answered(status, None)` ends it."""
    engine: str = ""


class Routes(Protocol):
    """What an engine's adapter knows of its routes."""

    def call(self, engine: str, path: str, query: Mapping[str, str], body: dict[str, Any]) -> Call | None:
        """The call that this request is, or None where it is nothing to watch. Does not change `body`."""

    def ask(self, get: Callable[[str], Any], post: Callable[[str, Json], Any], digests: bool) -> Any:
        """(digests, label) of the engine that `get` and `post` speak to."""


class HttpWatch:
    """Watches one client object. `routes` reads what passes."""

    def __init__(self, watch: EngineWatch, routes: Routes) -> None:
        self.watch = watch
        self.guard: Guard = watch.guard
        self.routes = routes
        self._plain: set[str] = set()
        """URLs whose requests go as the host made them, since the engine refused what was added."""
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()

    def install(self, client: Any) -> None:
        """Puts the watch on a client's instance. Raises TypeError for one of no known kind."""
        inner = getattr(client, "_client", None)
        client = inner if callable(getattr(inner, "send", None)) else client
        if callable(getattr(client, "send", None)) and callable(getattr(client, "build_request", None)):
            asynchronous = callable(getattr(client, "aclose", None))
            self.watch.replace(client, "send", self._around_async_send if asynchronous else self._around_send)
        elif callable(getattr(client, "_request", None)) and hasattr(client, "ws_connect"):
            self.watch.replace(client, "_request", self._around_aiohttp)
        elif callable(getattr(client, "request", None)):
            self.watch.replace(client, "request", self._around_request)
        else:
            raise TypeError(f"neither an engine nor an HTTP client that is known here: {type(client).__name__}")

    def wait(self, timeout_s: float = 30.0) -> bool:
        """Waits until what was pending has been told; False at the time's end."""
        return self._idle.wait(timeout_s)

    # --- the clients ---------------------------------------------------------------------------------------------

    def _around_send(self, original: Any, request: Any, **kwargs: Any) -> Any:
        call, sent = self._httpx_call(request) or (None, request)
        try:
            response = original(sent, **kwargs)
        except BaseException as error:  # a cancelled request has no answer either
            self._lost(call, error)
            raise
        if call is not None and self._refused(call, response.status_code):
            response.close()
            response = original(request, **kwargs)
            self._sent_plain(str(request.url), response.status_code)
        elif call is not None:
            self._httpx_answer(call, response)
        return response

    async def _around_async_send(self, original: Any, request: Any, **kwargs: Any) -> Any:
        call, sent = self._httpx_call(request) or (None, request)
        try:
            response = await original(sent, **kwargs)
        except BaseException as error:  # a cancelled request has no answer either
            self._lost(call, error)
            raise
        if call is not None and self._refused(call, response.status_code):
            await response.aclose()
            response = await original(request, **kwargs)
            self._sent_plain(str(request.url), response.status_code)
        elif call is not None:
            self._httpx_answer(call, response)
        return response

    def _around_request(self, original: Any, method: str, url: Any, *args: Any, **kwargs: Any) -> Any:
        call, sent = self._keyword_call(method, str(url), kwargs) or (None, kwargs)
        try:
            response = original(method, url, *args, **sent)
        except BaseException as error:  # a cancelled request has no answer either
            self._lost(call, error)
            raise
        if call is not None and self._refused(call, _status(response)):
            response = original(method, url, *args, **kwargs)
            self._sent_plain(str(url), _status(response))
        elif call is not None:
            self._answer(call, response, bool(kwargs.get("stream")))
        return response

    async def _around_aiohttp(self, original: Any, method: str, url: Any, **kwargs: Any) -> Any:
        build = getattr(getattr(original, "__self__", None), "_build_url", str)
        whole = build(url)
        call, sent = self._keyword_call(method, str(whole), kwargs) or (None, kwargs)
        try:
            response = await original(method, url, **sent)
        except BaseException as error:  # a cancelled request has no answer either
            self._lost(call, error)
            raise
        if call is not None and self._refused(call, response.status):
            response.release()
            response = await original(method, url, **kwargs)
            self._sent_plain(str(whole), response.status)
        elif call is not None:
            stream = "json" not in str(response.headers.get("Content-Type", ""))
            if not stream:
                await response.read()  # kept by the response: the host reads the same bytes again
            self._answer(call, response, stream)
        return response

    def _refused(self, call: Call, status: int) -> bool:
        """Whether the engine may have refused what was added: the request then goes again as the host made it."""
        return call.body is not None and status in REFUSALS

    @guarded()
    def _lost(self, call: Call | None, error: BaseException) -> None:
        """No answer came: a push without one was not taken, as far as anybody knows."""
        if call is not None:
            call.answered(0, {"message": repr(error)})
            if isinstance(error, Exception):
                self.watch.weights[call.engine].lost()

    @guarded()
    def _sent_plain(self, url: str, status: int) -> None:
        """The host's own request was answered; where it was taken, that URL is amended no more."""
        self.watch.unread()
        if status == 200 and url not in self._plain and len(self._plain) < 100:
            self._plain.add(url)
            _log.warning("foreshock: %s takes no request for log-probs and ids: it is not read any more", url)

    # --- on the way out ------------------------------------------------------------------------------------------

    def _call(self, method: str, url: str, body: Any, headers: Any) -> Call | None:
        if method.upper() not in ("POST", "GET") or not (body is None or isinstance(body, Mapping)):
            return None
        split = urlsplit(url)
        origin = f"{split.scheme}://{split.netloc}"
        if origin not in self.watch.weights:
            passed = {k: v for k, v in dict(headers or {}).items() if str(k).lower() in _PASSED_ON}
            ask = Asker(origin, passed, self.routes.ask)
            self.watch.engine(origin, ask, self._later)
        query = dict(parse_qsl(split.query))
        call = self.routes.call(origin, split.path.rstrip("/"), query, dict(body or {}))
        if call is not None:
            call.engine = origin
        if call is not None and call.body is not None and url in self._plain:
            self.watch.unread()
            return None
        return call

    @guarded()
    def _httpx_call(self, request: Any) -> tuple[Call | None, Any]:
        raw = request.content if hasattr(request, "_content") else None
        call = self._call(request.method, str(request.url), _decoded(raw) if raw else None, request.headers)
        if call is None or call.body is None:
            return call, request
        headers = [(k, v) for k, v in request.headers.raw if k.lower() not in (b"content-length", b"transfer-encoding")]
        amended = type(request)(
            request.method, request.url, headers=headers, content=json.dumps(call.body).encode(),
            extensions=request.extensions,
        )  # fmt: skip
        return call, amended

    @guarded()
    def _keyword_call(self, method: str, url: str, kwargs: dict[str, Any]) -> tuple[Call | None, dict[str, Any]]:
        """Of clients that take `json=`, or JSON as `data=`."""
        place = "json" if kwargs.get("json") is not None else "data"
        body = kwargs.get(place)
        if isinstance(body, str | bytes):
            body = _decoded(body)
        params = kwargs.get("params")
        if isinstance(params, Mapping):
            url += ("&" if "?" in url else "?") + "&".join(f"{k}={v}" for k, v in params.items())
        call = self._call(method, url, body, kwargs.get("headers"))
        if call is None or call.body is None:
            return call, kwargs
        given = kwargs.get(place)
        return call, kwargs | {place: json.dumps(call.body) if isinstance(given, str | bytes) else call.body}

    # --- on the way back -----------------------------------------------------------------------------------------

    @guarded()
    def _httpx_answer(self, call: Call, response: Any) -> None:
        if response.is_stream_consumed:
            self._whole(call, response.status_code, response.content)
        elif call.event is not None and not response.headers.get("Content-Encoding"):
            response.stream = _tee(response.stream, self, call, response.status_code)
        else:
            self.watch.unread()

    @guarded()
    def _answer(self, call: Call, response: Any, stream: bool) -> None:
        status = _status(response)
        if stream:
            self.watch.unread()
            return
        body = getattr(response, "_body", None) or getattr(response, "content", None) or getattr(response, "data", None)
        self._whole(call, status, body)

    def _whole(self, call: Call, status: int, body: Any) -> None:
        """An answer that was read in one piece, though it may be a stream's."""
        answer = _decoded(body)
        if answer is None and call.event is not None and body:
            EventStream(call.event).feed(body)
        call.answered(status, answer)

    @guarded()
    def take(self, stream: EventStream, piece: bytes) -> None:
        """A piece of a stream has passed."""
        stream.feed(piece)

    @guarded()
    def end(self, call: Call, status: int) -> None:
        """A stream has ended, or was left."""
        call.answered(status, None)

    # --- what asks the engine ------------------------------------------------------------------------------------

    def _later(self, work: Callable[[], Any]) -> None:
        """On a thread, in order: asking waits for the network, and generating must not."""
        self._idle.clear()
        self._work.put(work)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._loop, name="foreshock-engine", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except Exception as error:
                self.guard.caught_in_thread("engine", error)
            if self._work.empty():
                self._idle.set()


class _Tee:
    """A stream of bytes that is read as it passes."""

    def __init__(self, inner: Any, watch: HttpWatch, call: Call, status: int) -> None:
        self._inner, self._watch, self._call, self._status = inner, watch, call, status
        assert call.event is not None
        self._events = EventStream(call.event)
        self._ended = False

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._watch.end(self._call, self._status)

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._inner:
            self._watch.take(self._events, piece)
            yield piece
        self._end()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            self._watch.take(self._events, piece)
            yield piece
        self._end()

    def close(self) -> None:
        self._inner.close()
        self._end()

    async def aclose(self) -> None:
        await self._inner.aclose()
        self._end()


def _tee(inner: Any, watch: HttpWatch, call: Call, status: int) -> Any:
    """httpx asks for its own base classes, so they are mixed in where httpx is."""
    import httpx

    base = httpx.AsyncByteStream if isinstance(inner, httpx.AsyncByteStream) else httpx.SyncByteStream
    return type("Tee", (_Tee, base), {})(inner, watch, call, status)


def _status(response: Any) -> int:
    return int(getattr(response, "status_code", None) or response.status)


def _decoded(body: Any) -> Any:
    try:
        return json.loads(body) if body else None
    except (TypeError, ValueError):
        return None
