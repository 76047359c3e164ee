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

if __name__ == "__main__":
    from gevent import monkey

    monkey.patch_all()

import argparse
import gzip
import json
import os
import random
import signal
import socket
import struct
import time
import zlib
from collections import Counter, OrderedDict

import gevent
import gevent.event
import gevent.pywsgi
from flask import Flask, Response, g, request

VOCAB = 512


def weights_in(path: str) -> int:
    """The "weights" of an adapter directory: a checksum of its weights file."""
    with open(os.path.join(path, "adapter_model.safetensors"), "rb") as file:
        return zlib.crc32(file.read())


def logprob(weights: int, ids: list[int]) -> float:
    """Logprob of the last of these tokens after the others, between -5.1 and -0.1."""
    return -0.1 - 5 * zlib.crc32(repr((weights, ids)).encode()) / 2**32


def sampled(weights: int, prompt: list[int], index: int, num: int) -> list[int]:
    """The tokens (num,) that the index-th completion of a prompt has under these weights."""
    return [zlib.crc32(repr((weights, prompt, index, i)).encode()) % VOCAB for i in range(num)]


def error(status: int, message: str, kind: str = "BadRequestError") -> Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return Response(json.dumps(body), status, mimetype="application/json")


def worker_failed(why: str) -> Response:
    message = f"Call to add_lora method failed: Worker failed with error '{why}', please check the stack trace above "
    return error(500, message + "for the root cause", "InternalServerError")


def read_adapter(name: str, path: str, max_rank: int) -> int | Response:
    """The weights of an adapter directory, or vLLM's answer to a directory that it cannot load."""
    config_path, weights_path = (os.path.join(path, f) for f in ("adapter_config.json", "adapter_model.safetensors"))
    if not os.path.isfile(config_path):
        return error(404, f"Loading lora {name} failed: No adapter found for <path>", "NotFoundError")
    try:
        with open(config_path) as file:
            config = json.load(file)
    except json.JSONDecodeError as err:
        return worker_failed(str(err))
    refusals = (
        (config.get("r", 1) > max_rank, f"LoRA rank {config.get('r')} is greater than max_lora_rank {max_rank}."),
        (config.get("use_dora"), "vLLM does not yet support DoRA."),
        (config.get("modules_to_save"), "vLLM only supports modules_to_save being None."),
        (config.get("bias", "none") != "none", "Adapter bias is not supported."),
    )
    for refused, why in refusals:
        if refused:
            return worker_failed(why)
    if not os.path.isfile(weights_path):
        return worker_failed(f"{path} doesn't contain tensors")
    with open(weights_path, "rb") as file:
        data = file.read()
    if len(data) < 8:
        return worker_failed("Error while deserializing header: header too small")
    if len(data) < 8 + struct.unpack("<Q", data[:8])[0]:
        return worker_failed("Error while deserializing header: incomplete metadata, file not fully covered")
    return zlib.crc32(data)


def left(sock: socket.socket) -> bool:
    """Whether the client closed its connection."""
    try:
        return sock._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class Engine:
    """The state of the server, and generation."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.adapters: dict[str, tuple[str, int]] = {}  # name: path and weights
        self.resident: OrderedDict[str, None] = OrderedDict()
        self.dead = self.wrong_weights = self.wedged = self.stepwise = False
        self.go_on = gevent.event.Event()  # set while not paused
        self.go_on.set()
        self.pauses = 0  # that aborted
        self.faults: list[dict] = []
        self.released = 0
        self.arrived: Counter[str] = Counter()
        self.stir = gevent.event.Event()
        self.log: list[dict] = []
        self.running = self.aborted = self.finished = 0
        self.data_parallel_size = 1

    def weights(self, model: str) -> int:
        """The weights behind a model's name; an evicted adapter is read again, and kills the engine if it is gone."""
        if model == self.args.model:
            return 0
        path, weights = self.adapters[model]
        if model not in self.resident and not os.path.isdir(path):
            self.dead = True
            gevent.spawn_later(0.3, os._exit, 1)
        self.keep(model)
        return 0 if self.wrong_weights else weights

    def keep(self, name: str) -> None:
        self.resident[name] = None
        self.resident.move_to_end(name)
        while len(self.resident) > self.args.max_loras:
            self.resident.popitem(last=False)

    def wait(self, ready, sock: socket.socket) -> bool:
        """Wait until `ready()`; False if the client left first."""
        self.running += 1
        try:
            while not ready():
                if left(sock):
                    self.aborted += 1
                    return False
                gevent.sleep(0.02)
            return True
        finally:
            self.running -= 1


def apply_fault(engine: Engine, path: str, sock: socket.socket) -> Response | None:
    """The answer that a fault asks for, or None where there is none."""
    canary = "prompt_logprobs" in (request.get_json(silent=True) or {})
    wanted = (f for f in engine.faults if f["path"] == path and f["times"] != 0 and f.get("canary", False) == canary)
    fault = next(wanted, None)
    if fault is None:
        return None
    fault["times"] -= 1
    if "drop_after" in fault:
        g.drop = True
        return None
    if "hold" in fault or "hang" in fault:
        mark = engine.released
        if engine.wait(lambda: "hold" in fault and engine.released > mark, sock):
            return None
        raise gevent.GreenletExit
    if "cut" in fault:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        sock.sendall(head + b"x" * fault["cut"])
    if "cut" in fault or "drop" in fault:
        sock.shutdown(socket.SHUT_RDWR)
        raise gevent.GreenletExit
    body = fault.get("body", "")
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    headers = fault.get("headers") or {}
    if data.startswith(b"GZIP"):  # compressed, as a gateway does for clients that accept it
        data = data.removeprefix(b"GZIP")
        if "gzip" in request.accept_encodings:
            data, headers = gzip.compress(data), headers | {"Content-Encoding": "gzip"}
    return Response(data, fault["status"], headers, mimetype="application/json")


def choices_of(engine: Engine, asked: dict, weights: int) -> list[dict]:
    prompt = asked.get("prompt", [1])
    prompt = list(prompt.encode()) if isinstance(prompt, str) else prompt
    prompts = prompt if prompt and isinstance(prompt[0], list) else [prompt]
    choices = []
    for ids in prompts:
        for _ in range(asked.get("n") or 1):
            tokens = sampled(weights, ids, len(choices), asked.get("max_tokens", 16))
            chosen = [logprob(weights, ids + tokens[: i + 1]) for i in range(len(tokens))]
            choice = {"index": len(choices), "text": "x" * engine.args.text_bytes, "finish_reason": "length",
                      "stop_reason": None, "prompt_logprobs": None, "logprobs": None}  # fmt: skip
            if asked.get("logprobs") is not None:
                choice["logprobs"] = {"token_logprobs": chosen, "tokens": [f"token_id:{t}" for t in tokens]}
            if asked.get("return_token_ids"):
                choice |= {"token_ids": tokens, "prompt_token_ids": ids}
            if asked.get("prompt_logprobs") is not None:
                rows = [{str(t): {"logprob": logprob(weights, ids[: i + 1]), "rank": 1}} for i, t in enumerate(ids)]
                choice["prompt_logprobs"] = [None, *rows[1:]]
            choices.append(choice)
    return choices


def complete(engine: Engine, asked: dict, sock: socket.socket) -> Response:
    """vLLM's answer to a completion request."""
    model = asked.get("model") or engine.args.model
    if model != engine.args.model and model not in engine.adapters:
        return error(404, f"The model `{model}` does not exist.", "NotFoundError")
    prompt = asked.get("prompt", [1])
    flat = prompt if isinstance(prompt, list) and all(isinstance(t, int) for t in prompt) else []
    if len(flat) + asked.get("max_tokens", 16) > engine.args.context:
        return error(400, f"This model's maximum context length is {engine.args.context} tokens. However, you sent "
                     f"{len(flat)} tokens in the messages. Please reduce the length.")  # fmt: skip
    if any(not 0 <= token < VOCAB for token in flat):
        return error(400, f"Token id {max(flat)} is out of vocabulary")
    if asked.get("n") == 0:
        return error(400, "n must be at least 1, got 0.")
    latency_s = 0.0 if "prompt_logprobs" in asked else random.uniform(*engine.args.latency_s)
    pauses, until = engine.pauses, time.monotonic() + latency_s
    weights = engine.weights(model)
    if not engine.wait(lambda: engine.dead or engine.pauses != pauses or (
        engine.go_on.is_set() and not engine.wedged and time.monotonic() >= until), sock):  # fmt: skip
        raise gevent.GreenletExit
    if engine.dead:
        return error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                     "InternalServerError")  # fmt: skip
    engine.finished += "prompt_logprobs" not in asked
    choices = choices_of(engine, asked, weights)
    if engine.pauses != pauses:
        choices = [choice | {"finish_reason": "abort", "token_ids": [], "text": ""} for choice in choices]
    body = {
        "id": f"cmpl-{os.getpid()}-{engine.finished}",
        "object": "text_completion",
        "model": model,
        "choices": choices,
    }
    if asked.get("stream"):
        return Response(stream(engine, body, sock), mimetype="text/event-stream")
    return Response(json.dumps(body), mimetype="application/json")


def stream(engine: Engine, body: dict, sock: socket.socket):
    for index in range(5):
        if engine.stepwise and not engine.wait(lambda step=index: engine.released > step, sock):
            return
        if engine.stepwise == "break" and index == 2:
            sock.shutdown(socket.SHUT_RDWR)
            raise gevent.GreenletExit
        yield f"data: {json.dumps(body | {'chunk': index})}\n\n"
    yield "data: [DONE]\n\n"


def load(engine: Engine, asked: dict) -> Response:
    name, path = asked.get("lora_name"), asked.get("lora_path")
    if not name or not path:
        return error(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    if name in engine.adapters and not asked.get("load_inplace"):
        return error(400, f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                     "place, set 'load_inplace' to True.", "InvalidUserInput")  # fmt: skip
    weights = read_adapter(name, path, engine.args.max_lora_rank)
    if isinstance(weights, Response):
        return weights
    engine.adapters[name] = (path, weights)
    engine.keep(name)
    return Response(f"Success: LoRA adapter '{name}' added successfully.", mimetype="text/plain")


def unload(engine: Engine, asked: dict) -> Response:
    name = asked.get("lora_name")
    if name not in engine.adapters:
        return error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
    del engine.adapters[name]
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", mimetype="text/plain")


def control_routes(app: Flask, engine: Engine) -> None:
    """The routes by which a test steers this server."""

    @app.post("/fake/fault")
    def add_fault():
        engine.faults.append({"times": 1} | request.get_json())
        return "ok"

    @app.post("/fake/set")
    def set_state():
        for name, value in request.get_json().items():
            setattr(engine, name, value)
        return "ok"

    @app.post("/fake/release")
    def release():
        engine.released += 1
        return "ok"

    @app.post("/fake/reset")
    def reset_all():
        engine.__init__(engine.args)
        return "ok"

    @app.get("/fake/wait")
    def wait():
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline:
            if engine.arrived[request.args["path"]] >= int(request.args["count"]):
                return "ok"
            engine.stir.wait(1)
        return "they did not come", 408

    @app.get("/fake/state")
    def state():
        names = ("running", "aborted", "finished", "dead", "log", "arrived")
        return {name: getattr(engine, name) for name in names} | {
            "adapters": {name: path for name, (path, _) in engine.adapters.items()}, "paused": not engine.go_on.is_set()
        }  # fmt: skip


def vllm_routes(app: Flask, engine: Engine) -> None:
    """The routes of a vLLM server."""

    @app.get("/health")
    def health():
        return Response("", 503 if engine.dead else 200)

    @app.get("/v1/models")
    def models():
        base = {"id": engine.args.model, "object": "model", "root": engine.args.model, "parent": None,
                "max_model_len": engine.args.context}  # fmt: skip
        adapters = [
            {"id": name, "object": "model", "root": path, "parent": engine.args.model}
            for name, (path, _) in engine.adapters.items()
        ]
        return {"object": "list", "data": [base, *adapters]}

    @app.get("/server_info")
    def server_info():
        return {"vllm_config": {
            "model_config": {"dtype": "torch.bfloat16"},
            "lora_config": {"max_lora_rank": engine.args.max_lora_rank, "max_loras": engine.args.max_loras},
            "parallel_config": {"data_parallel_size": engine.data_parallel_size},
        }}  # fmt: skip

    @app.post("/v1/load_lora_adapter")
    def load_adapter():
        return load(engine, request.get_json())

    @app.post("/v1/unload_lora_adapter")
    def unload_adapter():
        return unload(engine, request.get_json())

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    def completions():
        return complete(engine, request.get_json(), request.environ["fake.socket"])

    @app.post("/pause")
    def pause():
        engine.go_on.clear()
        if request.args.get("mode", "abort") == "abort":
            engine.pauses += 1
        return {"status": "paused"}

    @app.post("/resume")
    def resume():
        engine.go_on.set()
        return {"status": "resumed"}

    @app.post("/reset_prefix_cache")
    def reset():
        return Response("", 200)

    @app.post("/tokenize")
    def tokenize():
        ids = list(request.get_json()["prompt"].encode())
        return {"tokens": ids, "count": len(ids), "max_model_len": engine.args.context}


def create_app(args: argparse.Namespace) -> Flask:
    app = Flask(__name__)
    engine = Engine(args)

    @app.before_request
    def before():
        path = request.path
        if path.startswith("/fake/"):
            return None
        engine.arrived[path] += 1
        engine.stir.set()
        engine.stir = gevent.event.Event()
        if path != "/health":
            engine.log.append({"path": path, "query": request.query_string.decode(), "headers": dict(request.headers),
                               "body": request.get_json(silent=True)})  # fmt: skip
            del engine.log[:-1000]
        if args.token and request.headers.get("Authorization") != f"Bearer {args.token}":
            return error(401, "Invalid username or password.")
        return apply_fault(engine, path, request.environ["fake.socket"])

    @app.after_request
    def after(response: Response):
        if g.get("drop"):
            request.environ["fake.socket"].shutdown(socket.SHUT_RDWR)
        return response

    control_routes(app, engine)
    vllm_routes(app, engine)
    return app


class Handler(gevent.pywsgi.WSGIHandler):
    """Closes idle connections as uvicorn does, and hands on the client's socket."""

    keep_alive_s = 5.0

    def read_requestline(self) -> str:
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(self.keep_alive_s)
        line = super().read_requestline()
        self.socket.settimeout(None)
        return line

    def get_environ(self) -> dict:
        return super().get_environ() | {"fake.socket": self.socket}


def make_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="base")
    parser.add_argument("--token", default="")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--max-lora-rank", type=int, default=8)
    parser.add_argument("--max-loras", type=int, default=6)
    parser.add_argument("--latency-s", type=float, nargs=2, default=(0.0, 0.0))
    parser.add_argument("--text-bytes", type=int, default=2)
    parser.add_argument("--keep-alive-s", type=float, default=5.0)
    parser.add_argument("--cert", help="certificate and key: speak https")
    parser.add_argument("--key")
    return parser.parse_args(argv)


def main() -> None:
    args = make_args()
    Handler.keep_alive_s = args.keep_alive_s
    secure = {"certfile": args.cert, "keyfile": args.key} if args.cert else {}
    server = gevent.pywsgi.WSGIServer(
        ("127.0.0.1", args.port), create_app(args), handler_class=Handler, log=None, backlog=2048, **secure
    )
    server.start()
    print(f"fake replica: http://127.0.0.1:{server.server_port}", flush=True)
    stopped = gevent.event.Event()
    gevent.signal_handler(signal.SIGTERM, stopped.set)
    stopped.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
