"""launch.py on HF Jobs, against a fake Hub: the real client over the real wire, and Jobs that really run.

Most Jobs here are quick: replicas run the real replica.sh with a `vllm` that is only healthy, the trainer Job the real
jobs/trainer_job.py with the proxy and the trainer below. One test runs everything with the toy model.
"""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path

import fake_hub
import psutil
import pytest
import requests
from conftest import is_near, wait_for
from flask import Flask, request

from config import LOCAL, flag

ROOT = Path(__file__).resolve().parent.parent
FAKE = str(ROOT / "tests" / "fake_hub.py")
TOKEN, READ_TOKEN = "hf_FAKEwriteTOKENx0123456789", "hf_FAKEreadTOKENx01234567890"

QUICK_PROXY = """
import json, os, requests
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from config import config_from, make_parser
headers = {"Authorization": "Bearer " + os.environ["HF_TOKEN"]} if "HF_TOKEN" in os.environ else {}
parser = make_parser("", without=("replicas",))
parser.add_argument("--replicas")
args = parser.parse_args()
has = []
del args.replicas
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"ready": len(has), "replicas": has}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        replica = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        has.append({**replica, "state": "ready"})
        health = requests.get(replica["url"] + "/health", headers=headers).status_code
        print("reached", replica["url"], "with" if headers else "without", "a token:", health, flush=True)
        print("has now", sorted(r["url"] for r in has), flush=True)
        self.do_GET()
    def do_DELETE(self):
        has[:] = [r for r in has if r["id"] != self.path.rsplit("/", 1)[1]]
        self.do_GET()
    def log_message(self, *_): pass
cfg = config_from(args)
ThreadingHTTPServer((cfg.host, cfg.port), Handler).serve_forever()
"""
QUICK_TRAINER = """
import time
from pathlib import Path
from config import config_from, make_parser
cfg = config_from(make_parser("").parse_args())
attempts = Path(cfg.bucket, cfg.run, "attempts")
attempts.mkdir(parents=True, exist_ok=True)
for step in range(1, cfg.max_steps + 1):
    (attempts / "1.heartbeat").write_text(f"{step} running")
    print(f"step {step}/{cfg.max_steps}  reward 0.500  ratio 1.0000  left 0:01", flush=True)
    time.sleep(0.05)
"""


class Hub:
    """The fake Hub, a process of its own, as tests see it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.process = subprocess.Popen([sys.executable, FAKE, str(directory)], stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()

    def tell(self, what: str, document: object = None) -> dict:
        return requests.post(f"{self.url}/fake/{what}", json=document, timeout=30).json()

    def fail(self, match: str, **rule) -> None:
        self.tell("rules", [{"match": match, **rule}])

    def jobs(self, role: str = "") -> list[dict]:
        return [job for job in self.tell("state")["jobs"] if role in job["role"]]

    def left(self) -> list[dict]:
        """Jobs that have not ended, or of which a process lives."""
        return [j for j in self.jobs() if j["processes"] or j["status"]["stage"] in ("SCHEDULING", "RUNNING")]

    def start(self, *flags: str, token: str = TOKEN, **popen) -> subprocess.Popen:
        quick = ["--run=r1", "--replicas=2", "--max-steps=3", "--port=0", "--model=/lora/model",
                 "--dataset=/lora/data.jsonl"]  # fmt: skip
        env = {**os.environ, "HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HOME": str(self.directory / "hf"),
               **popen.pop("env", {})}  # fmt: skip
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
        return subprocess.Popen([sys.executable, FAKE, "launch", *quick, *flags], env=env, text=True, **pipes)

    def launch(self, *flags: str, **options) -> subprocess.CompletedProcess:
        process = self.start(*flags, **options)
        try:
            out, err = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for_training(hub: Hub) -> None:
    trains = lambda: any("step 2/" in line for job in hub.jobs("trainer") for line in job["log"])  # noqa: E731
    wait_for(trains, tell=lambda: [(job["role"], job["status"]["stage"], job["log"][-5:]) for job in hub.jobs()])


def cause(ended: subprocess.CompletedProcess) -> str:
    """The last line, which says why the run failed; there is no other such line."""
    *others, last = ended.stderr.splitlines()
    assert last.startswith("error: "), ended.stdout + ended.stderr
    assert not [line for line in others if line.startswith("error: ")]
    return last


def still_running(err: str) -> str:
    """The line that names the Jobs which may still be running."""
    return next(line for line in err.splitlines() if line.startswith("may still be running"))


def places_of(token: str, directory: Path) -> list[Path]:
    """Files below a directory that contain the token."""
    return [path for path in directory.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def one_hub(tmp_path_factory):
    hub = Hub(tmp_path_factory.mktemp("hub") / "hub")
    yield hub
    hub.process.terminate()
    hub.process.wait(20)


@pytest.fixture
def hub(one_hub):
    one_hub.tell("reset")
    shutil.rmtree(one_hub.directory / "buckets")
    (one_hub.directory / "buckets").mkdir()
    one_hub.tell("overlay", {"proxy.py": QUICK_PROXY, "trainer.py": QUICK_TRAINER})
    return one_hub


# --- a run that goes well ---


def test_a_run_survives_what_the_hub_does_for_a_moment(hub):
    # D12, D17: 500 after and before creating, 429, looks that fail, logs that end early, cancels that need more tries
    hub.fail("POST /api/buckets/alice/grpo-lora", status=503)
    hub.fail("POST /api/jobs/alice replica", status=500, after=True)
    hub.fail("POST /api/jobs/alice replica", status=429, headers={"Retry-After": "1"})
    hub.fail("POST /api/jobs/alice trainer", status=500)
    hub.fail("GET /api/jobs/alice/[0-9a-f]+ trainer", status=502)
    hub.fail("GET .*/logs trainer", cut=2)
    hub.fail("POST .*/cancel replica", status=500, times=2)
    hub.fail("POST .*/cancel replica", ignore=True)
    ended = hub.launch("--max-steps=5", env={"PATIENCE_S": "20"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [job["role"] for job in hub.jobs()] == ["replica", "replica", "trainer"]
    assert hub.left() == []
    assert re.findall(r"^step (\d)/5 .*so far$", ended.stdout, re.MULTILINE) == list("12345")
    posts = [at for at, what in hub.tell("state")["requests"] if what == "POST /api/jobs/alice replica"]
    assert posts[2] - posts[1] >= 1.0  # as Retry-After says
    assert TOKEN not in ended.stdout + ended.stderr + json.dumps(hub.tell("state"))  # D15


def test_jobs_are_submitted_as_the_design_says(hub):
    # D06, D09, D10, D13, D22; an organisation's Jobs and bucket
    ended = hub.launch("--namespace=acme", "--run=orga")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    state = hub.tell("state")
    replicas, (trainer,) = hub.jobs("replica"), hub.jobs("trainer")
    assert all("/acme" in what for _, what in state["requests"] if re.search("/api/(jobs|buckets)/(?!hardware)", what))
    for job in replicas:
        bucket, code = job["volumes"]
        assert (bucket["source"], bucket["mountPath"], bucket["readOnly"]) == ("acme/grpo-lora", "/lora", True)
        assert (code["mountPath"], code["readOnly"]) == ("/code", True)
        assert job["labels"].keys() >= {"run", "role", "attempt", "replica"}
        assert job["timeout"] > trainer["timeout"] == 8 * 3600
        assert job["cancels"] in (1, 2)  # by the trainer Job, and by the launcher if it has not ended by then
        assert "asked without a token" in job["log"]
        assert job["secrets"] == {"HF_TOKEN": None}
    assert "readOnly" not in trainer["volumes"][0]
    assert {job["dockerImage"] for job in state["jobs"]} == {"vllm/vllm-openai:v0.27.1"}
    assert sum(line.startswith("reached http://127.0.0.1") and line.endswith("with a token: 200")
               for line in trainer["log"]) == 2  # fmt: skip
    shipped = {path.name for path in hub.directory.glob("buckets/acme/jobs-artifacts/*/*")}
    assert {"trainer.py", "replica.sh", "requirements.txt"} <= shipped
    assert not shipped & {"README.md", "tests", ".git", "runs"}


def test_a_network_group_needs_no_urls_nor_token_and_a_terminal_gets_a_bar(hub):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    process, shown = hub.start("--network-group=mine", stderr=theirs), b""
    os.close(theirs)
    while process.poll() is None or b"3/3" not in shown:
        try:
            shown += os.read(ours, 4096)
        except OSError:
            break
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert re.search(rb"3/3, reward 0\.500 .*left 0:01  \$\d+\.\d\d so far", shown), shown
    aliases = {job["network"]["aliases"][0] for job in hub.jobs("replica")}
    assert len(aliases) == 2
    assert all(re.fullmatch("[a-z0-9-]{1,34}", alias) for alias in aliases)
    assert all((job["network"]["group"], job["status"]["exposeUrls"]) == ("mine", None) for job in hub.jobs())
    log = hub.jobs("trainer")[0]["log"]
    assert all(f"reached http://mine.group.{alias}:8000 without a token: 200" in log for alias in aliases)


def test_a_new_replica_is_announced_and_a_new_proxy_is_told_of_all(hub):
    process = hub.start("--max-steps=10000", "--replica-restarts=1")
    wait_for_training(hub)
    urls = [job["status"]["exposeUrls"][0] for job in hub.jobs("replica")]
    (proxy,) = [pid for pid in hub.jobs("trainer")[0]["processes"] if "proxy.py" in psutil.Process(pid).cmdline()[1]]
    os.kill(proxy, signal.SIGKILL)
    told = lambda: [line for line in hub.jobs("trainer")[0]["log"] if "has now" in line]  # noqa: E731
    wait_for(lambda: len(told()) >= 4 and told()[-1] == f"has now {sorted(urls)}")
    hub.tell(f"end/{hub.jobs('replica')[0]['id']}")
    urls[0] = wait_for(lambda: len(hub.jobs("replica")) == 3 and hub.jobs("replica")[2]["status"]["exposeUrls"])[0]
    wait_for(lambda: told()[-1] == f"has now {sorted(urls)}")
    document = json.loads((hub.directory / "buckets/alice/grpo-lora/r1/replicas.json").read_text())
    assert document["restarts"] == 1
    hub.tell(f"end/{hub.jobs('replica')[1]['id']}")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "--replica-restarts are used" in err
    assert "Job failed with exit code: -9" in out
    assert hub.left() == []


# --- failures: nothing is left running, the exit code is not 0, one line says what happened ---

PHASES = {
    "bucket": "POST /api/buckets/",
    "replicas": "POST /api/jobs/alice replica",
    "health": "GATEWAY GET /health",
    "trainer": "POST /api/jobs/alice trainer",
}


@pytest.mark.parametrize(
    ("phase", "status", "num_jobs"),
    [("bucket", 429, 0), ("replicas", 500, 0), ("health", 401, 2), ("trainer", 401, 2)],
)
def test_a_failure_that_lasts_ends_the_run_in_every_phase(hub, phase, status, num_jobs):
    hub.fail(PHASES[phase], status=status, times=-1, headers={"Retry-After": "1"})
    hub.fail("POST .*/cancel", status=500)
    ended = hub.launch("--max-steps=10000")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert str(status) in cause(ended) or "refuses the token" in cause(ended)
    assert hub.left() == []
    assert len(hub.jobs()) == num_jobs


def test_a_job_that_was_created_by_a_refused_call_is_cancelled_too(hub):
    hub.fail("POST /api/jobs/alice trainer", status=400, after=True)
    ended = hub.launch()
    assert ended.returncode == 1
    assert "did not accept the trainer Job" in cause(ended)
    assert len(hub.jobs("trainer")) == 1
    assert hub.left() == []


@pytest.mark.parametrize(("role", "wait_min"), [("trainer", 0.12), ("replica", 0.02)])
def test_jobs_stuck_in_scheduling_are_given_up(hub, role, wait_min):
    # D12; and replicas that wait for the trainer for longer than idle_shutdown_min do not stop themselves
    hub.fail(f"SCHEDULE {role}", ignore=True)
    ended = hub.launch(f"--schedule-wait-min={wait_min}", "--idle-shutdown-min=0.05", "--heartbeat-s=0.1")
    assert ended.returncode == 1
    assert re.search(rf"{role}.* is still SCHEDULING after --schedule-wait-min {wait_min}: raise it", cause(ended))
    assert {job["status"]["stage"] for job in hub.jobs()} == {"CANCELED"}


def test_a_replica_that_dies_at_the_start_is_shown_with_its_last_lines(hub):
    hub.tell("overlay", {"replica.sh": "echo CUDA out of memory; exit 3"})
    ended = hub.launch()
    assert ended.returncode == 1
    assert "ended (Job failed with exit code: 3)" in cause(ended)
    assert "  | CUDA out of memory" in ended.stdout.splitlines()
    assert cause(ended).endswith(": CUDA out of memory")
    assert hub.left() == []


def test_the_trainers_exit_code_is_the_launchers(hub):
    hub.tell("overlay", {"trainer.py": "print('error: the loss is not finite', flush=True); raise SystemExit(7)"})
    ended = hub.launch()
    assert ended.returncode == 7
    assert "exit code: 7" in ended.stdout
    assert cause(ended) == "error: the loss is not finite"
    assert hub.left() == []


def test_a_token_that_is_refused_for_good_ends_the_launcher_which_says_what_still_runs_and_not_the_token(hub):
    # D15, D16: afterwards --stop works with a good one
    process = hub.start("--max-steps=10000", env={"PATIENCE_S": "2"})
    wait_for_training(hub)
    arguments = [psutil.Process(pid).cmdline() for job in hub.jobs() for pid in job["processes"]]
    hub.fail("/api/jobs", status=401, times=-1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "hf auth login" in err.splitlines()[-1]
    assert all(job["id"] in still_running(err) for job in hub.jobs())
    assert len(arguments) >= 5
    assert TOKEN not in json.dumps([arguments, process.args, out, err, hub.tell("state")])
    assert places_of(TOKEN, hub.directory) == []
    hub.tell("forgive")
    assert hub.launch("--stop=r1").returncode == 0
    assert hub.left() == []


# --- the launcher is stopped, killed, or leaves ---


def test_a_signal_while_training_cancels_every_replica(hub):
    # D13; Ctrl-C does the same
    process = hub.start("--max-steps=10000", env={"PATIENCE_S": "40"})
    wait_for_training(hub)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping: cancelling all Jobs" in err
    assert hub.left() == []
    # By the launcher; the trainer Job asks too, for those that have not ended when it has cleaned up.
    assert {job["cancels"] for job in hub.jobs("replica")} <= {1, 2}


def test_ctrl_c_while_a_job_is_being_submitted_leaves_none(hub):
    hub.fail("POST /api/jobs/alice replica", delay_s=1.5)
    process = hub.start(env={"PATIENCE_S": "40"})
    wait_for(lambda: any("POST /api/jobs/alice replica" in what for _, what in hub.tell("state")["requests"]))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(hub.jobs()) == 1, "the submission was not cut short"
    assert hub.left() == []


def test_ctrl_c_twice_exits_at_once_and_says_what_still_runs(hub):
    hub.fail("POST .*/cancel", ignore=True, times=-1)
    process = hub.start("--max-steps=10000", env={"PATIENCE_S": "100"})
    wait_for_training(hub)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: any("/cancel" in what for _, what in hub.tell("state")["requests"]))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert all(job["id"] in still_running(err) for job in hub.jobs())
    hub.tell("forgive")
    assert hub.launch("--stop=r1").returncode == 0
    assert hub.left() == []


def test_without_the_launcher_the_trainer_job_cancels_the_replicas_at_its_end(hub):
    # D13
    process = hub.start("--max-steps=60")
    wait_for_training(hub)
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not hub.left())
    assert hub.jobs("trainer")[0]["status"]["stage"] == "COMPLETED"
    assert [job["status"]["stage"] for job in hub.jobs("replica")] == ["CANCELED", "CANCELED"]


def test_without_launcher_and_trainer_the_replicas_stop_themselves(hub):
    # D13
    process = hub.start("--max-steps=10000", "--idle-shutdown-min=0.05", "--heartbeat-s=0.1")
    wait_for_training(hub)
    process.kill()
    process.communicate(timeout=30)
    hub.tell(f"end/{hub.jobs('trainer')[0]['id']}")
    wait_for(lambda: not hub.left())
    assert [job["status"]["stage"] for job in hub.jobs("replica")] == ["COMPLETED", "COMPLETED"]
    assert "no heartbeat" in hub.jobs("replica")[0]["log"][-1]


def test_a_detached_run_is_seen_followed_and_stopped_from_anywhere(hub):
    ended = hub.launch("--detach", "--max-steps=10000")
    assert ended.returncode == 0, ended.stderr
    assert "--stop r1" in ended.stdout
    assert len(hub.left()) == 3
    again = hub.launch()
    assert again.returncode == 2
    assert "--run r1: its Jobs" in again.stderr
    status = hub.launch("--status=r1").stdout
    assert [status.count(word) for word in ("replica ", "trainer ", "RUNNING")] == [2, 1, 3]
    hub.tell(f"end/{hub.jobs('trainer')[0]['id']}")
    assert "step 1/10000" in hub.launch("--logs=r1").stdout
    assert hub.launch("--stop=r1").returncode == 0
    assert hub.left() == []


# --- before anything starts ---


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trainer-flavor=h200x8"], "--trainer-flavor h200x8: did you mean h200x2? choose from h200, h200x2"),
        (["--namespace=other"], "--namespace other: the token is of alice, acme"),
        (["--model=./model"], "--model ./model: Jobs cannot see this machine's files"),
        (["--dataset=data.jsonl"], "--dataset data.jsonl: Jobs cannot see this machine's files"),
        (["--model=acme/smal"], "--model acme/smal: the Hub does not give it to you: did you mean acme/small? 404"),
        (["--dataset=acme/none"], "--dataset acme/none: the Hub does not give it"),
        (["--model=acme/small", "--dataset=acme/sums"], "--max-model-len 4096: acme/small has a context of 2048"),
        (["--run=a.b"], "--run a.b: on HF Jobs it must match"),
        (["--network-group=Mine"], "--network-group Mine: on HF Jobs it must match"),
        (["--track=trackio"], "--track trackio: what it keeps would vanish with the Job: name a Space"),
        (["--reward=mine:f"], "--reward mine:f: Jobs do not get "),  # F27
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(hub, flags, said, tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, **_): return [0.0] * len(completions)\n")
    ended = hub.launch(*flags, cwd=tmp_path)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.startswith(f"error: {said}")
    assert len(ended.stderr.splitlines()) == 1
    assert not [what for _, what in hub.tell("state")["requests"] if what.startswith("POST")]


@pytest.mark.parametrize(("token", "said"), [(READ_TOKEN, "may only read"), ("hf_EXPIRED", "hf auth login")])
def test_a_token_that_cannot_run_jobs_is_refused_before_anything_starts(hub, token, said):
    ended = hub.launch(token=token)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert said in ended.stderr
    assert hub.jobs() == []


def test_a_dry_run_prints_the_exact_jobs_without_the_token_and_says_what_it_waits_for(hub):
    hub.fail("whoami", status=503, times=2)  # F22
    ended = hub.launch("--dry-run", "--model=acme/small", "--dataset=acme/sums", "--max-model-len=2048",
                       "--max-completion-tokens=1000")  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "$24.00 per hour, $192.00 at most" in ended.stdout
    told = r"^waiting for the Hub to say whose token this is until \d\d:\d\d:\d\d: .*503"
    assert re.search(told, ended.stdout, re.MULTILINE), ended.stdout
    assert ended.stdout.count('"HF_TOKEN": "***"') == 2
    assert ended.stdout.count('"mount_path": "/lora"') == 2
    assert TOKEN not in ended.stdout
    assert not [what for _, what in hub.tell("state")["requests"] if what.startswith("POST")]


def test_a_dry_run_imports_nothing_heavy(hub):
    code = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT)!r}]
sys.argv = ["launch", "--dry-run", "--model=/lora/model", "--dataset=/lora/data.jsonl"]
import fake_hub
assert fake_hub.launch() == 0
assert not {{"torch", "transformers", "peft", "datasets", "pyarrow", "vllm"}} & sys.modules.keys()
"""
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


# --- the token ---


@pytest.fixture
def thief():
    """A server elsewhere; it notes the Authorization headers it gets."""
    app, seen = Flask("thief"), []
    app.before_request(lambda: seen.append(request.headers.get("Authorization")))
    server = fake_hub.serve_in_thread(app)
    server.seen = seen
    yield server
    server.shutdown()


def test_the_token_does_not_follow_a_redirect_to_another_host(hub, thief):
    # D14
    elsewhere = {"Location": f"http://localhost:{thief.server_port}/"}
    hub.fail("GATEWAY GET /health", status=302, times=-1, headers=elsewhere)
    ended = hub.launch("--ready-wait-min=0.02")
    assert ended.returncode == 1
    assert "/health answers 302" in cause(ended)
    assert thief.seen == []
    hub.fail("GET /api/jobs/hardware", status=307, headers=elsewhere)
    assert hub.launch("--dry-run").returncode == 2
    assert thief.seen == [None]


def test_two_local_runs_at_a_time_never_meet_nor_write_the_token_nor_use_a_proxy_variable(tmp_path, toy_dir):
    # D15, F28, F29, F31: the same quick Jobs as local processes; replica.sh finds a `vllm` on the PATH
    code, path = tmp_path / "code", tmp_path / "bin"
    shutil.copytree(ROOT, code, ignore=shutil.ignore_patterns(".*", "tests", "benches", "docs", "runs", "__pycache__"))
    path.mkdir()
    (code / "proxy.py").write_text(QUICK_PROXY)
    (code / "trainer.py").write_text(QUICK_TRAINER)
    (path / "vllm").write_text(fake_hub.VLLM_SHIM.format(python=sys.executable))
    (path / "vllm").chmod(0o755)
    command = [sys.executable, str(code / "launch.py"), "--local", "--engine=vllm", f"--model={toy_dir}",
               "--max-steps=3", f"--dataset={toy_dir}/train.jsonl", f"--bucket={tmp_path / 'runs'}"]  # fmt: skip
    env = {**os.environ, "HF_TOKEN": TOKEN, "PATH": f"{path}:{os.environ['PATH']}", "HTTP_PROXY": "http://127.0.0.1:9"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    runs = [subprocess.Popen([*command, f"--run={name}"], env=env, **pipes) for name in ("one", "two")]
    said = [run.communicate(timeout=90)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert all("step 3/3" in text for text in said)
    pages = {re.search("the proxy's page: http://(.*)/", text)[1] for text in said}
    reached = [set(re.findall("reached (.*) with a token: 200", text)) for text in said]
    assert [len(pages), *map(len, reached), len(reached[0] | reached[1])] == [2, 2, 2, 4]
    assert TOKEN not in "".join(said)
    assert places_of(TOKEN, tmp_path) == []


# --- everything, with the toy model ---


@pytest.mark.slow
def test_a_whole_run_trains_on_the_fake_hub_and_leaves_nothing_behind(hub, toy_dir):
    hub.tell("reset")  # with it go the quick proxy and trainer
    bucket = hub.directory / "buckets/alice/grpo-lora"
    shutil.copytree(toy_dir, bucket / "toy")
    local = [f"{flag(name)}={value}" for name, value in LOCAL.items() if name not in ("model", "dataset", "bucket")]
    ended = hub.launch(*local, "--model=/lora/toy", "--dataset=/lora/toy/train.jsonl", "--batch-size=32",
                       "--max-steps=3")  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [json.loads(line) for line in (bucket / "r1/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(is_near(row) for row in rows)
    assert all(0 < row["reward/mean"] < 1 for row in rows)
    assert (bucket / "r1/final/adapter_model.safetensors").exists()
    assert [job["role"] for job in hub.jobs()] == ["replica", "replica", "trainer"]
    assert hub.left() == []
    assert places_of(TOKEN, hub.directory) == []
    assert TOKEN not in json.dumps([ended.stdout, ended.stderr, hub.tell("state")])
