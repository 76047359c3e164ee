"""A small real server that answers as a vLLM 0.27.1 replica does, with faults on request; no model, no torch.

    python tests/fake_replica.py --port 0        # prints "fake replica: http://127.0.0.1:PORT"

Its "weights" are a number: 0 for the base model, a checksum of the weights file for an adapter. Logprobs and sampled
tokens are functions of that number and the tokens before, so a caller can tell which weights answered.

    POST /fake/fault    {"path", "times": 1, and one of status (with body, headers), drop, drop_after, hang, hold, cut};
                        requests for prompt_logprobs are spared, or with "canary": true are the only ones meant
    POST /fake/set      attributes of Engine: wrong_weights, wedged, stepwise, ...
    POST /fake/release  what is held goes on; with stepwise, one more chunk of a stream is sent
    GET  /fake/wait?path=...&count=N    answers when N requests to a path have arrived
    GET  /fake/state    what arrived, what runs, what is loaded
    POST /fake/reset    as new
"""

import argparse
import gzip
import json
import os
import random
import signal
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, object]  # status; text, a dict sent as JSON, or an iterator of a stream's events


class HangUpError(Exception):
    """Close the connection now."""


def weights_in(path: str) -> int:
    """The "weights" of an adapter directory: a checksum of its weights file."""
    with open(os.path.join(path, "adapter_model.safetensors"), "rb") as file:
        return zlib.crc32(file.read())


def logprob(weights: int, ids: list[int]) -> float:
    """Logprob of the last of these tokens after the others, between -5.1 and -0.1."""
    return -0.1 - 5 * zlib.crc32(repr((weights, ids)).encode()) / 2**32


def sampled(weights: int, prompt: list[int], index: int, num: int) -> list[int]:
    """The tokens (num,) that the index-th completion of a prompt has under these weights."""
    return [zlib.crc32(repr((weights, prompt, index, i)).encode()) % 512 for i in range(num)]


def error(status: int, message: str, kind: str = "BadRequestError") -> Answer:
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


def worker_failed(why: str) -> Answer:
    message = f"Call to add_lora method failed: Worker failed with error '{why}', please check the stack trace above "
    return error(500, message + "for the root cause", "InternalServerError")


def read_adapter(name: str, path: str) -> int | Answer:
    """The weights of an adapter directory, or vLLM's answer to a directory that it cannot load."""
    try:
        with open(f"{path}/adapter_config.json") as file:
            config = json.load(file)
        with open(f"{path}/adapter_model.safetensors", "rb") as file:
            data = file.read()
    except FileNotFoundError as err:
        if "config" in str(err):
            return error(404, f"Loading lora {name} failed: No adapter found for <path>", "NotFoundError")
        return worker_failed(f"{path} doesn't contain tensors")
    except json.JSONDecodeError as err:
        return worker_failed(str(err))
    whole = len(data) >= 8 and len(data) >= 8 + struct.unpack("<Q", data[:8])[0]
    problems = (
        (config.get("r", 1) > 8, f"LoRA rank {config.get('r')} is greater than max_lora_rank 8."),
        (config.get("use_dora"), "vLLM does not yet support DoRA."),
        (config.get("modules_to_save"), "vLLM only supports modules_to_save being None."),
        (config.get("bias", "none") != "none", "Adapter bias is not supported."),
        (not whole, "Error while deserializing header: incomplete metadata, file not fully covered"),
    )
    return next((worker_failed(why) for wrong, why in problems if wrong), zlib.crc32(data))


class Engine:
    """The state of the server, and generation."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.adapters: dict[str, tuple[str, int]] = {}  # name: path and weights
        self.dead = self.wrong_weights = self.wedged = self.stepwise = self.paused = False
        self.pauses = 0  # that aborted
        self.faults: list[dict] = []
        self.released = 0
        self.arrived: Counter[str] = Counter()
        self.log: list[dict] = []
        self.running = self.aborted = self.finished = 0
        self.engines = 1  # behind this address
        self.lock = threading.Lock()

    def count(self, **more: int) -> None:
        with self.lock:
            for name, num in more.items():
                setattr(self, name, getattr(self, name) + num)

    def wait(self, ready, client: socket.socket) -> None:
        """Wait until `ready()`; HangUpError if the client left first."""
        self.count(running=1)
        try:
            while not ready():
                if has_left(client):
                    self.count(aborted=1)
                    raise HangUpError
                time.sleep(0.02)
        finally:
            self.count(running=-1)


def has_left(client: socket.socket) -> bool:
    """Whether the client closed its connection; one that speaks TLS says so by what it sends last."""
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except (BlockingIOError, ValueError):
        return False
    except OSError:
        return True


# --- what vLLM answers -----------------------------------------------------------------------------------------------


def choices_of(engine: Engine, asked: dict, weights: int) -> list[dict]:
    prompt = asked.get("prompt", [1])
    ids, choices = list(prompt.encode()) if isinstance(prompt, str) else prompt, []
    for index in range(asked.get("n") or 1):
        tokens = sampled(weights, ids, index, asked.get("max_tokens", 16))
        chosen = [logprob(weights, ids + tokens[: i + 1]) for i in range(len(tokens))]
        rows = [{str(t): {"logprob": logprob(weights, ids[: i + 1])}} for i, t in enumerate(ids)]
        choices.append({
            "index": index, "text": "xx", "finish_reason": "length", "logprobs": {"token_logprobs": chosen},
            "token_ids": tokens, "prompt_logprobs": [None, *rows[1:]] if "prompt_logprobs" in asked else None,
        })  # fmt: skip
    return choices


def complete(engine: Engine, asked: dict, client: socket.socket) -> Answer:
    """vLLM's answer to a completion request."""
    model = asked.get("model") or engine.args.model
    if model != engine.args.model and model not in engine.adapters:
        return error(404, f"The model `{model}` does not exist.", "NotFoundError")
    canary = "prompt_logprobs" in asked
    pauses, until = engine.pauses, time.monotonic() + (0 if canary else random.uniform(*engine.args.latency_s))
    weights = 0 if engine.wrong_weights or model == engine.args.model else engine.adapters[model][1]
    engine.wait(lambda: engine.dead or engine.pauses != pauses or (
        not engine.paused and not engine.wedged and time.monotonic() >= until), client)  # fmt: skip
    if engine.dead:
        return error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                     "InternalServerError")  # fmt: skip
    engine.count(finished=not canary)
    choices = choices_of(engine, asked, weights)
    if engine.pauses != pauses:
        choices = [choice | {"finish_reason": "abort", "token_ids": [], "text": ""} for choice in choices]
    body = {"id": f"cmpl-{os.getpid()}-{engine.finished}", "object": "text_completion", "model": model}
    body["choices"] = choices
    return 200, events(engine, body, client) if asked.get("stream") else body


def events(engine: Engine, body: dict, client: socket.socket) -> Iterator[str]:
    """A stream's events, one for each release if it is to go step by step."""
    for index in range(5):
        if engine.stepwise:
            engine.wait(lambda step=index: engine.released > step, client)
        if engine.stepwise == "break" and index == 2:
            raise HangUpError
        yield json.dumps(body | {"chunk": index})
    yield "[DONE]"


def load(engine: Engine, asked: dict) -> Answer:
    name, path = asked.get("lora_name"), asked.get("lora_path")
    if not name or not path:
        return error(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    if name in engine.adapters and not asked.get("load_inplace"):
        return error(400, f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                     "place, set 'load_inplace' to True.", "InvalidUserInput")  # fmt: skip
    weights = read_adapter(name, path)
    if not isinstance(weights, int):
        return weights
    engine.adapters[name] = (path, weights)
    return 200, f"Success: LoRA adapter '{name}' added successfully."


def unload(engine: Engine, asked: dict) -> Answer:
    name = asked.get("lora_name")
    if name not in engine.adapters:
        return error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
    del engine.adapters[name]
    return 200, f"Success: LoRA adapter '{name}' removed successfully."


def models(engine: Engine) -> Answer:
    base = engine.args.model
    found = [{"id": base, "root": base, "parent": None, "max_model_len": 256}]
    found += [{"id": name, "root": path, "parent": base} for name, (path, _) in engine.adapters.items()]
    return 200, {"object": "list", "data": found}


def pause(engine: Engine, query: dict, on: bool) -> Answer:
    engine.paused = on
    engine.count(pauses=on and "keep" not in query.get("mode", []))
    return 200, {"status": "paused" if on else "resumed"}


# --- what a test asks for --------------------------------------------------------------------------------------------


def fake(engine: Engine, path: str, query: dict, asked: dict) -> Answer:
    """The routes by which a test steers this server."""
    if path == "/fake/fault":
        engine.faults.append({"times": 1} | asked)
    elif path == "/fake/set":
        vars(engine).update(asked)
    elif path == "/fake/release":
        engine.count(released=1)
    elif path == "/fake/reset":
        engine.__init__(engine.args)
    elif path == "/fake/wait":
        deadline = time.monotonic() + 50
        while engine.arrived[query["path"][0]] < int(query["count"][0]):
            if time.monotonic() > deadline:
                return 408, "they did not come"
            time.sleep(0.01)
    elif path == "/fake/state":
        names = ("running", "aborted", "finished", "dead", "log", "arrived", "paused")
        adapters = {name: path for name, (path, _) in engine.adapters.items()}
        return 200, {name: getattr(engine, name) for name in names} | {"adapters": adapters}
    return 200, "ok"


def take_fault(engine: Engine, path: str, asked: object) -> dict:
    """The fault that is meant for this request, or {}."""
    canary = isinstance(asked, dict) and "prompt_logprobs" in asked
    with engine.lock:
        for fault in engine.faults:
            if fault["path"] == path and fault["times"] != 0 and fault.get("canary", False) == canary:
                fault["times"] -= 1
                return fault
    return {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine: Engine

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            asked = json.loads(data)
        except ValueError:
            asked = None
        try:
            self.connection.settimeout(None)
            self.route(urlsplit(self.path).path, asked)
            self.connection.settimeout(self.timeout)  # until the next request comes
        except (HangUpError, OSError):
            self.close_connection = True

    def route(self, path: str, asked: object) -> None:
        engine, query = self.engine, parse_qs(urlsplit(self.path).query)
        if path.startswith("/fake/"):
            self.send(*fake(engine, path, query, asked))
            return
        if path != "/health":
            engine.log.append({"path": path, "query": urlsplit(self.path).query, "headers": dict(self.headers),
                               "body": asked})  # fmt: skip
            del engine.log[:-1000]
        with engine.lock:
            engine.arrived[path] += 1
        if engine.args.token and self.headers["Authorization"] != f"Bearer {engine.args.token}":
            self.send(*error(401, "Invalid username or password."))
            return
        fault = take_fault(engine, path, asked)
        if "hold" in fault or "hang" in fault:
            mark = engine.released
            engine.wait(lambda: "hold" in fault and engine.released > mark, self.connection)
        if "cut" in fault:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
            self.wfile.write(head + b"x" * fault["cut"])
        if "cut" in fault or "drop" in fault:
            raise HangUpError
        if "status" in fault:
            self.send(fault["status"], fault.get("body", ""), fault.get("headers", {}))
            return
        answer = self.vllm(path, query, asked)
        if "drop_after" in fault:
            raise HangUpError
        self.send(*answer)

    def vllm(self, path: str, query: dict, asked: dict) -> Answer:
        engine = self.engine
        routes = {
            "/health": lambda: (503 if engine.dead else 200, ""),
            "/v1/models": lambda: models(engine),
            "/server_info": lambda: (200, {"vllm_config": {"parallel_config": {"data_parallel_size": engine.engines}}}),
            "/v1/load_lora_adapter": lambda: load(engine, asked),
            "/v1/unload_lora_adapter": lambda: unload(engine, asked),
            "/v1/completions": lambda: complete(engine, asked, self.connection),
            "/v1/chat/completions": lambda: complete(engine, asked, self.connection),
            "/pause": lambda: pause(engine, query, True),
            "/resume": lambda: pause(engine, query, False),
            "/reset_prefix_cache": lambda: (200, ""),
            "/tokenize": lambda: (200, {"tokens": list(asked["prompt"].encode())}),
        }
        return routes.get(path, lambda: (404, {"detail": "Not Found"}))()

    def send(self, status: int, body: object, headers: dict | None = None) -> None:
        self.send_response(status)
        if isinstance(body, Iterator):
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in body:
                data = f"data: {event}\n\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        data, headers = (body if isinstance(body, str) else json.dumps(body)).encode(), headers or {}
        if data.startswith(b"GZIP"):  # compressed, as a gateway may do
            data, headers = gzip.compress(data.removeprefix(b"GZIP")), headers | {"Content-Encoding": "gzip"}
        kind = "text/plain" if isinstance(body, str) and "Success" in body else "application/json"
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="base")
    parser.add_argument("--token", default="", help="the only one it takes")
    parser.add_argument("--latency-s", type=float, nargs=2, default=(0.0, 0.0))
    parser.add_argument("--keep-alive-s", type=float, default=5.0)
    parser.add_argument("--cert", help="certificate and key: speak https")
    parser.add_argument("--key")
    args = parser.parse_args()
    Handler.engine, Handler.timeout = Engine(args), args.keep_alive_s
    ThreadingHTTPServer.request_queue_size = 2048
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    if args.cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.cert, args.key)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    print(f"fake replica: http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
