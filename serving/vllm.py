"""What vLLM's answers mean, and what may be asked of it: pure functions.

The words of vLLM's errors are those of 0.27.1, as measured; a real server is held to them by tests/test_stub_vllm.py.
"""

import email.utils
import json
import math
import os
import re
from collections.abc import Container, Iterable
from http import HTTPStatus

MAX_RETRY_AFTER_S = 60.0  # a longer Retry-After is cut to this
PROBE_IDS = [1, 2, 3, 4]  # tokens of every vocabulary: the canary of a load that brings none
HOP_BY_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "trailers",
              "transfer-encoding", "upgrade"}  # fmt: skip
DEAD_ENGINE = re.compile(r"EngineCore encountered an issue|EngineDeadError")
# What it says while a mount shows a directory in part: no weights, half a weights file, half a JSON.
HALF_VISIBLE = re.compile(
    r"doesn't contain tensors|Error while deserializing header|line \d+ column \d+ \(char \d+\)|No such file|Errno 5\b"
)
ADD_LORA_FAILED = re.compile(
    r"Call to add_lora method failed: (?:Worker failed with error ')?(.*?)(?:', please check.*)?", re.DOTALL
)
CURES = (
    (r"LoRA rank (\d+) is greater than", r"start the replicas with --lora-rank \1"),
    (r"support DoRA", "train without DoRA"),
    (r"modules_to_save", "train without modules_to_save"),
    (r"bias is not supported", "train with bias='none'"),
    (r"^Not Found$", "start the replicas with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    (r"Invalid username|^Forbidden|^Unauthorized", "HF_TOKEN must be a valid token with read access to the Job"),
)


class ApiError(Exception):
    """What went wrong, and how the proxy answers it: in OpenAI's error form."""

    def __init__(self, status: int, message: str, retry_after_s: int | None = None):
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s

    def body(self) -> dict:
        kind = HTTPStatus(self.status).phrase.replace(" ", "").removesuffix("Error") + "Error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.status}}


# --- what replicas answer --------------------------------------------------------------------------------------------


def said(body: bytes) -> str:
    """The message in an error body (vLLM's or FastAPI's form, or plain text), at most 400 characters of it."""
    try:
        parsed = json.loads(body)
        error = parsed.get("error", parsed)
        text = str(error.get("message") or error.get("detail") or error)
    except (ValueError, AttributeError):
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
    """What an answer to a load means: loaded, late (files not visible, or busy), unclear (what is there?), or final."""
    if status == 200:
        return "loaded"
    if DEAD_ENGINE.search(text) or "has already been loaded" in text:
        return "unclear"
    not_visible = (status == 404 and "No adapter found" in text) or (status == 500 and HALF_VISIBLE.search(text))
    return "late" if not_visible or status in (429, 502, 503, 504) else "final"


def answer_verdict(status: int, text: str) -> str:
    """What an answer to a request says: dead (the engine), forgot (the policy), busy (the server or the gateway before
    it), moved (redirected), token (refused), or pass: it is the client's."""
    if status >= 500 and DEAD_ENGINE.search(text):
        return "dead"
    if status == 404 and re.search(r"The model `.*` does not exist", text):
        return "forgot"
    if status in (429, 502, 503, 504):
        return "busy"
    return {301: "moved", 302: "moved", 303: "moved", 307: "moved", 308: "moved", 401: "token", 403: "token"}.get(
        status, "pass"
    )


def retry_after_s(headers: Iterable[tuple[str, str]], now_s: float) -> float:
    """Seconds that a Retry-After header asks for (a number or a date; 1 without one), cut to MAX_RETRY_AFTER_S."""
    value = next((value for name, value in headers if name.lower() == "retry-after"), "1")
    try:
        seconds = float(value)
    except ValueError:
        date = email.utils.parsedate_tz(value)
        seconds = email.utils.mktime_tz(date) - now_s if date else 1.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if math.isfinite(seconds) else MAX_RETRY_AFTER_S


def end_to_end(headers: Iterable[tuple[str, str]], drop: Container[str] = ()) -> list[tuple[str, str]]:
    """Headers that a proxy passes on: all but the hop-by-hop ones, those that Connection names, and `drop`."""
    headers = [(name, value) for name, value in headers if name.lower() not in drop]
    named = ",".join(value.lower() for name, value in headers if name.lower() == "connection")
    hops = HOP_BY_HOP | {part.strip() for part in named.split(",")}
    return [(name, value) for name, value in headers if name.lower() not in hops]


def canary_logprobs(body: bytes, ids: list[int]) -> list[float]:
    """Logprobs (C - 1,) of the tokens after the first, from a completion with prompt_logprobs=0; or ValueError."""
    try:
        rows = json.loads(body)["choices"][0]["prompt_logprobs"]
        return [float(rows[i][str(ids[i])]["logprob"]) for i in range(1, len(ids))]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"no prompt_logprobs, but {said(body)}") from None


def widest_gap(wanted: list[float], found: list[float]) -> float:
    """The largest difference of two (C - 1,) logprobs; infinite if one is not finite."""
    return max(abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(wanted, found, strict=True))


def models_in(body: bytes) -> tuple[set[str], dict[str, str]]:
    """The base model's names and the adapters (name to path) in an answer to /v1/models; or ValueError."""
    try:
        models = json.loads(body)["data"]
        bases = {model["id"] for model in models if not model.get("parent")}
        return bases, {model["id"]: model["root"] for model in models if model.get("parent")}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"/v1/models is not vLLM's: {said(body)}") from None


# --- what clients ask ------------------------------------------------------------------------------------------------


def attempt_of(policy: str) -> tuple[str, int] | None:
    """Run and attempt in a name "<run>-a<attempt>-v<version>"; None for names of another form, such as TRL's."""
    match = re.fullmatch(r"(.+)-a(\d+)-v\d+", policy)
    return (match[1], int(match[2])) if match else None


def read_json(body: bytes) -> dict:
    """The JSON object in a request's body; or ApiError."""
    try:
        parsed = json.loads(body)
    except ValueError as err:
        raise ApiError(400, f"the body is not JSON: {err}") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object")
    return parsed


def read_load(body: bytes, bucket: str) -> tuple[str, str, list[int], list[float] | None]:
    """Name and path of the policy that a load describes, and its canary: ids (C,), logprobs (C - 1,); or ApiError."""
    load = read_json(body)
    name, path, canary = load.get("lora_name"), load.get("lora_path"), load.get("canary")
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise ApiError(400, "a load needs lora_name and lora_path, strings that are not empty")
    if not (os.path.isabs(path) and os.path.normpath(path).startswith(os.path.normpath(bucket).rstrip("/") + "/")):
        raise ApiError(400, f"lora_path {path!r}: must be an absolute path inside the bucket {bucket}")
    if load.get("load_inplace"):
        raise ApiError(400, "load_inplace: vLLM would read the files at every step; load new weights under a new name")
    if not canary:
        return name, path, PROBE_IDS, None
    try:
        ids, logprobs = canary["token_ids"], canary["logprobs"]
        sound = all(type(token) is int and token >= 0 for token in ids) and all(map(math.isfinite, logprobs))
        sound = sound and len(ids) == len(logprobs) + 1 >= 2
    except (TypeError, KeyError):
        sound = False
    if not sound:
        raise ApiError(400, "canary: needs two or more token_ids, and finite logprobs of all but the first")
    return name, path, ids, logprobs


def read_completion(body: bytes) -> dict:
    """What routing needs to know of a completion request: model, ids, num, stream; or ApiError."""
    asked = read_json(body)
    model, prompt, n = asked.get("model"), asked.get("prompt"), asked.get("n")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model is missing: name a policy or the base model")  # vLLM would take the base model
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    batch = len(prompt) if isinstance(first, list | str) else 1
    num = batch * (n if isinstance(n, int) and n > 0 else 1)
    ids = prompt if isinstance(first, int) else None
    return {"model": model, "ids": ids, "num": num, "stream": bool(asked.get("stream"))}


def named_model(body: bytes) -> str | None:
    """The model that a request of any other kind names, if it does."""
    try:
        model = read_json(body).get("model")
    except ApiError:
        return None
    return model if isinstance(model, str) else None
