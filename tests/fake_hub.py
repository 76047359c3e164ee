"""A Hub on one machine: the endpoints that launch.py's client calls, and Jobs that are local processes.

    python tests/fake_hub.py DIR            # prints its address; point HF_ENDPOINT there
    python tests/fake_hub.py launch FLAGS   # launch.py, with quick polls, and uploads over plain HTTP instead of Xet

A Job's command really runs, in a process group of its own. Its mounts are directories below DIR/buckets: the mount
paths in its command and environment are rewritten. `python3 -m pip` does nothing there, and `vllm` is a server that
is only healthy. An exposed port lies behind a gateway that demands the token. Jobs of a network group resolve each
other's aliases (sitecustomize.py). Files posted to /fake/overlay replace scripts in the Jobs' /code.

Failures: POST /fake/rules takes a list of {"match": regex on "METHOD /path role", "times": n or -1} with any of
`status` (and headers) instead of the answer, `after`: true to do the work first, `cut`: lines after which a log ends,
`delay_s`: to do it late, `ignore`: true to answer well and do nothing. "SCHEDULE role" matches a Job about to start,
which then never does.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import requests
from flask import Flask, Response, g, jsonify, request
from werkzeug.serving import make_server

ROOT = Path(__file__).resolve().parent.parent
TOKENS = {
    "hf_FAKEwriteTOKENx0123456789": {"name": "alice", "orgs": [{"name": "acme"}], "role": "write"},
    "hf_FAKEreadTOKENx01234567890": {"name": "alice", "orgs": [], "role": "read"},
}
HARDWARE = [{"name": name, "prettyName": name, "cpu": "1 vCPU", "ram": "1 GB", "unitCostMicroUSD": round(usd * 1e6),
             "unitCostUSD": usd, "unitLabel": "minute"} for name, usd in (("h200", 0.1), ("h200x2", 0.2))]  # fmt: skip
TERMINAL = ("COMPLETED", "CANCELED", "ERROR")
METHODS = ["GET", "POST", "DELETE"]
REPOSITORIES = {
    "/api/models": ([{"id": "acme/small"}], 200),
    "/api/datasets/acme/sums": ({"id": "acme/sums", "private": False}, 200),
    "/acme/small/resolve/main/config.json": (
        b'{"max_position_embeddings": 2048}', 200, {"ETag": '"1"', "X-Repo-Commit": "0" * 40}
    ),
}  # fmt: skip

PYTHON_SHIM = """#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then exit 0; fi
exec {python} "$@"
"""
VLLM_SHIM = """#!{python}
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_):
        print("asked with" if self.headers["Authorization"] else "asked without", "a token", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
NETWORK = """
import _socket, json
resolve = _socket.getaddrinfo
def getaddrinfo(host, port, *args, **kwargs):
    try:
        port = json.load(open({aliases!r})).get(host.decode() if isinstance(host, bytes) else host, port)
        host = "127.0.0.1" if isinstance(port, str) else host
    except (OSError, ValueError, AttributeError):
        pass
    return resolve(host, int(port) if isinstance(port, str) else port, *args, **kwargs)
_socket.getaddrinfo = getaddrinfo
"""


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def serve_in_thread(app: Flask):
    """A server of this machine for the app, already listening."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


class Job:
    """One Job: its specification, its log, and the process group that runs it."""

    def __init__(self, hub: "Hub", namespace: str, spec: dict):
        self.hub, self.namespace, self.spec, self.id = hub, namespace, spec, f"{len(hub.jobs):024x}"
        self.role = spec.get("labels", {}).get("role", "")
        self.stage, self.message, self.urls, self.cancels, self.log = "SCHEDULING", None, [], 0, []
        self.process, self.gateway, self.canceled = None, None, False
        self.created_at, self.running_since, self.ran_s = now(), time.monotonic(), 0

    def info(self) -> dict:
        """As the Hub shows it: without the values of secrets."""
        spec = self.spec
        ran_s = int(time.monotonic() - self.running_since) if self.stage == "RUNNING" else self.ran_s
        return {
            "id": self.id, "createdAt": self.created_at, "startedAt": None, "finishedAt": None,
            "dockerImage": spec.get("dockerImage"), "command": spec["command"], "arguments": spec["arguments"],
            "environment": spec["environment"], "secrets": dict.fromkeys(spec.get("secrets", {})),
            "flavor": spec["flavor"], "labels": spec.get("labels"), "volumes": spec.get("volumes"),
            "status": {"stage": self.stage, "message": self.message, "exposeUrls": self.urls or None},
            "durations": {"schedulingSecs": 0, "runningSecs": ran_s, "totalSecs": ran_s},
            "owner": {"id": "1", "name": self.namespace, "type": "user"}, "network": spec.get("network"),
        }  # fmt: skip

    def mounted(self, text: str) -> str:
        """The text with the mount paths in it replaced by the directories that stand for them."""
        for volume in self.spec.get("volumes", []):
            pattern = rf"(?<![\w./-]){re.escape(volume['mountPath'])}(?=[/\s\"']|$)"
            text = re.sub(pattern, str(self.hub.mount(volume)), text)
        return text

    def run(self) -> None:
        """Run the command to its end or its time limit; the stage says how it ended, and nothing of it is left."""
        volumes = self.spec.get("volumes", [])
        if self.hub.rule(f"SCHEDULE {self.role}"):
            return
        if self.canceled or not all(self.hub.mount(volume).is_dir() for volume in volumes):
            return self.end("CANCELED" if self.canceled else "ERROR", "cannot be mounted")
        for name, text in self.hub.overlay.items():
            code = next(volume for volume in volumes if volume["mountPath"] == "/code")
            (self.hub.mount(code) / name).write_text(text)
        command = [self.mounted(word) for word in self.spec["command"]]
        self.running_since = time.monotonic()
        self.process = subprocess.Popen(command, env=self.environment(), stdin=subprocess.DEVNULL, cwd=self.hub.home,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        start_new_session=True)  # fmt: skip
        self.stage = "RUNNING"
        threading.Thread(target=self.read_log, daemon=True).start()
        try:
            code = self.process.wait(self.spec.get("timeoutSeconds", 1800))
        except subprocess.TimeoutExpired:
            code = "timeout"
        self.send(signal.SIGKILL)
        stage = "CANCELED" if self.canceled else "COMPLETED" if code == 0 else "ERROR"
        self.end(stage, f"Job failed with exit code: {code}" if stage == "ERROR" else None)

    def read_log(self) -> None:
        for line in self.process.stdout:
            self.log.append({"timestamp": now(), "data": line.decode(errors="replace").rstrip("\n")})

    def environment(self) -> dict[str, str]:
        """What the process sees: the platform's variables, the Job's own, its secrets; ports become free ones."""
        from jobs.local import free_port

        hub, network = self.hub, self.spec.get("network")
        env = {"PATH": f"{hub.bin}:/usr/bin:/bin", "HOME": str(hub.home), "JOB_ID": self.id, "HF_ENDPOINT": hub.url,
               "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # fmt: skip
        env |= {name: self.mounted(value) for name, value in self.spec["environment"].items()}
        env |= self.spec.get("secrets", {})
        if "PORT" in env:
            env |= {"PORT": str(free_port()), "HOST": "127.0.0.1"}
        if network:
            prefix = f"{network['group']}.group."
            path = os.pathsep.join([str(hub.network), env.get("PYTHONPATH", "")])
            env |= {"HF_NETWORK_GROUP_PREFIX": prefix, "PYTHONPATH": path}
            hub.aliases |= {prefix + alias: env["PORT"] for alias in network.get("aliases", [])}
            (hub.network / "aliases.json").write_text(json.dumps(hub.aliases))
        if self.spec.get("expose"):
            self.gateway = serve_in_thread(gateway(hub, self.role, env["PORT"]))
            self.urls = [f"http://127.0.0.1:{self.gateway.server_port}"]
        return env

    def cancel(self) -> None:
        self.canceled = True
        if self.process is None:
            return self.end("CANCELED", None)
        self.send(signal.SIGTERM)
        psutil.wait_procs(self.processes(), timeout=10)
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                process.send_signal(number)

    def end(self, stage: str, message: str | None) -> None:
        self.ran_s = int(time.monotonic() - self.running_since)
        self.stage, self.message = stage, message
        if self.gateway:
            self.gateway.shutdown()

    def processes(self) -> list[psutil.Process]:
        """What lives of the Job's process group."""
        found = []
        for pid in psutil.pids() if self.process else []:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(pid) == self.process.pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(psutil.Process(pid))
        return found


class Hub:
    """Everything the Hub knows, and the directory it lies in."""

    def __init__(self, directory: Path):
        self.buckets, self.home, self.bin = directory / "buckets", directory / "home", directory / "bin"
        self.network, self.aliases, self.lock, self.url = directory / "network", {}, threading.RLock(), ""
        self.jobs, self.rules, self.requests, self.overlay = [], [], [], {}  # requests: (seconds, what)
        for path in (self.buckets, self.home, self.bin, self.network):
            path.mkdir(parents=True)
        for name, text in (("python3", PYTHON_SHIM), ("vllm", VLLM_SHIM)):
            (self.bin / name).write_text(text.format(python=sys.executable))
            (self.bin / name).chmod(0o755)
        (self.network / "sitecustomize.py").write_text(NETWORK.format(aliases=str(self.network / "aliases.json")))

    def mount(self, volume: dict) -> Path:
        return self.buckets / volume["source"] / volume.get("path", "")

    def rule(self, what: str) -> dict | None:
        """The first rule that matches and is not used up."""
        with self.lock:
            for rule in self.rules:
                if rule.get("times", 1) != 0 and re.search(rule["match"], what):
                    rule["times"] = rule.get("times", 1) - 1
                    return rule
        return None

    def reset(self) -> None:
        """End every Job and forget everything but the buckets."""
        for job in self.jobs:
            job.canceled = True
            job.send(signal.SIGKILL)
        self.jobs, self.rules, self.requests, self.overlay = [], [], [], {}

    def state(self) -> dict:
        jobs = [{**job.info(), "role": job.role, "namespace": job.namespace, "cancels": job.cancels,
                 "timeout": job.spec.get("timeoutSeconds"), "log": [event["data"] for event in job.log],
                 "processes": [p.pid for p in job.processes()]} for job in list(self.jobs)]  # fmt: skip
        return {"jobs": jobs, "requests": list(self.requests)}


def hub_app(hub: Hub) -> Flask:
    """The Hub's endpoints, behind the rules; and what tests ask of the fake itself, below /fake."""
    app = Flask("hub")

    @app.before_request
    def before():
        g.rule = {}
        if request.path.startswith("/fake/"):
            return None
        found = re.match(r"/api/jobs/([^/]+)/([0-9a-f]{24})", request.path)
        g.job = next((job for job in hub.jobs if found and (job.namespace, job.id) == found.groups()), None)
        sent = request.get_json(silent=True) or {}
        role = g.job.role if g.job else sent.get("labels", {}).get("role", "")
        what = f"{request.method} {request.path} {role}".strip()
        hub.requests.append((time.monotonic(), what))
        g.rule = hub.rule(what) or {}
        time.sleep(g.rule.get("delay_s", 0))
        if g.rule.get("ignore"):
            return {}
        if "status" in g.rule and not g.rule.get("after"):
            return {"error": "as told"}, g.rule["status"], g.rule.get("headers", {})
        g.owner = TOKENS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if g.owner is None:
            return {"error": "Invalid credentials in Authorization header"}, 401
        space = re.match(r"/api/(jobs|buckets)/(?!hardware$)([^/]+)", request.path)
        if space and space[2] not in [g.owner["name"], *(org["name"] for org in g.owner["orgs"])]:
            return {"error": f"no access to {space[2]}"}, 403
        return None

    @app.after_request
    def after(response):
        return Response('{"error": "as told"}', g.rule["status"]) if g.rule.get("after") else response

    @app.get("/api/whoami-v2")
    def whoami():
        return {"id": "1", "type": "user", **g.owner, "auth": {"accessToken": {"role": g.owner["role"]}}}

    @app.get("/api/jobs/hardware")
    def hardware():
        return jsonify(HARDWARE)

    @app.post("/api/jobs/<namespace>")
    def create(namespace):
        with hub.lock:
            job = Job(hub, namespace, request.get_json())
            hub.jobs.append(job)
        threading.Thread(target=job.run, daemon=True).start()
        return job.info()

    @app.get("/api/jobs/<namespace>")
    def page(namespace):  # two a page
        wanted = [label.split("=", 1) for label in request.args.getlist("label")]
        jobs = [job.info() for job in hub.jobs if job.namespace == namespace
                and all(job.spec.get("labels", {}).get(name) == value for name, value in wanted)]  # fmt: skip
        begin = int(request.args.get("cursor", 0))
        labels = "".join(f"&label={name}%3D{value}" for name, value in wanted)
        link = f'<{hub.url}{request.path}?cursor={begin + 2}{labels}>; rel="next"'
        return jsonify(jobs[begin : begin + 2]), 200, {"Link": link} if len(jobs) > begin + 2 else {}

    @app.get("/api/jobs/<_>/<job_id>")
    def inspect(_, job_id):
        return g.job.info()

    @app.post("/api/jobs/<_>/<job_id>/cancel")
    def cancel(_, job_id):
        g.job.cancels += 1
        threading.Thread(target=g.job.cancel, daemon=True).start()
        return g.job.info()

    @app.get("/api/jobs/<_>/<job_id>/logs")
    def logs(_, job_id):
        return Response(
            events(g.job, int(request.args.get("tail", 0)), g.rule.get("cut")), mimetype="text/event-stream"
        )

    @app.post("/api/buckets/<namespace>/<name>")
    def bucket(namespace, name):
        (hub.buckets / namespace / name).mkdir(parents=True, exist_ok=True)
        return {"url": f"{hub.url}/buckets/{namespace}/{name}"}

    @app.errorhandler(404)
    def repository(_):  # acme/small is the one model, acme/sums the one dataset
        found = REPOSITORIES.get(request.path)
        return found or ({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    @app.post("/files/<path:name>")
    def store(name):
        path = hub.buckets / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_bytes(request.get_data())
        path.with_suffix(".part").rename(path)
        return {}

    @app.get("/files/<path:name>")
    def fetch(name):
        path = hub.buckets / name
        return path.read_bytes() if path.exists() else ("", 404)

    @app.post("/fake/<path:word>")
    def control(word):
        sent = request.get_json(silent=True)
        if word == "rules":
            hub.rules += sent
        elif word == "overlay":
            hub.overlay |= sent
        elif word == "forgive":
            hub.rules = []
        elif word == "reset":
            hub.reset()
        elif word.startswith("end/"):
            next(job for job in hub.jobs if job.id == word.removeprefix("end/")).send(signal.SIGKILL)
        return hub.state() if word == "state" else {}

    return app


def events(job: Job, tail: int, cut: int | None):
    """The log as server-sent events, until the Job has ended, or after `cut` lines."""
    sent, ended = max(0, len(job.log) - tail) if tail else 0, False
    while not ended and (cut is None or sent < cut):
        ended = job.stage in TERMINAL  # looked at before the last lines
        for event in job.log[sent:cut]:
            yield f"data: {json.dumps(event)}\n\n"
            sent += 1
        time.sleep(0.05)


def gateway(hub: Hub, role: str, port: str) -> Flask:
    """An exposed port: passes requests on to a port of this machine, for those who have the token."""
    app = Flask("gateway")

    @app.route("/<path:path>", methods=METHODS)
    def forward(path):
        if rule := hub.rule(f"GATEWAY {request.method} /{path} {role}"):
            return {"error": "as told"}, rule["status"], rule.get("headers", {})
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in TOKENS:
            return {"error": "a token with read access to the Job is needed"}, 401
        headers = {key: value for key, value in request.headers if key not in ("Authorization", "Host")}
        url = f"http://127.0.0.1:{port}/{path}"
        try:
            answer = requests.request(request.method, url, data=request.get_data(), headers=headers, timeout=60)
        except requests.RequestException:
            return {"error": "nothing listens there"}, 502
        return answer.content, answer.status_code, {"Content-Type": answer.headers.get("Content-Type", "")}

    return app


def serve(directory: Path) -> None:
    """Serve until SIGTERM; then end every Job."""
    shutil.rmtree(directory, ignore_errors=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    hub, ended = Hub(directory), threading.Event()
    server = serve_in_thread(hub_app(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print(hub.url, flush=True)
    ended.wait()
    hub.reset()


def launch() -> int:
    """launch.py with quick polls and little patience, and with uploads that need no Xet."""
    import dataclasses

    from huggingface_hub import HfApi, get_session
    from huggingface_hub.utils import hf_raise_for_status

    import launch

    def batch_bucket_files(self, bucket_id, *, add, **_):
        for data, name in add:
            url = f"{self.endpoint}/files/{bucket_id}/{name}"
            hf_raise_for_status(get_session().post(url, content=data, headers=self._build_hf_headers()))

    def sync_job_volume(self, source, mount_path, *, remote_name, namespace):
        files = [path for path in Path(source).rglob("*") if path.is_file()]
        add = [(path.read_bytes(), f"{remote_name}/{path.relative_to(source)}") for path in files]
        batch_bucket_files(self, f"{namespace}/jobs-artifacts", add=add)

    def download_bucket_files(self, bucket_id, files, **_):
        for name, copy in files:
            answer = get_session().get(f"{self.endpoint}/files/{bucket_id}/{name}", headers=self._build_hf_headers())
            if answer.status_code == 200:
                Path(copy).write_bytes(answer.content)

    HfApi.download_bucket_files = download_bucket_files
    HfApi.batch_bucket_files, HfApi.sync_job_volume = batch_bucket_files, sync_job_volume
    patience_s = float(os.environ.get("PATIENCE_S", "4"))
    launch.HF_PLACE = dataclasses.replace(launch.HF_PLACE, poll_s=0.2, patience_s=patience_s)
    return launch.main()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1] == "launch":
        del sys.argv[1]
        sys.exit(launch())
    serve(Path(sys.argv[1]))
