"""Errors of ``edgevlm serve``, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.serve.guard import error_body
from edgevlm.errors import FieldError, UserError, reason

CODES = {404: "not_found", 408: "timeout", 413: "too_large", 429: "rate_limit_exceeded"}  # of errors that no route raised


class ApiError(HTTPException):
    """An error in OpenAI's shape."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None, soon: int = 1) -> None:
        super().__init__(status, message, {"Retry-After": str(soon)} if status in (429, 503) else None)
        self.code, self.param = code, param


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorFields


STATUSES = {
    400: "A field is wrong; the error names it.",
    401: "The key is missing or wrong.",
    403: "A page of another site asks.",
    404: "It is not there.",
    405: "The path has no such method; `Allow` lists those it has.",
    408: "The body does not come.",
    413: "The body is too large.",
    421: "The name of the host is another one's.",
    429: "There are too many requests; ask again after `Retry-After` seconds.",
    431: "The headers are too large.",
    500: "The server has a fault.",
    503: "It is not ready, has too many connections, or a question waited too long; ask again after `Retry-After` seconds.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    f"{hundreds}XX": {
        "model": ErrorReply,
        "description": " ".join(f"{status}: {what}" for status, what in STATUSES.items() if status // 100 == hundreds),
    }
    for hundreds in (4, 5)
}


def add_errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape; wrong fields are 400 and named."""

    def answer(status: int, message: str, code: str | None, param: str | None = None, headers: Any = None) -> JSONResponse:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return JSONResponse(error_body(message, code, param, kind), status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = max(error.errors(), key=lambda each: len(each["loc"]))  # of several shapes the one that was meant
        if isinstance(cause := found.get("ctx", {}).get("error"), FieldError):
            return answer(400, str(cause), "invalid_value", cause.field)
        where, *path = found["loc"]
        shapes = ("text", "constrained-str")
        named = [*path[:1], *(part for part in path[1:] if part not in shapes and "[" not in str(part))]
        param = ".".join(map(str, named)) or str(where)
        if param == "body" and "json" not in request.headers.get("content-type", ""):
            return answer(400, "body: send JSON, with content-type: application/json", "invalid_json", "body")
        if found["type"] == "json_invalid":
            return answer(400, "body: it is not JSON", "invalid_json", "body")
        what = "there is no such field" if found["type"] == "extra_forbidden" else reason(found["msg"])
        return answer(400, f"{param}: {what}"[:500], "invalid_value", param[:200] or None)

    @app.exception_handler(FieldError)
    async def field(request: Request, error: FieldError) -> JSONResponse:
        return answer(400, str(error), "invalid_value", error.field)

    @app.exception_handler(UserError)
    async def user(request: Request, error: UserError) -> JSONResponse:
        return answer(400, mask_credentials(str(error)), "invalid_value")

    @app.exception_handler(StarletteHTTPException)
    async def http(request: Request, error: StarletteHTTPException) -> JSONResponse:
        if isinstance(error, ApiError):
            return answer(error.status_code, str(error.detail), error.code, error.param, error.headers)
        if error.status_code == 400:  # numbers and nesting that Python's JSON does not read
            return answer(400, "body: it cannot be read as JSON", "invalid_json", "body")
        headers = {"Allow": ", ".join(methods(app, request.scope))} if error.status_code == 405 else error.headers
        return answer(error.status_code, str(error.detail), CODES.get(error.status_code), None, headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return answer(500, f"unexpected {type(error).__name__}", "internal_error")


def methods(app: FastAPI, scope: Any) -> list[str]:
    """All methods of a path; the router itself tells those of its first route alone."""
    there = (route for route in app.routes if route.matches(scope)[0] is not Match.NONE)
    return sorted({method for route in there for method in getattr(route, "methods", ())})
