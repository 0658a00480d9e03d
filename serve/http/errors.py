"""The one error of the HTTP side: a status, a fixed sentence, and OpenAI's error body.

Messages are written here and in the validators, never taken from an unexpected exception: exception text can hold
paths, addresses or prompts. Status codes: 400 bad request, 401 key, 404 model or path, 405 method, 408 too slow, 413
body too large, 415 encoding, 429 overload (with Retry-After), 500 a defect of ours, 503 draining or restarting (with
Retry-After), 504 deadline.
"""

import msgspec

ERROR_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
MOST_NAMES = 8
"""Of served models that an error lists; /v1/models lists all."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inner object of OpenAI's error body."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """`{"error": {"message", "type", "param", "code"}}`."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is answered with an error; `param` names the field at fault where there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow

    def body(self) -> bytes:
        """The JSON body, also used as the data of an error event in a stream."""
        error_type = ERROR_TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, error_type, self.param, self.code)))

    def headers(self) -> dict[str, str]:
        """What goes with the status: `Retry-After` in whole seconds, `WWW-Authenticate` with 401, `Allow` with 405."""
        headers = {"content-type": "application/json"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.allow is not None:
            headers["allow"] = self.allow
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def invalid(message: str, param: str | None = None) -> ApiError:
    """400: the request is malformed, out of bounds or asks for something potstill does not do."""
    return ApiError(400, message, code="invalid_value", param=param)


def unsupported(message: str, param: str) -> ApiError:
    """400: something of OpenAI's that potstill does not do."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def unavailable(message: str, code: str) -> ApiError:
    """503: the server is draining, or its engine is starting or has died; worth another try in a few seconds."""
    return ApiError(503, message, code=code, retry_after_s=5)


def late() -> ApiError:
    """504: the request's own deadline has passed."""
    return ApiError(504, "the request was not finished within deadline_s", code="deadline_exceeded")


def overloaded(message: str) -> ApiError:
    """429: the queue is full, or a request waited in it for too long."""
    return ApiError(429, message, code="queue_full", retry_after_s=1)


def context_exceeded(max_model_len: int, size: str, num_output: int) -> ApiError:
    """400: a prompt of this size, in words, does not fit."""
    return ApiError(
        400,
        f"this model's maximum context length is {max_model_len} tokens, but the prompt has {size} tokens "
        f"and {num_output} output tokens are asked for; shorten the prompt or lower max_tokens",
        code="context_length_exceeded",
        param="prompt",
    )


def model_not_found(*served: str) -> ApiError:
    """404: a request names a model that is none of those that are served."""
    more = f" and {len(served) - MOST_NAMES} more" if len(served) > MOST_NAMES else ""
    names = f"{', '.join(served[:MOST_NAMES])}{more}"
    return ApiError(
        404, f"the requested model is not served here; served are {names}", code="model_not_found", param="model"
    )
