"""The contract of a replica: what design section 8 says of vLLM holds for stub_vllm.py, and for a real vLLM.

Each test runs against the stub, and with `-m vllm` against a real vLLM: the server at VLLM_URL (the toy model, started
with replica.sh's flags and --max-lora-rank 8 --max-loras 6, sees the directory VLLM_BUCKET), or one that is started
here with VLLM_PYTHON. Both are started by replica.sh. Faults, model families and replica.sh itself come last.
"""

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import requests
import torch
from conftest import free_port
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import stub_vllm

HERE = Path(__file__).parent.parent
PROMPT = [6, 9, 12, 10, 7, 13]  # 47+85=
EOS, BOX = 1, 15  # <eos>, \boxed{
MAX_LORAS, MAX_MODEL_LEN, MAX_LORA_RANK = 6, 64, 8
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAMES = (f"policy-{number}" for number in itertools.count())
SAMPLED = 1e-4  # tolerance of logprobs in a completion: after unlikely tokens float32 and float64 differ by 2e-5
BEYOND_EOS = 1e-3  # tolerance of logprobs after an ignored eos: the model was not trained for it, and fp32 shows
START_S = 150  # a real vLLM needs a minute


@dataclass
class Server:
    """A replica that runs, and the bucket that it sees."""

    url: str
    bucket: Path
    variants: Path
    process: subprocess.Popen | None = None
    kind: str = "stub"

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=60)

    def post(self, path: str, body: dict | None = None, timeout: float = 120) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout)

    def publish(self, variant: str) -> str:
        """Put a copy of a variant into the bucket; its new name."""
        name = next(NAMES)
        shutil.copytree(self.variants / variant, self.bucket / name)
        return name

    def load(self, name: str, **more) -> requests.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self.bucket / name), **more})

    def unload(self, name: str) -> requests.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def loaded(self, variant: str) -> str:
        """Publish and load a variant; its name."""
        name = self.publish(variant)
        answer = self.load(name)
        assert answer.status_code == 200, answer.text
        return name

    def complete(self, model: str, prompt=PROMPT, **more) -> requests.Response:
        defaults = {"temperature": 1.0, "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
        return self.post("/v1/completions", {"model": model, "prompt": prompt, **defaults, **more})

    def choices(self, model: str, prompt=PROMPT, **more) -> list[dict]:
        answer = self.complete(model, prompt, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    def prompt_logprobs(self, model: str, tokens: list[int], **more) -> list[float]:
        """What the server says of each token but the first."""
        entries = self.choices(model, tokens, max_tokens=1, prompt_logprobs=0, **more)[0]["prompt_logprobs"]
        assert entries[0] is None
        return [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], tokens[1:], strict=True)]

    def models(self) -> dict[str, dict]:
        return {card["id"]: card for card in self.get("/v1/models").json()["data"]}

    def base(self) -> str:
        return next(name for name, card in self.models().items() if card["parent"] is None)

    def num_running(self) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def message_of(answer: requests.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return error["message"]


def wait_until(is_true, what: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def is_healthy(url: str) -> bool:
    try:
        return requests.get(url + "/health", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


def end(process: subprocess.Popen) -> None:
    process.terminate()
    process.wait(30)


# Servers and adapters


def make_adapter(toy_dir: Path, directory: Path, rank: int, seed: int) -> None:
    """An adapter on every linear layer that changes what the model says."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(toy_dir), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(directory)


def edit_config(directory: Path, **changes) -> None:
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | changes))


def edit_tensors(directory: Path, edit) -> None:
    tensors = load_file(directory / WEIGHTS)
    save_file({key: value.contiguous() for key, value in edit(tensors).items()}, directory / WEIGHTS)


@pytest.fixture(scope="session")
def variants(toy_dir, tmp_path_factory) -> Path:
    """Adapter directories: good and other work, the rest are wrong in one way each."""
    root = tmp_path_factory.mktemp("variants")
    make_adapter(toy_dir, root / "good", rank=8, seed=1)
    make_adapter(toy_dir, root / "other", rank=1, seed=2)
    make_adapter(toy_dir, root / "rank16", rank=16, seed=3)
    wrong = ("no_config", "no_weights", "empty_weights", "half_weights", "short_weights", "empty_config", "half_config",
             "dora", "saved_modules", "bias", "prefix", "keys", "nan", "cut")  # fmt: skip
    for name in wrong:
        shutil.copytree(root / "good", root / name)
    weights, config = (root / "good" / WEIGHTS).read_bytes(), (root / "good" / CONFIG).read_bytes()
    (root / "no_config" / CONFIG).unlink()
    (root / "no_weights" / WEIGHTS).unlink()
    (root / "empty_weights" / WEIGHTS).write_bytes(b"")
    (root / "half_weights" / WEIGHTS).write_bytes(weights[: len(weights) // 2])
    (root / "short_weights" / WEIGHTS).write_bytes(weights[:100])
    (root / "empty_config" / CONFIG).write_bytes(b"")
    (root / "half_config" / CONFIG).write_bytes(config[: config.index(b"target_modules") + 4])
    edit_config(root / "dora", use_dora=True)
    edit_config(root / "saved_modules", modules_to_save=["lm_head"])
    edit_config(root / "bias", bias="all")
    edit_tensors(root / "prefix", lambda t: {key.replace("base_model.model.", "policy."): t[key] for key in t})
    edit_tensors(root / "keys", lambda t: {key.replace(".weight", ".default.weight"): t[key] for key in t})
    edit_tensors(root / "nan", lambda t: {key: value * float("nan") for key, value in t.items()})
    edit_tensors(root / "cut", lambda t: {k: v[:64] if "q_proj.lora_B" in k else v for k, v in t.items()})
    return root


def vllm_python() -> str | None:
    """A python that has vLLM: VLLM_PYTHON, or the virtual environment of real_vllm.sh."""
    venv = Path(os.environ.get("VLLM_VENV", Path.home() / ".cache" / "vllm-cpu-venv"))
    python = os.environ.get("VLLM_PYTHON", str(venv / "bin" / "python"))
    return python if list(Path(python).parent.parent.glob("lib/*/site-packages/vllm")) else None


def start(kind: str, toy_dir: Path, variants: Path, directory: Path, bare: bool = False) -> Server:
    """Start a replica on a free port, with replica.sh, or bare: without the environment variables that it sets."""
    python = vllm_python() if kind == "vllm" else None
    if kind == "vllm" and python is None:
        pytest.skip("no vLLM installed, and no VLLM_URL")
    port, bucket = free_port(), directory / "bucket"
    bucket.mkdir()
    env = {
        **os.environ, "MODEL": str(toy_dir), "DTYPE": "float32", "HOST": "127.0.0.1", "PORT": str(port), "ENGINE": kind,
        "MAX_MODEL_LEN": str(MAX_MODEL_LEN), "MAX_LORA_RANK": str(MAX_LORA_RANK), "MAX_LORAS": str(MAX_LORAS),
        "PYTHON": sys.executable, "VLLM_PYTHON": python or "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["bash", str(HERE / "replica.sh")]
    if bare:
        program = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        program = program if kind == "vllm" else [sys.executable, str(HERE / "stub_vllm.py")]
        command = [*program, "--model", str(toy_dir), "--host", "127.0.0.1", "--port", str(port), "--enable-lora"]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32"]
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "1",
        }
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    server = Server(f"http://127.0.0.1:{port}", bucket, variants, process, kind)
    try:
        wait_until(lambda: is_healthy(server.url) or process.poll() is not None, "a healthy replica", START_S)
        assert process.poll() is None, (directory / "log").read_text()[-2000:]
    except BaseException:
        end(process)
        raise
    return server


KINDS = ["stub", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="session")
def shared_stub(toy_dir, variants, tmp_path_factory):
    server = start("stub", toy_dir, variants, tmp_path_factory.mktemp("stub"))
    yield server
    end(server.process)


@pytest.fixture(scope="session")
def shared_vllm(toy_dir, variants, tmp_path_factory):
    if "VLLM_URL" in os.environ:
        yield Server(os.environ["VLLM_URL"], Path(os.environ["VLLM_BUCKET"]), variants, None, "vllm")
        return
    server = start("vllm", toy_dir, variants, tmp_path_factory.mktemp("vllm"))
    yield server
    end(server.process)


def clean(server: Server) -> None:
    """Leave a server as it was: nothing loaded, not paused, without faults."""
    server.post("/resume")
    if server.kind == "stub":
        server.post("/stub/faults", vars(stub_vllm.Faults()))
    for name, card in server.models().items():
        if card["parent"] is not None:
            server.unload(name)


@pytest.fixture(params=KINDS)
def server(request):
    """A server of each kind, shared by all tests that do no lasting harm."""
    server = request.getfixturevalue(f"shared_{request.param}")
    yield server
    clean(server)


@pytest.fixture
def stub(shared_stub):
    """The shared stub, for what only the stub has."""
    yield shared_stub
    clean(shared_stub)


@pytest.fixture(params=KINDS)
def own(request, toy_dir, variants, tmp_path):
    """A server that may be killed."""
    server = start(request.param, toy_dir, variants, tmp_path)
    yield server
    end(server.process)


@pytest.fixture(scope="session")
def reference(toy_dir, variants):
    """Logprobs of transformers and PEFT: of each of `tokens` but the first, under a variant (None: the base model)."""
    base = AutoModelForCausalLM.from_pretrained(toy_dir)
    models = {None: base}
    for variant in ("good", "other"):
        models[variant] = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy_dir), variants / variant)

    @torch.inference_mode()
    def logprobs(variant: str | None, tokens: list[int], temperature: float = 1.0) -> list[float]:
        logits = models[variant](input_ids=torch.tensor([tokens])).logits[0, :-1].float() / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    return logprobs


# Loading and unloading


@pytest.mark.parametrize("variant", ["missing", "no_config"])
def test_adapter_that_is_not_visible_is_a_404(server, variant):  # A01, A03
    name = server.publish(variant) if variant == "no_config" else next(NAMES)
    answer = server.load(name)
    assert answer.status_code == 404
    assert message_of(answer).startswith(f"Loading lora {name} failed: No adapter found for ")
    assert answer.json()["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize(
    ("variant", "cause"),
    [
        ("no_weights", "doesn't contain tensors"),  # A03
        ("empty_weights", "Error while deserializing header: header too small"),  # A04
        ("half_weights", "Error while deserializing header: incomplete metadata, file not fully covered"),
        ("short_weights", "Error while deserializing header: invalid header length"),
        ("empty_config", "Expecting value: line 1 column 1 (char 0)"),  # A05
        ("half_config", "Unterminated string starting at: line "),
        ("rank16", "LoRA rank 16 is greater than max_lora_rank 8."),  # A07
        ("dora", "vLLM does not yet support DoRA."),  # A09
        ("saved_modules", "vLLM only supports modules_to_save being None."),
        ("bias", "Adapter bias is not supported."),
        ("keys", "is unsupported LoRA weight"),
    ],
)
def test_adapter_that_cannot_be_read_is_a_500_with_the_cause(server, variant, cause):
    name = server.publish(variant)
    answer = server.load(name)
    assert answer.status_code == 500
    # The second wrap is of a worker in a process of its own: not with one GPU, nor as replica.sh starts it here.
    assert re.match("Call to add_lora method failed: (Worker failed with error ')?", message_of(answer))
    assert cause in message_of(answer)
    assert name not in server.models()
    assert server.get("/health").status_code == 200


def test_load_answers_in_plain_text_and_lists_the_adapter_with_its_path(server):
    name = server.publish("good")
    answer = server.load(name, canary={"tokens": [3, 3]})  # fields it does not know are ignored
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    assert server.models()[name]["root"] == str(server.bucket / name)
    assert server.models()[name]["parent"] == server.base()


def test_failed_load_leaves_nothing_behind(server):
    name = server.publish("half_weights")
    assert server.load(name).status_code == 500
    shutil.copy(server.variants / "good" / WEIGHTS, server.bucket / name / WEIGHTS)
    assert server.load(name).status_code == 200


def test_second_load_of_a_name_is_a_400(server):
    name = server.loaded("good")
    answer = server.load(name)
    assert answer.status_code == 400
    assert message_of(answer) == (
        f"The lora adapter '{name}' has already been loaded. "
        "If you want to load the adapter in place, set 'load_inplace' to True."
    )


def test_one_of_six_loads_of_a_name_at_once_succeeds(server):  # A26
    name = server.publish("good")
    with ThreadPoolExecutor(6) as pool:
        codes = [answer.status_code for answer in pool.map(lambda _: server.load(name), range(6))]
    assert sorted(codes) == [200, 400, 400, 400, 400, 400]


@pytest.mark.parametrize("body", [{"lora_name": "x"}, {"lora_path": "/x"}, {"lora_name": "", "lora_path": ""}, {}])
def test_load_without_name_or_path_is_a_400(server, body):
    answer = server.post("/v1/load_lora_adapter", body)
    assert answer.status_code == 400
    assert message_of(answer)


def test_unload_answers_in_plain_text_and_404_for_an_unknown_name(server):
    name = server.loaded("good")
    answer = server.unload(name)
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' removed successfully.")
    answer = server.unload(name)
    assert (answer.status_code, message_of(answer)) == (404, f"The lora adapter '{name}' cannot be found.")


def test_unknown_model_is_a_404(server):  # A14, A22
    name = server.loaded("good")
    server.unload(name)
    for model in (name, "nobody"):
        answer = server.complete(model)
        assert (answer.status_code, message_of(answer)) == (404, f"The model `{model}` does not exist.")


def test_adapter_under_the_base_models_name_answers_for_it(server, reference):  # A13
    base, adapter = server.base(), server.publish("good")
    server.post("/v1/load_lora_adapter", {"lora_name": base, "lora_path": str(server.bucket / adapter)})
    assert server.prompt_logprobs(base, PROMPT) == pytest.approx(reference("good", PROMPT), abs=1e-5)
    assert server.unload(base).status_code == 200
    assert server.prompt_logprobs(base, PROMPT) == pytest.approx(reference(None, PROMPT), abs=1e-5)


def test_resident_adapter_outlives_its_directory(server, reference):
    name = server.loaded("good")
    shutil.rmtree(server.bucket / name)
    assert server.prompt_logprobs(name, PROMPT) == pytest.approx(reference("good", PROMPT), abs=1e-5)


def test_adapter_beyond_the_limit_is_evicted_silently_and_read_again(server, reference):  # A20, A21
    first = server.loaded("good")
    shutil.copy(server.variants / "other" / WEIGHTS, server.bucket / first / WEIGHTS)
    shutil.copy(server.variants / "other" / CONFIG, server.bucket / first / CONFIG)
    assert server.prompt_logprobs(first, PROMPT) == pytest.approx(reference("good", PROMPT), abs=1e-5)
    for _ in range(MAX_LORAS):
        server.loaded("good")
    assert first in server.models()
    assert server.prompt_logprobs(first, PROMPT) == pytest.approx(reference("other", PROMPT), abs=1e-5)


def test_unloaded_adapter_serves_what_already_runs(server, reference):
    name = server.loaded("good")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.choices, name, n=64, max_tokens=50, ignore_eos=True)
        wait_until(lambda: server.num_running() > 0, "a running completion")
        assert server.unload(name).status_code == 200
        tokens, logprobs = tokens_and_logprobs(running.result()[0])
    assert len(tokens) == 50
    assert logprobs == pytest.approx(reference("good", PROMPT + tokens)[len(PROMPT) - 1 :], abs=BEYOND_EOS)


def test_wrong_key_names_serve_the_base_model(server, reference):
    name = server.loaded("prefix")
    assert server.prompt_logprobs(name, PROMPT) == pytest.approx(reference(None, PROMPT), abs=1e-5)


def test_wrong_shapes_are_served_without_an_error(server, reference):  # A12
    name = server.loaded("cut")
    answer = server.complete(name, max_tokens=1, prompt_logprobs=0)
    assert answer.status_code in (200, 400)  # 400 if the slot held NaN before
    if answer.status_code == 200:
        assert server.prompt_logprobs(name, PROMPT) != pytest.approx(reference("good", PROMPT), abs=1e-5)


# Completions


def tokens_and_logprobs(choice: dict) -> tuple[list[int], list[float]]:
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_completion_has_ids_logprobs_and_prompt_ids_of_every_choice(server):
    answer = server.complete(server.base(), n=2, max_tokens=40).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        tokens, logprobs = tokens_and_logprobs(choice)
        assert len(tokens) == len(logprobs) == len(choice["logprobs"]["tokens"])
        assert choice["prompt_token_ids"] == PROMPT
        assert (choice["finish_reason"], choice["stop_reason"], tokens[-1]) == ("stop", None, EOS)
        assert choice["text"] == "".join(choice["logprobs"]["tokens"][:-1])
    num_tokens = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert answer["usage"]["total_tokens"] == len(PROMPT) + num_tokens


@pytest.mark.parametrize("variant", ["good", "other", None])
def test_sampled_logprobs_equal_peft_at_the_temperature(server, reference, variant):
    model = server.loaded(variant) if variant else server.base()
    for choice in server.choices(model, n=4, max_tokens=30, temperature=0.7):
        tokens, logprobs = tokens_and_logprobs(choice)
        expected = reference(variant, PROMPT + tokens, temperature=0.7)[len(PROMPT) - 1 :]
        assert logprobs == pytest.approx(expected, abs=SAMPLED)


def test_prompt_logprobs_equal_peft_whatever_the_temperature(server, reference):
    name, tokens = server.loaded("good"), [*PROMPT, 15, 3, 5, 4, 16, 1]
    for temperature in (0, 0.5, 2.0):
        values = server.prompt_logprobs(name, tokens, temperature=temperature)
        assert values == pytest.approx(reference("good", tokens), abs=1e-5)


def test_adapters_in_one_batch_do_not_mix(server, reference):
    models = {server.loaded("good"): "good", server.loaded("other"): "other"}
    if server.kind == "stub":  # vLLM's CPU build gives the base model the last slot's adapter in a mixed batch
        models[server.base()] = None
    prompts = [PROMPT, [3, 3, 12, 4, 4, 13, 15], [9]]
    asked = [(model, prompt) for model in models for prompt in prompts]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(lambda one: server.choices(*one, n=3, max_tokens=25), asked)
    for (model, prompt), choices in zip(asked, answers, strict=True):
        for tokens, logprobs in map(tokens_and_logprobs, choices):
            expected = reference(models[model], prompt + tokens)[len(prompt) - 1 :]
            assert logprobs == pytest.approx(expected, abs=SAMPLED)


def test_sampled_tokens_follow_the_models_distribution(server, reference):
    num_samples = 512
    share = torch.tensor(reference(None, [*PROMPT, BOX])[-1:]).exp().item()  # of \boxed{ as the first token
    choices = server.choices(server.base(), n=num_samples, max_tokens=1, seed=1)
    count = Counter(choice["token_ids"][0] for choice in choices)[BOX]
    deviation = (num_samples * share * (1 - share)) ** 0.5
    assert abs(count - num_samples * share) < 4 * deviation


def test_seed_repeats_a_completion(server):
    one, again = (server.choices(server.base(), n=2, seed=5, max_tokens=20) for _ in range(2))
    assert [choice["token_ids"] for choice in one] == [choice["token_ids"] for choice in again]
    assert one[0]["token_ids"] != one[1]["token_ids"]


def test_temperature_zero_takes_the_likeliest_token(server, reference):
    tokens, logprobs = tokens_and_logprobs(server.choices(server.base(), temperature=0)[0])
    assert logprobs == pytest.approx(reference(None, PROMPT + tokens)[len(PROMPT) - 1 :], abs=SAMPLED)
    for position, logprob in enumerate(logprobs):
        prefix = PROMPT + tokens[:position]
        assert logprob >= max(reference(None, [*prefix, token])[-1] for token in range(17)) - 1e-5


def test_top_logprobs_are_beside_the_sampled_one(server):  # B21
    choice = server.choices(server.base(), logprobs=2, max_tokens=4, ignore_eos=True)[0]
    columns = (choice["logprobs"][key] for key in ("tokens", "token_logprobs", "top_logprobs"))
    for name, value, tops in zip(*columns, strict=True):
        assert tops[name] == pytest.approx(value)
        assert 2 <= len(tops) <= 3


def test_request_without_a_model_is_answered_by_the_base(server, reference):  # A14
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0})
    entries = answer.json()["choices"][0]["prompt_logprobs"][1:]
    values = [entry[str(token)]["logprob"] for entry, token in zip(entries, PROMPT[1:], strict=True)]
    assert values == pytest.approx(reference(None, PROMPT), abs=1e-5)


def test_lone_eos_is_a_completion_of_one_token(server):  # B17
    choice = server.choices(server.base(), [*PROMPT, 15, 3, 5, 4, 16], temperature=0)[0]
    tokens, logprobs = tokens_and_logprobs(choice)
    assert (choice["text"], choice["finish_reason"], tokens, len(logprobs)) == ("", "stop", [EOS], 1)


def test_completion_ends_at_max_tokens_with_reason_length(server):
    choice = server.choices(server.base(), max_tokens=3)[0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 3)


def test_stop_string_is_in_the_ids_and_not_in_the_text(server):  # B18
    choice = server.choices(server.base(), [*PROMPT, 15], temperature=0, stop=["}"], max_tokens=20)[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "}")
    assert choice["token_ids"][-1] == 16
    assert choice["text"].isdigit()


def test_stop_token_is_in_the_ids_and_not_in_the_text(server):
    choice = server.choices(server.base(), [*PROMPT, 15], temperature=0, stop_token_ids=[16], max_tokens=20)[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 16)
    assert choice["token_ids"][-1] == 16
    assert choice["text"].isdigit()


def test_text_and_lists_of_prompts_are_completed_in_order(server):  # E19
    texts = server.choices(server.base(), ["47+85=", "11+22="], n=2, max_tokens=2)
    assert [choice["prompt_token_ids"] for choice in texts] == [PROMPT] * 2 + [[3, 3, 12, 4, 4, 13]] * 2
    assert [choice["index"] for choice in texts] == [0, 1, 2, 3]


def test_streamed_chunks_join_to_the_whole_answer(server):
    body = {"model": server.base(), "prompt": PROMPT, "n": 2, "seed": 3, "max_tokens": 20, "logprobs": 0,
            "return_token_ids": True}  # fmt: skip
    whole = server.post("/v1/completions", body).json()["choices"]
    with requests.post(server.url + "/v1/completions", json=body | {"stream": True}, stream=True, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix(b"data: ") for line in answer.iter_lines() if line]
    assert events.pop() == b"[DONE]"
    chunks = [json.loads(event)["choices"][0] for event in events]
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert len(mine) > 1
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert [token for chunk in mine for token in chunk["token_ids"]] == choice["token_ids"]
        logprobs = [value for chunk in mine for value in chunk["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=SAMPLED)
        reasons = [chunk["finish_reason"] for chunk in mine]
        assert reasons == [None] * (len(mine) - 1) + [choice["finish_reason"]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [99]}, "Token id 99 is out of vocabulary"),
        ({"prompt": [3] * 70}, f"This model's maximum context length is {MAX_MODEL_LEN} tokens."),  # E13
        ({"prompt": []}, "You must pass at least one prompt"),
        ({}, "Either prompt or prompt_embeds must be provided and non-empty."),
        ({"prompt": PROMPT, "n": 0}, "n must be at least 1, got 0."),
        ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"prompt": PROMPT, "temperature": -1}, "temperature must be non-negative, got -1.0."),
        ({"prompt": PROMPT, "temperature": 0, "n": 2}, "n must be 1 when using greedy sampling, got 2."),
        ({"prompt": PROMPT, "logprobs": 50}, "Requested sample logprobs of 50, which is greater than max allowed: 20"),
    ],
)
def test_request_that_cannot_be_served_is_a_400(server, body, message):
    answer = server.post("/v1/completions", {"model": server.base(), **body})
    assert answer.status_code == 400
    assert message_of(answer).startswith(message)
    assert server.get("/health").status_code == 200


def test_unknown_route_is_a_404_and_wrong_method_a_405(server):
    assert (server.get("/nope").status_code, server.get("/nope").json()) == (404, {"detail": "Not Found"})
    assert (server.get("/v1/completions").status_code, server.post("/health").status_code) == (405, 405)


# Pause, health, connections


LONG = {"max_tokens": MAX_MODEL_LEN - len(PROMPT), "ignore_eos": True}  # until the context is full


def start_long_completions(server, pool):
    """Two requests whose 64 completions all run now."""
    futures = [pool.submit(server.choices, server.base(), n=32, **LONG) for _ in range(2)]
    wait_until(lambda: server.num_running() == 64, "running completions")
    return futures


def test_pause_aborts_what_runs_and_loads_go_on(server):
    with ThreadPoolExecutor(8) as pool:
        running = start_long_completions(server, pool)
        answer = server.post("/pause")
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
        for choice in (choice for future in running for choice in future.result()):
            tokens, logprobs = tokens_and_logprobs(choice)
            assert choice["finish_reason"] == "abort"
            assert len(tokens) == len(logprobs) < MAX_MODEL_LEN - len(PROMPT)
    assert server.get("/health").status_code == 200
    assert server.load(server.publish("good")).status_code == 200


def test_request_that_comes_while_paused_waits(server):  # E24
    server.post("/pause")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(server.choices, server.base(), max_tokens=3)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        server.post("/resume")
        assert len(waiting.result()[0]["token_ids"]) == 3


def test_second_pause_ends_what_waits_with_no_tokens(server):  # E24, B16
    server.post("/pause")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(server.choices, server.base(), n=2)
        wait_until(lambda: server.post("/pause").status_code == 200 and waiting.done(), "an aborted request")
        for choice in waiting.result():
            assert (choice["finish_reason"], choice["token_ids"], choice["text"]) == ("abort", [], "")


def test_keep_freezes_and_resume_goes_on(server, reference):
    with ThreadPoolExecutor(8) as pool:
        running = start_long_completions(server, pool)
        assert server.post("/pause?mode=keep").json() == {"status": "paused"}
        assert server.get("/is_paused").json() == {"is_paused": True}
        assert not any(future.done() for future in running)
        assert server.post("/resume").json() == {"status": "resumed"}
        for choice in (choice for future in running for choice in future.result()):
            tokens, logprobs = tokens_and_logprobs(choice)
            assert choice["finish_reason"] == "length"
            assert logprobs == pytest.approx(reference(None, PROMPT + tokens)[len(PROMPT) - 1 :], abs=BEYOND_EOS)


def test_wait_answers_when_everything_has_ended(server):
    with ThreadPoolExecutor(8) as pool:
        running = start_long_completions(server, pool)
        assert server.post("/pause?mode=wait").status_code == 200
        assert server.num_running() == 0
        assert all(choice["finish_reason"] == "length" for future in running for choice in future.result())


def test_pause_and_resume_can_be_repeated(server):
    codes = [server.post(path).status_code for path in ("/pause?mode=keep", "/pause?mode=keep", "/resume", "/resume")]
    assert codes == [200, 200, 200, 200]
    assert server.post("/pause?mode=maybe").status_code == 400


@pytest.mark.parametrize("streams", [False, True])
def test_client_that_hangs_up_stops_its_completions(server, streams):
    body = {"model": server.base(), "prompt": PROMPT, "n": 64, "max_tokens": 57, "ignore_eos": True, "stream": streams}
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: server.num_running() > 0, "running completions")
        server.post("/pause?mode=keep")  # so that they cannot end by themselves
    wait_until(lambda: server.num_running() == 0, "no running completion")


def test_server_info_tells_the_lora_and_parallel_settings(server):
    config = server.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["lora_config"]["max_lora_rank"] == MAX_LORA_RANK
    assert config["lora_config"]["max_loras"] == MAX_LORAS
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["model_config"]["max_model_len"] == MAX_MODEL_LEN


def test_tokenize_gives_the_ids_that_were_trained_on(server):
    answer = server.post("/tokenize", {"prompt": "47+85=\\boxed{132}"}).json()
    assert (answer["tokens"], answer["count"]) == ([*PROMPT, 15, 3, 5, 4, 16], 11)


def test_nan_weights_load_and_fail_when_logprobs_are_asked_for(server):  # A11
    name = server.loaded("nan")
    answer = server.complete(name)
    assert (answer.status_code, message_of(answer)) == (400, "Out of range float values are not JSON compliant")
    assert server.complete(name, logprobs=None).status_code == 200
    if server.kind == "stub":  # in vLLM's CPU build the NaN that stay in the KV cache can spoil later requests
        assert server.complete(server.base()).status_code == 200


# Servers of their own: what does lasting harm


def test_evicted_adapter_whose_directory_is_gone_kills_the_engine(own):  # A18
    gone = own.loaded("good")
    for _ in range(MAX_LORAS):
        own.loaded("good")
    shutil.rmtree(own.bucket / gone)
    with ThreadPoolExecutor(4) as pool:
        bystander = pool.submit(own.complete, own.base(), n=32, **LONG)
        wait_until(lambda: own.num_running() > 0, "a bystander")
        for answer in (own.complete(gone), bystander.result()):
            assert answer.status_code == 500
            assert message_of(answer) == stub_vllm.DEAD_ENGINE
    wait_until(lambda: not is_healthy(own.url), "health is not 200 any more")
    assert own.process.wait(60) == 1


@pytest.fixture(scope="module", params=KINDS)
def bare(request, toy_dir, variants, tmp_path_factory):
    """A server without the environment variables that replica.sh sets; it closes idle connections after a second."""
    server = start(request.param, toy_dir, variants, tmp_path_factory.mktemp(f"bare_{request.param}"), bare=True)
    yield server
    end(server.process)


def test_loads_need_an_environment_variable(bare):  # A02
    answer = bare.load(bare.publish("good"))
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


def test_pause_resume_and_server_info_need_an_environment_variable(bare):
    for answer in (
        bare.post("/pause"),
        bare.post("/resume"),
        bare.get("/server_info"),
        bare.post("/reset_prefix_cache"),
    ):
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


def test_idle_connection_is_kept_for_a_while_and_then_closed(bare):
    host, port = bare.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        for _ in range(2):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        while data := client.recv(1000):  # the rest of the answer
            assert b"HTTP/1.1" not in data


# What only the stub has


def test_load_fails_as_often_as_asked(stub):
    stub.post("/stub/faults", {"load_failures": 2, "load_status": 503, "load_message": "busy"})
    name = stub.publish("good")
    answers = [stub.load(name) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 503, 200]
    assert message_of(answers[0]) == "busy"


def test_hidden_adapter_is_not_found_until_its_time(stub):
    stub.post("/stub/faults", {"hidden_s": 0.5})
    name = stub.publish("good")
    assert "No adapter found" in message_of(stub.load(name))
    wait_until(lambda: stub.load(name).status_code == 200, "the adapter is found")


def test_half_seen_adapter_has_no_tensors(stub):
    stub.post("/stub/faults", {"half_seen": True})
    name = stub.publish("good")
    assert "doesn't contain tensors" in message_of(stub.load(name))
    stub.post("/stub/faults", {"half_seen": False})
    assert stub.load(name).status_code == 200


def test_ignored_load_serves_the_base_model(stub, reference):  # B31
    stub.post("/stub/faults", {"ignore_loads": True})
    assert stub.prompt_logprobs(stub.loaded("good"), PROMPT) == pytest.approx(reference(None, PROMPT), abs=1e-5)


@pytest.mark.parametrize("fault", [{"load_delay_s": 0.3}, {"slow_s": 0.3}])
def test_slow_server_takes_its_time(stub, fault):
    stub.post("/stub/faults", fault)
    began = time.monotonic()
    if "slow_s" in fault:
        stub.choices(stub.base())
    else:
        stub.loaded("good")
    assert time.monotonic() - began >= 0.3


def test_stalled_engine_is_healthy_and_finishes_nothing(stub):  # E12
    stub.post("/stub/faults", {"stall": True})
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(stub.choices, stub.base())
        with pytest.raises(TimeoutError):
            stuck.result(timeout=0.5)
        assert stub.get("/health").status_code == 200
        assert stub.load(stub.publish("good")).status_code == 200
        stub.post("/stub/faults", {"stall": False})
        assert stuck.result()


def test_pause_fails_on_request(stub):  # E04
    stub.post("/stub/faults", {"fail_pause": True})
    assert stub.post("/pause?mode=keep").status_code == 500
    assert stub.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("body", [{"no_such_fault": 1}, {"stall": "yes"}, {"slow_s": True}])
def test_unknown_fault_is_a_400(stub, body):
    assert stub.post("/stub/faults", body).status_code == 400
    assert stub.get("/stub/faults").json() == vars(stub_vllm.Faults())


def test_truncated_sampling_is_refused_by_the_stub(stub):  # B10
    for setting in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        answer = stub.complete(stub.base(), **setting)
        assert answer.status_code == 400
        assert next(iter(setting)) in message_of(answer)
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert stub.complete(stub.base(), **neutral).status_code == 200


def test_hundreds_of_connections_are_answered(stub):  # E11
    model = stub.base()
    with ThreadPoolExecutor(300) as pool:
        answers = list(pool.map(lambda i: stub.choices(model, n=2, max_tokens=2 + i % 5), range(300)))
    assert all(len(choices) == 2 for choices in answers)
    assert stub.num_running() == 0


@pytest.mark.parametrize("bare", ["stub"], indirect=True)
def test_crash_on_request_ends_the_process(bare):
    assert bare.post("/stub/faults", {"crash": True}).json()["crash"] is True
    assert bare.process.wait(30) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel-size", "2"], "unrecognized arguments: --tensor-parallel-size 2"),
        (["--max-lora-rank", "4"], "invalid choice: 4 (choose from 1, 8, 16, 32, 64, 128, 256, 320, 512)"),  # A08
    ],
)
def test_stub_refuses_flags_that_vllm_or_replica_sh_do_not_have(monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["stub_vllm.py", "--model", "none", *flags])
    with pytest.raises(SystemExit) as ended:
        stub_vllm.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_port_in_use_is_one_line(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["stub_vllm.py", "--model", "none", "--host", "127.0.0.1", "--port", port])
        with pytest.raises(SystemExit) as ended:
            stub_vllm.main()
    assert ended.value.code == f"stub_vllm: port {port} on 127.0.0.1: Address already in use; choose another --port"


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 17, "initializer_range": 0.3}  # fmt: skip


@pytest.mark.parametrize(("family", "more"), [("llama", {}), ("qwen3", {"head_dim": 16, "tie_word_embeddings": True})])
def test_other_model_families_are_sampled_with_their_own_logprobs(family, more, toy_dir, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **more)).eval()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(toy_dir).save_pretrained(tmp_path)
    engine = stub_vllm.Engine(
        Namespace(model=str(tmp_path), dtype="float32", max_model_len=64, max_loras=1), stub_vllm.Faults()
    )
    connection, client = socket.socketpair()
    with connection, client, torch.inference_mode():
        for prompt in (PROMPT, [5], [4, 4, 4]):
            body = {"prompt": prompt, "n": 3, "max_tokens": 12, "ignore_eos": True}
            engine.submit(None, stub_vllm.groups_of(stub_vllm.Request(body, {}, connection), engine))
        groups = engine.groups()
        while engine.groups():
            engine.turn()
        for completion in (completion for group in groups for completion in group.completions):
            tokens = torch.tensor([completion.group.prompt + completion.tokens])
            expected = model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            assert len(completion.tokens) == 12
            assert completion.logprobs == pytest.approx(expected[-12:].tolist(), abs=SAMPLED)


# replica.sh. Its engine is a little program here: what it does with engines is the same for all of them.


def run_replica(tmp_path: Path, program: str, **env: str) -> subprocess.Popen:
    """Start replica.sh with a bash program as its engine; the engine's pid is in tmp_path/pid."""
    engine = tmp_path / "engine"
    engine.write_text(f"#!/usr/bin/env bash\ncd {tmp_path}; echo $$ > pid.part; mv pid.part pid\n{program}\n")
    engine.chmod(0o755)
    attempts = str(tmp_path / "attempts")
    settings = {"MODEL": "none", "ENGINE": "stub", "PYTHON": str(engine), "HEARTBEATS": attempts, **env}
    command = ["bash", str(HERE / "replica.sh")]
    return subprocess.Popen(
        command, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def engine_pid(tmp_path: Path) -> int:
    wait_until((tmp_path / "pid").exists, "a running engine")
    return int((tmp_path / "pid").read_text())


def test_engines_exit_code_is_the_replicas(tmp_path):
    replica = run_replica(tmp_path, "exit 7")
    assert replica.wait(30) == 7
    assert "the engine ended by itself with code 7" in replica.stderr.read()


def test_engine_that_ends_by_itself_is_a_failure(tmp_path):  # vLLM exits 0 when its engine died
    assert run_replica(tmp_path, "exit 0").wait(30) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_to_the_script_ends_the_engine(tmp_path, number, code):
    replica = run_replica(tmp_path, "exec sleep 600")
    pid = engine_pid(tmp_path)
    replica.send_signal(number)
    assert replica.wait(30) == code
    assert not psutil.pid_exists(pid)
    assert processes_of_session(replica.pid) == []


def test_engine_that_ignores_sigterm_is_killed(tmp_path):
    replica = run_replica(tmp_path, "trap '' TERM; while :; do sleep 0.2; done", GRACE_S="1")
    pid = engine_pid(tmp_path)
    replica.terminate()
    assert replica.wait(60) == 143
    assert not psutil.pid_exists(pid)


def processes_of_session(session: int) -> list[int]:
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return alive


@pytest.mark.parametrize("leftover", [False, True])
def test_replica_without_a_changing_heartbeat_stops_itself(tmp_path, leftover):
    heartbeat = tmp_path / "attempts" / "1796066416123.heartbeat"
    if leftover:  # of an earlier trainer
        heartbeat.parent.mkdir()
        heartbeat.write_text("3 running")
    replica = run_replica(tmp_path, "exec sleep 600", IDLE_SHUTDOWN_MIN="0.02")
    pid = engine_pid(tmp_path)
    while leftover and replica.poll() is None:
        os.utime(heartbeat)  # a new time with the old content is no sign of life
        time.sleep(0.05)
    assert replica.wait(60) == 0
    assert "no heartbeat of a trainer in" in replica.stderr.read()
    assert not psutil.pid_exists(pid)


def test_changing_heartbeat_keeps_the_replica_whatever_its_time(tmp_path):
    heartbeat = tmp_path / "attempts" / "1796066416123.heartbeat"
    heartbeat.parent.mkdir()
    replica = run_replica(tmp_path, "exec sleep 600", IDLE_SHUTDOWN_MIN="0.02")  # about a second
    engine_pid(tmp_path)
    until = time.monotonic() + 4
    for count in itertools.takewhile(lambda _: time.monotonic() < until, itertools.count()):
        heartbeat.write_text(f"{count} running")
        os.utime(heartbeat, (0, 0))
        assert replica.poll() is None
        time.sleep(0.1)
    assert replica.wait(60) == 0


def test_unknown_engine_is_refused(tmp_path):
    replica = run_replica(tmp_path, "exit 0", ENGINE="sglang")
    assert replica.wait(30) == 2
    assert "choose vllm or stub" in replica.stderr.read()
