"""What vLLM's answers mean, and what the proxy takes for a request: pure functions, each with its cases as tests.

The words of vLLM's errors are those of 0.27.1, as measured; a real server is held to them by tests/test_stub_vllm.py.
"""

import email.utils
import math
import os
import re
from collections.abc import Container, Iterable
from http import HTTPStatus
from typing import NamedTuple

import orjson

MAX_RETRY_AFTER_S = 60.0  # a longer Retry-After is cut to this
HOP_BY_HOP = {
    "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "trailers", "transfer-encoding", "upgrade",
}  # fmt: skip
CONNECTION_WORDS = {"", "keep-alive", "close", "upgrade"}
# What vLLM says while a mount shows a directory only in part: no weights, half a weights file, half a JSON.
HALF_VISIBLE = re.compile(
    r"doesn't contain tensors|Error while deserializing header|line \d+ column \d+ \(char \d+\)|No such file|Errno 5\b"
)
DEAD_ENGINE = re.compile(r"EngineCore encountered an issue|EngineDeadError")
ADD_LORA_FAILED = re.compile(  # the second wrap is of a worker in a process of its own: with more than one GPU
    r"Call to add_lora method failed: (?:Worker failed with error ')?(.*?)(?:', please check.*)?", re.DOTALL
)
CURES = (
    (r"LoRA rank (\d+) is greater than", r"start the replicas with --lora-rank \1"),
    (r"support DoRA", "train without DoRA"),
    (r"modules_to_save", "train without modules_to_save"),
    (r"bias is not supported", "train with bias='none'"),
    (r"^Not Found$", "start the replicas with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
)


class ApiError(Exception):
    """What the proxy answers itself, in OpenAI's error form."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Canary(NamedTuple):
    """What a replica must say of a short token sequence under a policy."""

    ids: list[int]  # (C,)
    logprobs: list[float]  # (C - 1,) of the tokens after the first


def error_body(status: int, message: str) -> dict:
    """OpenAI's error form."""
    kind = HTTPStatus(status).phrase.title().replace(" ", "") if status != 499 else "ClientClosedRequest"
    return {"error": {"message": message, "type": kind.removesuffix("Error") + "Error", "param": None, "code": status}}


# --- what replicas answer --------------------------------------------------------------------------------------------


def said(body: bytes) -> str:
    """The message in an error body (vLLM's or FastAPI's form, or plain text), at most 400 characters of it."""
    try:
        parsed = orjson.loads(body)
        error = parsed.get("error", parsed)
        text = str(error.get("message") or error.get("detail") or error)
    except (orjson.JSONDecodeError, AttributeError):
        text = body.decode(errors="replace")
    inner = ADD_LORA_FAILED.fullmatch(text)
    return " ".join((inner[1] if inner else text).split())[:400]


def with_cure(text: str) -> str:
    """A replica's message about a load, and what to do about it if that is known."""
    for pattern, cure in CURES:
        if match := re.search(pattern, text):
            return f"{text.rstrip('.')}; {match.expand(cure)}"
    return text


def load_verdict(status: int, text: str) -> str:
    """What an answer to a load means: loaded, already (there is one of that name), late (files not visible), or final.

    Also dead (the engine) and busy (the server, or the gateway before it).
    """
    if status == 200:
        return "loaded"
    if status == 400 and "has already been loaded" in text:
        return "already"
    if (status == 404 and "No adapter found" in text) or (status == 500 and HALF_VISIBLE.search(text)):
        return "late"
    if status >= 500 and DEAD_ENGINE.search(text):
        return "dead"
    return "busy" if status in (429, 502, 503, 504) else "final"


def answer_verdict(status: int, text: str) -> str:
    """What an answer to a request says: pass (it is the client's), dead or doubtful (the replica), busy or token
    (the gateway), forgot (the policy), moved (redirected)."""
    if status in (301, 302, 303, 307, 308):
        return "moved"
    if status in (401, 403):
        return "token"
    if status == 404 and re.search(r"The model `.*` does not exist", text):
        return "forgot"
    if status == 429:
        return "busy"
    if status >= 500:
        return "dead" if DEAD_ENGINE.search(text) else "doubtful"
    return "pass"


def retry_after_s(headers: Iterable[tuple[str, str]], now_s: float) -> float:
    """Seconds that a Retry-After header asks for (a number or a date; 1 without one), cut to MAX_RETRY_AFTER_S."""
    value = next((value for name, value in headers if name.lower() == "retry-after"), "1")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now_s
        except ValueError:
            seconds = 1.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if math.isfinite(seconds) else MAX_RETRY_AFTER_S


def end_to_end(headers: Iterable[tuple[str, str]], drop: Container[str] = ()) -> list[tuple[str, str]]:
    """Headers that a proxy passes on: all but the hop-by-hop ones, those that Connection names, and `drop`."""
    kept, named = [], ""
    for name, value in headers:
        key = name.lower()
        if key == "connection":
            named += "," + value.lower()
        elif key not in HOP_BY_HOP and key not in drop:
            kept.append((name, value))
    hops = {part.strip() for part in named.split(",")}
    return [(name, value) for name, value in kept if name.lower() not in hops] if hops - CONNECTION_WORDS else kept


def canary_logprobs(body: bytes, ids: list[int]) -> list[float]:
    """Logprobs (C - 1,) of the tokens after the first, from a completion with prompt_logprobs=0; or ValueError."""
    try:
        rows = orjson.loads(body)["choices"][0]["prompt_logprobs"]
        return [float(rows[i][str(ids[i])]["logprob"]) for i in range(1, len(ids))]
    except (ValueError, LookupError, TypeError) as err:
        raise ValueError(f"no prompt_logprobs in {body[:200]!r}") from err


def widest_gap(wanted: list[float], found: list[float]) -> tuple[float, int]:
    """The largest difference of two (C - 1,) logprobs, infinite if one is not finite, and the token it is at."""
    gaps = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(wanted, found, strict=True)]
    widest = max(gaps)
    return widest, gaps.index(widest) + 1


def data_parallel_size(body: bytes) -> int:
    """How many engines share a vLLM server's address, from its /server_info; 1 if that does not say."""
    try:
        return int(orjson.loads(body)["vllm_config"]["parallel_config"]["data_parallel_size"])
    except (ValueError, LookupError, TypeError):
        return 1


# --- what clients ask ------------------------------------------------------------------------------------------------


def read_json(body: bytes) -> dict:
    """The JSON object in a request's body; or ApiError."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as err:
        raise ApiError(400, f"the body is not JSON: {err}") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object")
    return parsed


def read_load(body: bytes, bucket: str) -> tuple[str, str, Canary | None]:
    """Name, path and canary of the policy that a load's body describes; or ApiError."""
    load = read_json(body)
    name, path = load.get("lora_name"), load.get("lora_path")
    for key, value in (("lora_name", name), ("lora_path", path)):
        if not isinstance(value, str) or not value:
            raise ApiError(400, f"a load needs {key}, a string that is not empty")
    if not lies_in(path, bucket):
        raise ApiError(400, f"lora_path {path!r}: must be an absolute path inside the bucket {bucket}")
    if load.get("load_inplace"):
        raise ApiError(400, "load_inplace: vLLM would read the files at every step; load new weights under a new name")
    return name, path, read_canary(load["canary"]) if load.get("canary") else None


def read_canary(canary: object) -> Canary:
    """The canary of a load; or ApiError."""
    fits = isinstance(canary, dict) and all(isinstance(canary.get(key), list) for key in ("token_ids", "logprobs"))
    if not fits or not len(canary["token_ids"]) == len(canary["logprobs"]) + 1 >= 2:
        raise ApiError(400, "canary: needs two or more token_ids, and logprobs of all but the first")
    if not all(type(token) is int and token >= 0 for token in canary["token_ids"]):
        raise ApiError(400, "canary: token_ids must be whole numbers")
    if not all(type(value) in (int, float) and math.isfinite(value) for value in canary["logprobs"]):
        raise ApiError(400, "canary: logprobs must be finite numbers")
    return Canary(canary["token_ids"], canary["logprobs"])


def read_completion(body: bytes) -> dict:
    """What routing needs to know of a completion request: model, ids, num, stream; or ApiError."""
    asked = read_json(body)
    model, prompt, n = asked.get("model"), asked.get("prompt"), asked.get("n")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model is missing: name a policy or the base model")  # vLLM would take the base model
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    batch = len(prompt) if isinstance(first, list | str) else 1
    return {
        "model": model,
        "ids": prompt if isinstance(first, int) else None,
        "num": batch * (n if isinstance(n, int) and n > 0 else 1),
        "stream": bool(asked.get("stream")),
    }


def named_model(body: bytes) -> str | None:
    """The model that a request of any other kind names, if it does."""
    try:
        model = orjson.loads(body).get("model")
    except (orjson.JSONDecodeError, AttributeError):
        return None
    return model if isinstance(model, str) else None


def lies_in(path: str, bucket: str) -> bool:
    """Whether an absolute path lies inside the bucket's directory, without following links."""
    return os.path.isabs(path) and os.path.normpath(path).startswith(os.path.normpath(bucket).rstrip("/") + "/")
