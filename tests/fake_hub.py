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
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
from conftest import free_port

ROOT = Path(__file__).resolve().parent.parent
TOKENS = {
    "hf_FAKEwriteTOKENx0123456789": {"name": "alice", "orgs": [{"name": "acme"}], "role": "write"},
    "hf_FAKEreadTOKENx01234567890": {"name": "alice", "orgs": [], "role": "read"},
}
HARDWARE = [{"name": name, "prettyName": name, "cpu": "1 vCPU", "ram": "1 GB", "unitCostMicroUSD": round(usd * 1e6),
             "unitCostUSD": usd, "unitLabel": "minute"} for name, usd in (("h200", 0.1), ("h200x2", 0.2))]  # fmt: skip
TERMINAL = ("COMPLETED", "CANCELED", "ERROR")

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


class Job:
    """One Job: its specification, its log, and the process group that runs it."""

    def __init__(self, hub: "Hub", namespace: str, spec: dict):
        self.hub, self.namespace, self.spec = hub, namespace, spec
        self.id = f"{len(hub.jobs):024x}"
        self.role = spec.get("labels", {}).get("role", "")
        self.stage, self.message, self.urls, self.cancels = "SCHEDULING", None, [], 0
        self.created_at, self.started_at, self.finished_at = now(), None, None
        self.log: list[dict] = []
        self.process, self.gateway, self.canceled = None, None, False
        self.running_since, self.ran_s = time.monotonic(), 0

    def info(self) -> dict:
        """As the Hub shows it: without the values of secrets."""
        spec, network = self.spec, self.spec.get("network")
        ran_s = int(time.monotonic() - self.running_since) if self.stage == "RUNNING" else self.ran_s
        return {
            "id": self.id, "createdAt": self.created_at, "startedAt": self.started_at, "finishedAt": self.finished_at,
            "dockerImage": spec.get("dockerImage"), "command": spec["command"], "arguments": spec["arguments"],
            "environment": spec["environment"], "secrets": dict.fromkeys(spec.get("secrets", {})),
            "flavor": spec["flavor"], "labels": spec.get("labels"), "volumes": spec.get("volumes"),
            "status": {"stage": self.stage, "message": self.message, "exposeUrls": self.urls or None},
            "durations": {"schedulingSecs": 0, "runningSecs": ran_s, "totalSecs": ran_s},
            "owner": {"id": "1", "name": self.namespace, "type": "user"}, "network": network,
        }  # fmt: skip

    def mounted(self, text: str) -> str:
        """The text with the mount paths in it replaced by the directories that stand for them."""
        for volume in self.spec.get("volumes", []):
            pattern = rf"(?<![\w./-]){re.escape(volume['mountPath'])}(?=[/\s\"']|$)"
            text = re.sub(pattern, str(self.hub.mount(volume)), text)
        return text

    def start(self) -> None:
        """Run the command until it ends; the stage says how it ended."""
        if self.hub.rule(f"SCHEDULE {self.role}"):
            return
        missing = [v for v in self.spec.get("volumes", []) if not self.hub.mount(v).is_dir()]
        if missing or self.canceled:
            return self.end("CANCELED" if self.canceled else "ERROR", f"cannot mount {missing}" if missing else None)
        for volume in self.spec.get("volumes", []):
            if volume["mountPath"] == "/code":
                self.hub.overlay_onto(self.hub.mount(volume))
        env = self.environment()
        command = [self.mounted(word) for word in self.spec["command"]]
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=self.hub.home,
        )  # fmt: skip
        self.stage, self.started_at, self.running_since = "RUNNING", now(), time.monotonic()
        self.say(f"===== Job started at {now()} =====")
        threading.Thread(target=self.wait, daemon=True).start()
        for line in self.process.stdout:
            self.say(line.decode(errors="replace").rstrip("\n"))

    def environment(self) -> dict[str, str]:
        """What the process sees: the platform's variables, the Job's own, its secrets; ports become free ones."""
        hub = self.hub
        env = {"PATH": f"{hub.bin}:/usr/bin:/bin", "HOME": str(hub.home), "JOB_ID": self.id, "HF_ENDPOINT": hub.url,
               "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # fmt: skip
        env |= {name: self.mounted(value) for name, value in self.spec["environment"].items()}
        env |= self.spec.get("secrets", {})
        if "PORT" in env:
            env |= {"PORT": str(free_port()), "HOST": "127.0.0.1"}
        network = self.spec.get("network")
        if network:
            prefix = f"{network['group']}.group."
            env |= {"HF_NETWORK_GROUP_PREFIX": prefix, "PYTHONPATH": str(hub.network)}
            hub.join(prefix, network.get("aliases", []), env.get("PORT", ""))
        if self.spec.get("expose"):
            self.gateway = Gateway(hub, self.role, int(env["PORT"]))
            self.urls = [self.gateway.url]
        return env

    def say(self, text: str) -> None:
        self.log.append({"timestamp": now(), "data": text})

    def wait(self) -> None:
        """Wait for the end or the time limit; what the command leaves behind ends with it."""
        try:
            code = self.process.wait(self.spec.get("timeoutSeconds", 1800))
        except subprocess.TimeoutExpired:
            code = "timeout"
        self.kill()
        if self.canceled:
            return self.end("CANCELED", None)
        self.end("COMPLETED" if code == 0 else "ERROR", None if code == 0 else f"Job failed with exit code: {code}")

    def cancel(self) -> None:
        self.canceled = True
        if self.process is None:
            return self.end("CANCELED", None)
        self.send(signal.SIGTERM)
        psutil.wait_procs(self.processes(), timeout=10)
        self.kill()

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                process.send_signal(number)

    def end(self, stage: str, message: str | None) -> None:
        self.ran_s = int(time.monotonic() - self.running_since) if self.started_at else 0
        self.stage, self.message, self.finished_at = stage, message, now()
        if self.gateway:
            self.gateway.shutdown()

    def processes(self) -> list[psutil.Process]:
        """What lives of the Job's process group."""
        found = []
        for pid in psutil.pids() if self.process else []:
            try:
                if os.getpgid(pid) == self.process.pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(psutil.Process(pid))
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        return found


class Hub:
    """Everything the Hub knows, and the directory it lies in."""

    def __init__(self, directory: Path):
        self.buckets, self.home, self.bin = directory / "buckets", directory / "home", directory / "bin"
        self.network, self.aliases = directory / "network", {}
        self.jobs: list[Job] = []
        self.rules: list[dict] = []
        self.requests: list[tuple[float, str]] = []  # seconds, what
        self.overlay: dict[str, str] = {}
        self.lock, self.url = threading.RLock(), ""
        for path in (self.buckets, self.home, self.bin, self.network):
            path.mkdir(parents=True)
        for name, text in (("python3", PYTHON_SHIM), ("vllm", VLLM_SHIM)):
            (self.bin / name).write_text(text.format(python=sys.executable))
            (self.bin / name).chmod(0o755)
        (self.network / "sitecustomize.py").write_text(NETWORK.format(aliases=str(self.network / "aliases.json")))

    def mount(self, volume: dict) -> Path:
        return self.buckets / volume["source"] / volume.get("path", "")

    def overlay_onto(self, code: Path) -> None:
        for name, text in self.overlay.items():
            (code / name).write_text(text)

    def join(self, prefix: str, aliases: list[str], port: str) -> None:
        with self.lock:
            self.aliases |= {prefix + alias: port for alias in aliases}
            (self.network / "aliases.json").write_text(json.dumps(self.aliases))

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
            job.kill()
        self.jobs, self.rules, self.requests, self.overlay = [], [], [], {}

    def state(self) -> dict:
        jobs = [{**job.info(), "role": job.role, "namespace": job.namespace, "cancels": job.cancels,
                 "timeout": job.spec.get("timeoutSeconds"), "log": [event["data"] for event in job.log],
                 "processes": [p.pid for p in job.processes()]} for job in list(self.jobs)]  # fmt: skip
        return {"jobs": jobs, "requests": list(self.requests)}


class Handler(BaseHTTPRequestHandler):
    """One request. Server attributes: hub."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, body: object = None, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def owner(self) -> dict | None:
        return TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        if parts.path.startswith("/fake/") and not parts.path.startswith("/fake/files/"):
            return self.control(parts.path, body)
        job = self.job_of(parts.path)
        role = json.loads(body).get("labels", {}).get("role", "") if "/api/jobs/" in self.path and body else ""
        what = f"{self.command} {parts.path} {job.role if job else role}".strip()
        self.hub.requests.append((time.monotonic(), what))
        rule = self.hub.rule(what)
        time.sleep((rule or {}).get("delay_s", 0))
        if rule and "status" in rule:
            if rule.get("after"):
                self.hub_answer(parts, job, body, quiet=True)
            return self.answer(rule["status"], {"error": "as told"}, rule.get("headers"))
        if rule and rule.get("ignore"):
            return self.answer(200, {})
        self.hub_answer(parts, job, body, rule=rule or {})

    do_GET = do_POST = do_HEAD = handle_any  # noqa: N815

    def job_of(self, path: str) -> Job | None:
        found = re.match(r"/api/jobs/([^/]+)/([0-9a-f]{24})", path)
        jobs = [job for job in self.hub.jobs if found and (job.namespace, job.id) == found.groups()]
        return jobs[0] if jobs else None

    def hub_answer(self, parts, job: Job | None, body: bytes, quiet: bool = False, rule: dict | None = None) -> None:
        """What the Hub says; `quiet` does the work without saying it."""
        reply = (lambda *_: None) if quiet else self.answer
        path, owner = parts.path, self.owner()
        if owner is None:
            return reply(401, {"error": "Invalid credentials in Authorization header"})
        if path == "/api/whoami-v2":
            access = {"auth": {"accessToken": {"role": owner["role"]}}}
            return reply(200, {"id": "1", "type": "user", **owner, **access})
        if path == "/api/jobs/hardware":
            return reply(200, HARDWARE)
        if path.startswith("/fake/files/"):
            return reply(200, self.store(path.removeprefix("/fake/files/"), body))
        names = [owner["name"], *(org["name"] for org in owner["orgs"])]
        place = re.match(r"/api/(jobs|buckets)/([^/]+)(?:/([^/]+))?", path)
        if place and place.group(2) not in names:
            return reply(403, {"error": f"no access to {place.group(2)}"})
        if place and place.group(1) == "buckets":
            return reply(*self.bucket(place.group(2), place.group(3)))
        if place and not place.group(3):
            return reply(*(self.create(place.group(2), body) if self.command == "POST" else self.page(parts)))
        if job is None:
            return reply(*self.repository(path))
        if path.endswith("/logs"):
            return self.stream(job, parse_qs(parts.query), (rule or {}).get("cut"))
        if path.endswith("/cancel"):
            job.cancels += 1
            threading.Thread(target=job.cancel, daemon=True).start()
        reply(200, job.info())

    def create(self, namespace: str, body: bytes) -> tuple[int, dict]:
        with self.hub.lock:
            job = Job(self.hub, namespace, json.loads(body))
            self.hub.jobs.append(job)
        threading.Thread(target=job.start, daemon=True).start()
        return 200, job.info()

    def page(self, parts) -> tuple[int, list, dict]:
        """Jobs of the namespace with all labels asked for, two a page."""
        namespace, query = parts.path.split("/")[3], parse_qs(parts.query)
        wanted = [label.split("=", 1) for label in query.get("label", [])]
        jobs = [job.info() for job in self.hub.jobs if job.namespace == namespace
                and all(job.spec.get("labels", {}).get(name) == value for name, value in wanted)]  # fmt: skip
        begin = int(query.get("cursor", ["0"])[0])
        labels = "".join(f"&label={name}%3D{value}" for name, value in wanted)
        link = f'<{self.hub.url}{parts.path}?cursor={begin + 2}{labels}>; rel="next"'
        return 200, jobs[begin : begin + 2], {"Link": link} if len(jobs) > begin + 2 else {}

    def bucket(self, namespace: str, name: str) -> tuple[int, dict]:
        path = self.hub.buckets / namespace / name
        there = path.is_dir()
        if self.command == "GET":
            return 200 if there else 404, {"id": f"{namespace}/{name}"}
        path.mkdir(parents=True, exist_ok=True)
        return 409 if there else 200, {"url": f"{self.hub.url}/buckets/{namespace}/{name}"}

    def store(self, name: str, data: bytes) -> dict:
        path = self.hub.buckets / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_bytes(data)
        path.with_suffix(".part").rename(path)
        return {}

    def repository(self, path: str) -> tuple[int, object, dict]:
        """acme/small is the one model, acme/sums the one dataset."""
        if path == "/api/datasets/acme/sums":
            return 200, {"id": "acme/sums", "private": False}, {}
        if path == "/acme/small/resolve/main/config.json":
            return 200, b'{"max_position_embeddings": 2048}', {"ETag": '"1"', "X-Repo-Commit": "0" * 40}
        return 404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"}

    def stream(self, job: Job, query: dict, cut: int | None) -> None:
        """The log as server-sent events, until the Job has ended, or after `cut` lines."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        sent = max(0, len(job.log) - int(query["tail"][0])) if "tail" in query else 0
        try:
            while cut is None or sent < cut:
                ended = job.stage in TERMINAL  # looked at before the last lines
                for event in job.log[sent:cut]:
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                    sent += 1
                if ended:
                    return
                time.sleep(0.05)
        except OSError:
            pass  # the reader has left

    def control(self, path: str, body: bytes) -> None:
        """What tests ask of the fake itself."""
        hub, word = self.hub, path.removeprefix("/fake/")
        if word == "rules":
            hub.rules += json.loads(body)
        elif word == "overlay":
            hub.overlay |= json.loads(body)
        elif word == "forgive":
            hub.rules = []
        elif word == "reset":
            hub.reset()
        elif word.startswith("end/"):
            next(job for job in hub.jobs if job.id == word.removeprefix("end/")).kill()
        self.answer(200, hub.state() if word == "state" else {})


class Gateway(ThreadingHTTPServer):
    """An exposed port: passes requests on to a port of this machine, for those who have the token."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, hub: Hub, role: str, port: int):
        super().__init__(("127.0.0.1", 0), GatewayHandler)
        self.hub, self.role, self.port = hub, role, port
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class GatewayHandler(Handler):
    """One request to an exposed port."""

    def handle_any(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        rule = server.hub.rule(f"GATEWAY {self.command} {self.path} {server.role}")
        if rule:
            return self.answer(rule["status"], {"error": "as told"}, rule.get("headers"))
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in TOKENS:
            return self.answer(401, {"error": "a token with read access to the Job is needed"})
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name not in ("Authorization", "Host")}
        try:
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException):
            return self.answer(502, {"error": "nothing listens there"})
        finally:
            connection.close()
        self.answer(response.status, data, {"Content-Type": response.headers.get("Content-Type", "")})

    do_GET = do_POST = do_DELETE = handle_any  # noqa: N815


def serve(directory: Path) -> None:
    """Serve until SIGTERM; then end every Job."""
    hub = Hub(directory)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(hub.url, flush=True)
    server.serve_forever(0.05)
    hub.reset()


def launch() -> int:
    """launch.py with quick polls and little patience, and with uploads that need no Xet."""
    sys.path.insert(0, str(ROOT))
    import dataclasses

    from huggingface_hub import HfApi, get_session
    from huggingface_hub.utils import hf_raise_for_status

    import launch

    def batch_bucket_files(self, bucket_id, *, add, **_):
        for data, name in add:
            url = f"{self.endpoint}/fake/files/{bucket_id}/{name}"
            hf_raise_for_status(get_session().post(url, content=data, headers=self._build_hf_headers()))

    def sync_job_volume(self, source, mount_path, *, remote_name, namespace):
        add = [(path.read_bytes(), f"{remote_name}/{path.name}") for path in Path(source).iterdir()]
        batch_bucket_files(self, f"{namespace}/jobs-artifacts", add=add)

    HfApi.batch_bucket_files, HfApi.sync_job_volume = batch_bucket_files, sync_job_volume
    patience_s = float(os.environ.get("PATIENCE_S", "4"))
    launch.HF_PLACE = dataclasses.replace(launch.HF_PLACE, poll_s=0.2, patience_s=patience_s)
    return launch.main()


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        del sys.argv[1]
        sys.exit(launch())
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    serve(Path(sys.argv[1]))
