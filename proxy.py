"""N vLLM replicas behind one address: adapters are loaded on all of them or on none, prompts go where their prefix is.

    HF_TOKEN=... python proxy.py --replicas http://127.0.0.1:9001,http://127.0.0.1:9002 --port 8000 --bucket DIR

- Completions are routed to one ready replica, and sent again elsewhere if it dies under them.
- Loads, unloads, pause and resume change a table; a thread for each replica (serving/fleet.py) makes it so there. A
  load waits until every ready replica has the policy and has shown, by its logprobs for a short canary, that it serves
  those weights; one that fails anywhere is taken out of the table, and so undone everywhere.
- Everything else is forwarded to one ready replica: clients see a single vLLM server.

Departs from a plain reverse proxy: it sends its own $HF_TOKEN, never the client's Authorization, follows no redirects,
and refuses what vLLM would answer from other weights than asked for (no model, an unknown or retired policy).

The status page is /, the same as JSON /proxy/stats, for Prometheus /metrics. Replicas may come and go meanwhile:
POST /proxy/replicas {"url": ..., "id": ..., "job": ...}, DELETE /proxy/replicas/<id>.
"""

import os
import random
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

from flask import Flask, Response, render_template_string, request
from werkzeug.serving import WSGIRequestHandler, make_server

from config import config_from, fail, make_parser
from report.proxy_page import PAGE, metrics, stats
from serving import vllm
from serving.fleet import TOKEN_REFUSED, Answer, Call, Fleet, Policy, Replica, look_after, lose
from serving.routing import block_hashes
from serving.vllm import ApiError

MAX_SENDS = 4  # of one request, to replicas that break
WATCH_EVERY_S = 0.25
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
NOT_SENT_ON = {"host", "authorization", "content-length", "expect", "accept-encoding"}  # the proxy sets its own
NOT_COPIED = {"content-length", "date", "server"}  # of answers, for the same reason


# --- control calls: the table changes --------------------------------------------------------------------------------


def load(fleet: Fleet, policy: Policy) -> None:
    """Put a policy into the table and wait until every ready replica has it, or take it out again and ApiError."""
    name, wait_s, attempt = policy.name, fleet.cfg.load_deadline_s, vllm.attempt_of(policy.name)

    def lacking() -> list[Replica]:  # what is loaded in a pause is checked, and live, when that ends
        return [r for r in fleet.ready() if r.loaded.get(name) != policy.path or not (fleet.pause or name in r.checked)]

    def done() -> bool:
        return policy.state != "loading" or (fleet.pause and fleet.ready() and not lacking())

    with fleet.control:
        if not fleet.wait(fleet.ready, wait_s):
            raise fleet.unavailable(f"no replica is ready to load {name}")
        with fleet.lock:
            if is_there(fleet, policy):
                return
            for replica in fleet.ready():
                replica.reason = ""
            fleet.policies[name] = policy
            fleet.stir()
        if not fleet.wait(done, wait_s):
            late = lacking()
            why = "; ".join(f"{replica} has not loaded {name} within {wait_s:g} s: {replica.reason or 'no answer'}"
                            for replica in late) or str(fleet.unavailable("no replica is ready"))  # fmt: skip
            fleet.retire(policy, ApiError(504, f"{why} (is the bucket mounted there, and {policy.path} complete?)"))
            for replica in late:
                if not replica.reason and replica.loaded.get(name) == "":  # it hangs in the load
                    lose(fleet, replica, f"it did not answer the load of {name}")
        if policy.error:
            fleet.wait(lambda: fleet.policies.get(name) is not policy)
            raise policy.error
        for other in list(fleet.policies.values()):
            if attempt and (vllm.attempt_of(other.name) or attempt) < attempt:
                fleet.retire(other)


def is_there(fleet: Fleet, policy: Policy) -> bool:
    """Whether a load repeats one that succeeded; ApiError if the policy may not be loaded."""
    name, known, attempt = policy.name, fleet.policies.get(policy.name), vllm.attempt_of(policy.name)
    if name in fleet.base_models:
        raise ApiError(400, f"{name} is the base model's name: requests for the base model would get the adapter")
    for run, newest in filter(None, map(vllm.attempt_of, fleet.policies)) if attempt else ():
        if run != attempt[0]:
            raise ApiError(409, f"this proxy serves the run {run}, not {attempt[0]}: give each run its own --port")
        if newest > attempt[1]:
            raise ApiError(409, f"{name} is of attempt {attempt[1]}, but attempt {newest} has taken over")
    if known and known.state != "retiring" and known.path == policy.path and attempt:
        return True
    if known:
        raise ApiError(400, f"The lora adapter '{name}' has already been loaded from {known.path}")
    return False


def unload(fleet: Fleet, name: str) -> None:
    """Retire a policy and wait until every ready replica has unloaded it; ApiError if that takes too long."""
    policy = fleet.policies.get(name)
    if name in fleet.base_models:
        raise ApiError(400, f"{name} is the base model: it cannot be unloaded")
    if policy is None:
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
    fleet.retire(policy)
    if not fleet.wait(lambda: fleet.policies.get(name) is not policy):
        raise ApiError(503, f"{name} is retired, but {policy.inflight} requests that name it are still in flight; "
                       "ask again later", 1)  # fmt: skip


def tell_all(fleet: Fleet, path: str, target: str) -> None:
    """Pause, resume or reset all ready replicas; if one refuses ApiError, and a pause is taken back."""

    def tell(replica: Replica) -> ApiError | None:
        try:
            answer = replica.control("POST", target)
        except ApiError as err:  # it joins anew, and as the others are
            return lose(fleet, replica, str(err))
        bad = answer.status != 200
        return ApiError(answer.status, f"{replica} refuses {path}: {vllm.said(answer.body)}") if bad else None

    with fleet.control, ThreadPoolExecutor() as pool:
        replicas = fleet.ready()
        for replica in replicas:
            replica.progress_s = time.monotonic()  # nothing finishes in a pause
        if path != "/reset_prefix_cache":  # before they are told: one that joins meanwhile does likewise
            fleet.pause = target if path == "/pause" else ""
        else:
            fleet.router.blocks.clear()
        errors = list(pool.map(tell, replicas))
        error = next(filter(None, errors), None)
        if path == "/resume" or (path == "/pause" and error):
            fleet.pause, target = "", "/resume"
            for replica, bad in zip(replicas, errors if path == "/resume" else pool.map(tell, replicas), strict=True):
                if bad:  # it must not get requests
                    lose(fleet, replica, str(bad))
            error = settle(fleet) if path == "/resume" else error
        if not fleet.ready():
            raise fleet.unavailable(f"no replica is ready for {path}")
        if error:
            raise error


def settle(fleet: Fleet) -> ApiError | None:
    """After a pause: wait until what was loaded in it is checked; what went wrong with it."""
    with fleet.lock:
        held = [policy for policy in fleet.policies.values() if policy.state == "loading"]
        fleet.stir()
    fleet.wait(lambda: all(policy.state != "loading" for policy in held))
    return next((policy.error for policy in held if policy.error), None)


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A client's request: what is sent on, and what routing needs to know of it."""

    method: str
    target: str  # path and query
    headers: dict[str, str]
    body: bytes
    gone: Callable[[], bool]  # whether the client has left
    model: str | None = None  # the policy or base model it names
    ids: list[int] | None = None  # its prompt, if that is one list of token ids
    num: int = 0  # completions it asks for
    stream: bool = False


def has_left(client: socket.socket) -> bool:
    """Whether a client has closed its connection."""
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def watch(fleet: Fleet) -> None:
    """End the calls whose client has left, or which take too long."""
    while True:
        time.sleep(WATCH_EVERY_S)
        for call in [call for replica in list(fleet.replicas.values()) for call in list(replica.calls)]:
            if time.monotonic() > call.deadline:
                call.cut(ApiError(504, f"no answer in {call.timeout_s:g} s"))
            elif call.gone():
                call.cut(ApiError(408, "the client left"))


def answer(fleet: Fleet, ask: Ask) -> Response:
    """Answer a request from one ready replica; what is counted for it is counted off when its answer is sent."""
    with ExitStack() as stack:
        with fleet.lock:
            if fleet.num_requests >= fleet.cfg.max_inflight:
                raise ApiError(503, f"{fleet.num_requests} requests are in flight; raise --max-inflight", 1)
            fleet.count(None, 1)
        stack.callback(fleet.count, None, -1)
        policy = admit(fleet, ask)
        if policy:
            stack.callback(fleet.count, policy, -1)
        replica, got = send(fleet, ask, policy, stack)
        if isinstance(got, ApiError):
            raise got
        headers = [*vllm.end_to_end(got.headers, NOT_COPIED), ("X-Replica", replica.id)]
        response = Response(got.body, got.status, headers)
        if not isinstance(got.body, bytes):
            response.call_on_close(stack.pop_all().close)
        return response


def admit(fleet: Fleet, ask: Ask) -> Policy | None:
    """The live policy that a request names, counted in flight there; None if it is the base model, or none is named.

    One that names a policy on its way in waits for it; ApiError for other names, which must not reach an engine.
    """

    def known() -> bool:
        policy = fleet.policies.get(ask.model)
        return policy.state != "loading" if policy else bool(fleet.base_models) or fleet.denied()

    with fleet.lock:
        if ask.model is None:
            return None
        fleet.wait(known, fleet.cfg.no_replica_wait_s, ask.gone)
        policy = fleet.policies.get(ask.model)
        if policy and policy.state == "live":
            fleet.count(policy, 1)
            return policy
        if ask.model in fleet.base_models:
            return None
        if not fleet.base_models:
            raise fleet.unavailable("no replica can answer")
        raise ApiError(404, f"The model `{ask.model}` does not exist.")  # vLLM's own words


def send(fleet: Fleet, ask: Ask, policy: Policy | None, stack: ExitStack) -> tuple[Replica, Answer | ApiError]:
    """Send a request to the best replica, and elsewhere if that one breaks, or later if it is busy."""
    tried, give_up_at = list[Replica](), time.monotonic() + fleet.cfg.no_replica_wait_s
    hashes = block_hashes(ask.model or "", ask.ids)
    repeatable = ask.method == "GET" or ask.num > 0
    while True:
        call = begin(fleet, ask, policy, hashes, tried)
        stack.callback(call.finish)
        got, again = attempt(fleet, ask, policy, call)
        tried += [call.replica] if again == "elsewhere" else []
        if not again or not repeatable or len(tried) >= MAX_SENDS or time.monotonic() > give_up_at:
            return call.replica, got
        call.finish()
        with fleet.lock:
            fleet.counts["sent again"] += 1


def begin(fleet: Fleet, ask: Ask, policy: Policy | None, hashes: list[int], tried: list[Replica]) -> Call:
    """Choose a replica and begin a call to it: if possible one that has not failed it; ApiError if none is ready."""

    def candidates() -> list[Replica]:
        now = time.monotonic()
        return [r for r in fleet.ready() if r.free_at <= now and (policy is None or policy.name in r.checked)]

    with fleet.lock:
        fleet.wait(lambda: candidates() or fleet.denied(), fleet.cfg.no_replica_wait_s, ask.gone)
        found = candidates()
        if not found:
            raise fleet.unavailable("no replica can answer")
        found = [replica for replica in found if replica not in tried] or found  # one that fails at once looks idle
        if ask.num:
            everyone = sum(replica.bit for replica in fleet.ready())
            replica = fleet.router.choose(hashes, found, everyone, fleet.cfg.max_imbalance)
            fleet.router.note(ask.model, hashes, replica.bit)
        else:
            replica = fleet.router.least_loaded(found)
        return Call(replica, fleet.cfg.request_timeout_s, ask.num, ask.gone)


def attempt(fleet: Fleet, ask: Ask, policy: Policy | None, call: Call) -> tuple[Answer | ApiError, str]:
    """One try: what came of it, and whether to try again: elsewhere, later, or not ("")."""
    replica = call.replica
    try:
        got = call.answer(ask.method, ask.target, ask.headers, ask.body, ask.stream)
    except ApiError as err:
        if err.status == 502:
            fleet.suspect(replica)
        return ApiError(err.status, f"{replica}: {err}"), "elsewhere" if err.status == 502 else ""
    text = "" if got.status < 300 else vllm.said(got.body)
    verdict = vllm.answer_verdict(got.status, text)
    if verdict == "dead" or (verdict == "forgot" and policy):
        lose(fleet, replica, text)
        return got, "elsewhere"
    if verdict == "busy":
        if got.status != 429 and not fleet.suspect(replica):
            return got, "elsewhere"
        replica.free_at = time.monotonic() + vllm.retry_after_s(got.headers, time.time()) * random.uniform(1, 1.25)
        return got, "later"
    if verdict == "moved":
        return ApiError(502, f"{replica} redirects, which is not followed: check its URL and HF_TOKEN"), ""
    if verdict == "token":
        return ApiError(got.status, f"{replica}: {TOKEN_REFUSED.format(got.status)}"), ""
    return got, ""


# --- the server ------------------------------------------------------------------------------------------------------


def create_app(fleet: Fleet) -> Flask:
    """The routes."""
    app = Flask(__name__, static_folder=None)
    add_control_routes(app, fleet)
    add_pages(app, fleet)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    def completions() -> Response:
        body = request.get_data()
        return answer(fleet, asked(body, **vllm.read_completion(body)))

    @app.route("/<path:_>", methods=METHODS, provide_automatic_options=False)
    def everything_else(_: str) -> Response:
        body = request.get_data()
        return answer(fleet, asked(body, model=vllm.named_model(body)))

    @app.errorhandler(ApiError)
    def refused(err: ApiError) -> tuple:
        return err.body(), err.status, {"Retry-After": str(err.retry_after_s)} if err.retry_after_s else {}

    @app.after_request
    def without_token(response: Response) -> Response:
        if not response.is_streamed and fleet.token and fleet.token.encode() in response.get_data():
            response.set_data(response.get_data().replace(fleet.token.encode(), b"***"))
        return response

    return app


def asked(body: bytes, **known: object) -> Ask:
    """The request that Flask is at, as it is sent on."""
    query = "?" + request.query_string.decode("latin-1") if request.query_string else ""
    headers = dict(vllm.end_to_end(request.headers.items(), NOT_SENT_ON))
    gone = partial(has_left, request.environ["werkzeug.socket"])
    return Ask(request.method, quote(request.path) + query, headers, body, gone, **known)


def add_pages(app: Flask, fleet: Fleet) -> None:
    """What the proxy says of itself."""

    @app.get("/")
    def page() -> str:
        return render_template_string(PAGE, now=time.time(), **stats(fleet))

    @app.get("/proxy/stats")
    def stats_page() -> dict:
        return stats(fleet)

    @app.get("/metrics")
    def metrics_page() -> Response:
        return Response(metrics(stats(fleet)), mimetype="text/plain")

    @app.get("/health")
    @app.get("/ping")
    def health() -> tuple:
        num_ready = len(fleet.ready())
        others = {str(r): f"{r.state}: {r.reason}" for r in fleet.replicas.values() if r.state != "ready"}
        return {"ready": num_ready, "others": others}, 200 if num_ready else 503


def add_control_routes(app: Flask, fleet: Fleet) -> None:
    """What concerns every replica, and which there are."""

    @app.post("/v1/load_lora_adapter")
    def load_policy() -> Response:
        policy = Policy(*vllm.read_load(request.get_data(), fleet.bucket))
        load(fleet, policy)
        return Response(f"Success: LoRA adapter '{policy.name}' added successfully.", mimetype="text/plain")

    @app.post("/v1/unload_lora_adapter")
    def unload_policy() -> Response:
        name = vllm.read_json(request.get_data()).get("lora_name")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "an unload needs lora_name")
        unload(fleet, name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", mimetype="text/plain")

    @app.post("/pause")
    @app.post("/resume")
    @app.post("/reset_prefix_cache")
    def control_all() -> dict:
        tell_all(fleet, request.path, request.full_path.rstrip("?"))
        return {"status": {"/pause": "paused", "/resume": "resumed"}.get(request.path, "reset")}

    @app.post("/proxy/replicas")
    def new_replica() -> dict:
        if not request.is_json:  # so that no web page can add one: the token is sent to replicas
            raise ApiError(415, "send the replica as JSON, with Content-Type: application/json")
        wanted = vllm.read_json(request.get_data())
        replica = add_replica(fleet, wanted.get("url"), wanted.get("id"), wanted.get("job"))
        start(look_after, fleet, replica)
        return {"id": replica.id}

    @app.delete("/proxy/replicas/<name>")
    def drain_replica(name: str) -> dict:
        with fleet.lock:
            replica = fleet.replicas.get(name)
            if replica is None:
                raise ApiError(404, f"there is no replica {name}")
            replica.state, replica.reason = "draining", "asked to leave"
            fleet.stir()
            return {"id": name, "inflight": replica.inflight}


def add_replica(fleet: Fleet, url: object, name: object = None, job: object = None) -> Replica:
    """A new replica, still to be looked after; ApiError if its URL is not one or is taken."""
    if not isinstance(url, str) or not re.fullmatch(r"https?://[\w.-]+(:\d{1,5})?(/[\w./-]*)?", url):
        raise ApiError(400, f"replica URL {url!r}: must be like http://host:port or https://host")
    with fleet.lock:
        taken = fleet.replicas
        name = str(name) if name is not None else next(str(i) for i in range(len(taken) + 1) if str(i) not in taken)
        same = next((replica for replica in taken.values() if replica.url == url.rstrip("/")), taken.get(name))
        if same:
            raise ApiError(409, f"{same} is there already: remove it first")
        bits = sum(replica.bit for replica in taken.values())
        replica = taken[name] = Replica(fleet, name, url, str(job or ""), ~bits & (bits + 1))
    return replica


def start(function: Callable, *arguments: object) -> None:
    """Run a function in a thread that ends with the process."""
    threading.Thread(target=function, args=arguments, daemon=True).start()


class Handler(WSGIRequestHandler):
    """Answers one request, without a line in a log and without waiting for full packets."""

    disable_nagle_algorithm = True

    def log_request(self, *_: object) -> None:
        pass


def main() -> None:
    parser = make_parser(__doc__, without=("replicas",))
    parser.add_argument("--replicas", default="", help="URLs of vLLM servers, joined by commas; more can join later")
    args = parser.parse_args()
    urls = [url.strip() for url in vars(args).pop("replicas").split(",") if url.strip()]
    cfg, token = config_from(args), os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch(r"[!-~]*", token):
        fail("HF_TOKEN holds characters that no token has: set it again")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * cfg.max_inflight + 1024  # two sockets for each request, with room
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    fleet = Fleet(cfg, token)
    try:
        listener = socket.create_server((cfg.host, cfg.port), backlog=cfg.max_inflight)
        for url in urls:
            add_replica(fleet, url)
    except ApiError as err:
        fail(str(err))
    except OSError as err:
        fail(f"--host {cfg.host} --port {cfg.port}: {os.strerror(err.errno) if err.errno else err}")
    server = make_server(
        cfg.host, cfg.port, create_app(fleet), threaded=True, request_handler=Handler, fd=listener.fileno()
    )
    print(f"proxy: listening on http://{cfg.host}:{server.port}", flush=True)
    start(watch, fleet)
    for replica in fleet.replicas.values():
        start(look_after, fleet, replica)
    server.serve_forever()


if __name__ == "__main__":
    main()
