"""Report the errors of ``edgevlm serve`` in OpenAI's format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from edgevlm.apps.credentials import mask_credentials
from edgevlm.errors import NoThreads, UserError, reason

CODES = {404: "not_found", 408: "timeout", 413: "too_large", 429: "rate_limit_exceeded"}  # codes of errors that no route raises
STATUSES = {
    400: "A field is invalid; the error names it.",
    401: "The key is missing or wrong.",
    403: "The request comes from another site's page.",
    404: "The resource does not exist.",
    405: "The path does not support this method.",
    408: "The request's body did not arrive in time.",
    409: "The stream was changed, forgotten or removed before it answered; ask again.",
    413: "The body is too large.",
    421: "The Host header does not match this server.",
    429: "Too many requests; retry after `Retry-After` seconds.",
    500: "The server failed.",
    503: "The server is not ready, or has too many connections; retry after `Retry-After` seconds.",
}


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """An error in OpenAI's format."""

    error: ErrorFields


ERRORS: dict[int | str, dict[str, Any]] = {
    f"{hundreds}XX": {
        "model": ErrorReply,
        "description": " ".join(f"{status}: {what}" for status, what in STATUSES.items() if status // 100 == hundreds),
    }
    for hundreds in (4, 5)
}


class ApiError(HTTPException):
    """An HTTP error in OpenAI's format. ``soon``: after how many seconds clients should retry, with status 429 or 503."""

    def __init__(
        self, status: int, message: str, code: str | None, param: str | None = None, soon: int = 1, headers: Any = None
    ) -> None:
        own = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(soon)}, 503: {"Retry-After": str(soon)}}
        super().__init__(status, message, {**own.get(status, {}), **(headers or {})})
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def respond(error: Exception) -> JSONResponse:
    if not isinstance(error, ApiError):
        error = _as_api_error(error)
    return JSONResponse(error.body, error.status_code, error.headers)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, UserError):
        return ApiError(400, mask_credentials(str(error)), "invalid_value", getattr(error, "field", None))
    if NoThreads.is_in(error):
        return ApiError(503, str(NoThreads()), CODES.get(503))
    if not isinstance(error, StarletteHTTPException):
        return ApiError(500, f"unexpected {type(error).__name__}", "internal_error")
    if error.status_code == 400:  # Python's JSON parser rejects numbers that are too long and nesting that is too deep
        return ApiError(400, "body: not valid JSON", "invalid_json", "body")
    return ApiError(error.status_code, str(error.detail), CODES.get(error.status_code), headers=error.headers)


def _invalid(error: RequestValidationError) -> ApiError:
    """Return an error that names the invalid field and the rule that it breaks."""
    errors = error.errors()
    found = max(errors, key=lambda each: (not each["type"].endswith("_type"), len(each["loc"])))
    where, *_ = found["loc"]
    param = _field(found["loc"])
    if found["type"] == "json_invalid" or (not param and where == "body"):
        message = f"body: send JSON, with content-type: application/json ({found['msg']})"
        return ApiError(400, message, "invalid_json", "body")
    what = "unknown field" if found["type"] == "extra_forbidden" else reason(found["msg"])
    if found["type"].endswith("_type"):  # the value has none of the allowed types
        shapes = dict.fromkeys(each["msg"].partition("valid ")[2] for each in errors if _field(each["loc"]) == param)
        what = f"must be a {' or a '.join(filter(None, shapes))}" if all(shapes) else what
    return ApiError(400, f"{param}: {what}"[:500], "invalid_value", param)


def _field(place: Sequence[Any]) -> str:
    """Return an invalid field's path, without the names that pydantic adds for the types of a union."""
    first, *rest = [*map(str, place[1:])] or [""]
    return ".".join([first, *(part for part in rest if not re.search(r"^[A-Z]|\[|constrained-", part))])[:200]


def add_errors(app: FastAPI) -> None:

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return respond(error)

    async def without_threads(request: Request, error: Exception) -> JSONResponse:
        if not NoThreads.is_in(error):
            raise error
        return respond(error)

    for kind in (RequestValidationError, UserError, StarletteHTTPException, Exception):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(RuntimeError, without_threads)
