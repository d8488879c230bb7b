"""Errors of ``edgevlm serve``, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from edgevlm.apps.credentials import mask_credentials
from edgevlm.errors import FieldError, UserError, reason

CODES = {404: "not_found", 408: "timeout", 413: "too_large", 429: "rate_limit_exceeded"}  # of errors that no route raised


class ApiError(HTTPException):
    """An error in OpenAI's shape. soon: seconds after which to ask again, of 429 and 503."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None, soon: int = 1) -> None:
        again = {"Retry-After": str(soon)} if status in (429, 503) else None
        super().__init__(status, message, {"WWW-Authenticate": "Bearer"} if status == 401 else again)
        self.code, self.param = code, param


def error_body(message: str, code: str | None, param: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    """OpenAI's shape of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def answer(status: int, message: str, code: str | None, param: str | None = None, headers: Any = None) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse(error_body(message, code, param, kind), status, headers)


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer that an error is. headers: beside its own."""
    return answer(error.status_code, str(error.detail), error.code, error.param, {**(error.headers or {}), **(headers or {})})


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
    405: "The path has no such method.",
    408: "The body does not come.",
    413: "The body is too large.",
    421: "The Host header does not match this server.",
    429: "There are too many requests; ask again after `Retry-After` seconds.",
    500: "The server has a fault.",
    503: "It is not ready, or has too many connections; ask again after `Retry-After` seconds.",
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

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = max(error.errors(), key=lambda each: len(each["loc"]))  # of several shapes the one that was meant
        if isinstance(cause := found.get("ctx", {}).get("error"), FieldError):
            return answer(400, str(cause), "invalid_value", cause.field)
        where, *path = found["loc"]
        shapes = ("text", "constrained-str")
        named = [*path[:1], *(part for part in path[1:] if part not in shapes and "[" not in str(part))]
        if found["type"] == "json_invalid" or (not named and where == "body"):
            return answer(400, f"body: send JSON, with content-type: application/json ({found['msg']})", "invalid_json", "body")
        param = ".".join(map(str, named))[:200]
        what = "there is no such field" if found["type"] == "extra_forbidden" else reason(found["msg"])
        return answer(400, f"{param}: {what}"[:500], "invalid_value", param)

    @app.exception_handler(UserError)
    async def user(request: Request, error: UserError) -> JSONResponse:
        return answer(400, mask_credentials(str(error)), "invalid_value", getattr(error, "field", None))

    @app.exception_handler(StarletteHTTPException)
    async def http(request: Request, error: StarletteHTTPException) -> JSONResponse:
        if isinstance(error, ApiError):
            return error_response(error)
        if error.status_code == 400:  # numbers and nesting that Python's JSON does not read
            return answer(400, "body: it cannot be read as JSON", "invalid_json", "body")
        return answer(error.status_code, str(error.detail), CODES.get(error.status_code), None, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return answer(500, f"unexpected {type(error).__name__}", "internal_error")
