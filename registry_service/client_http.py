"""One HTTP connection to the service: tokens, paging, and answers turned into errors."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote, urljoin, urlsplit

import httpx

from registry_service.domain import errors
from registry_service.domain.errors import (
    ConflictError,
    ForbiddenError,
    MalformedError,
    NotFoundError,
    RefusedError,
    RegistryError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)
from registry_service.domain.findings import Code, Finding, Severity
from registry_service.domain.text import shown

_ERROR_BYTES: Final = 1024 * 1024
_BY_STATUS: Final[Mapping[int, type[RegistryError]]] = {
    401: UnauthenticatedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    412: ConflictError,
    413: TooLargeError,
    416: ConflictError,
    422: RefusedError,
}


class HttpSession:
    """Requests to one service with one token. Safe to use from several threads."""

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        timeout: float,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise MalformedError(f"url: expected http(s)://host[:port], got {shown(url)}")
        self.url = url.rstrip("/")
        self.timeout = timeout
        headers = {"Accept": "application/json, application/problem+json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(
            headers=headers,
            timeout=timeout,
            transport=transport,
            # A proxy of the environment must never stand between us and this machine.
            trust_env=not _is_loopback(parts.hostname),
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def json(self, method: str, path: str, **options: Any) -> Any:
        """The parsed JSON of an answer, or None for an empty one.

        Raises:
            RegistryError: the class that stands for the answer's code.
        """
        response = self.request(method, path, **options)
        if response.status_code == 204 or not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise UnavailableError(
                f"{self.url} did not answer with JSON; is this the address of the registry?"
            ) from error

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One answer, whole.

        Raises:
            RegistryError: the class that stands for the answer's code.
        """
        with self.stream(method, path, **options) as response:
            response.read()
            return response

    @contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        """An answer whose body is still to be read.

        Raises:
            RegistryError: the class that stands for the answer's code.
        """
        try:
            with self._client.stream(method, self.address(path), **options) as response:
                # A condition that the caller set does not hold: an answer, not an error.
                if not response.is_success and response.status_code != 304:
                    raise error_of(response, _error_body(response))
                yield response
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise MalformedError(f"url: {error}") from error
        except httpx.HTTPError as error:
            raise UnavailableError(
                f"no answer from {self.url} ({_reason(error)}); is the service running?"
            ) from error

    def pages(self, path: str, params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """All items of a list, page after page."""
        query = {key: value for key, value in params.items() if value is not None}
        while True:
            page = self.json("GET", path, params=query)
            yield from page["items"]
            if page.get("nextCursor") is None:
                return
            query = {**query, "cursor": page["nextCursor"]}

    def address(self, path: str) -> str:
        """``path`` at this service.

        Raises:
            RefusedError: a Location that leads to another host, which must not get the token.
            UnavailableError: a Location that is no address.
        """
        try:
            address = str(httpx.URL(urljoin(self.url + "/", path)))
        except (ValueError, httpx.InvalidURL) as error:
            raise UnavailableError(f"{self.url} sent us to no address: {error}") from error
        if urlsplit(address)[:2] != urlsplit(self.url)[:2]:
            raise RefusedError(f"{self.url} sent us to another host, which is refused")
        return address


def path_of(*segments: str) -> str:
    """A path of percent-encoded segments; ``:`` and ``@`` stand as they are."""
    return "/" + "/".join(quote(segment, safe=":@+") for segment in segments)


def error_of(response: httpx.Response, body: Any) -> RegistryError:
    """The error that an answer stands for: by its code, else by its status."""
    code, message = _code_and_message(response, body)
    kind = _kinds().get(code or "") or _kind_by_status(response.status_code)
    retry_after = response.headers.get("retry-after", "")
    if issubclass(kind, UnavailableError):
        return kind(message, retry_after=int(retry_after) if retry_after.isdigit() else 5)
    findings = body.get("findings", []) if isinstance(body, dict) else []
    return kind(message, findings=tuple(findings_parse(findings)))


def findings_parse(items: Any) -> Iterator[Finding]:
    """Findings of a report or problem; an item in another form is left out."""
    for item in items if isinstance(items, list) else []:
        try:
            yield Finding(
                int(item["check"]),
                Code(item["code"]),
                str(item["where"]),
                str(item["expected"]),
                str(item["got"]),
                Severity(item["severity"]),
            )
        except (KeyError, TypeError, ValueError):
            continue


def _code_and_message(response: httpx.Response, body: Any) -> tuple[str | None, str]:
    fallback = f"the service answered {response.status_code} {response.reason_phrase}"
    if not isinstance(body, dict):
        return None, fallback
    if isinstance(body.get("errors"), list) and body["errors"]:
        first = body["errors"][0]
        detail = first.get("detail") if isinstance(first, dict) else None
        code = detail.get("code") if isinstance(detail, dict) else None
        return code, str(first.get("message") or fallback) if isinstance(first, dict) else fallback
    return body.get("code"), str(body.get("detail") or fallback)


def _kinds() -> dict[str, type[RegistryError]]:
    found: dict[str, type[RegistryError]] = {}
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, RegistryError):
            found[value.code] = value
    return found


def _kind_by_status(status: int) -> type[RegistryError]:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status == 500:
        return RegistryError
    return UnavailableError if status > 500 or status == 429 else MalformedError


def _error_body(response: httpx.Response) -> Any:
    content = b""
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) > _ERROR_BYTES:
            return None
    try:
        return httpx.Response(200, content=content).json()
    except ValueError:
        return None


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
