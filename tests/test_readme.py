"""README.md and docs/: what they show is there, and what they tell people to type works.

python tests/test_readme.py     # write the line numbers anew
"""

import argparse
import ast
import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
LINK = re.compile(r"\[`(\w+)`\]\(([\w/]+\.py)#L(\d+)\)")
ROOMS = ("policy", "jobs", "report", "serving", "grading")
PRODUCT = [*ROOT.glob("*.py"), ROOT / "replica.sh", *(path for room in ROOMS for path in (ROOT / room).glob("*.py"))]
FAILURES = ROOT / "docs/failures.md"


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language; "" for those without, which hold commands."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return [text for kind, text in fenced if kind == language]


def commands() -> list[list[str]]:
    """Every command line of README.md, those in tables too, as words."""
    text = README.read_text()
    lines = [line for block in blocks("") for line in block.splitlines()]
    lines += re.findall(r"`((?:python|pytest) [^`]*)`", text)
    parts = [part for line in lines for part in line.partition("  #")[0].split("&&")]
    starts = ("python ", "pip ", "pytest ", "hf ")
    return [shlex.split(part) for part in parts if part.strip().startswith(starts)]


def definition(name: str, file: str) -> int:
    """The line in which a function or class is defined."""
    lines = (ROOT / file).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if re.match(rf"(def|class) {name}\b", line))


# --- what it shows ---


def test_links_to_lines_lead_to_what_they_name():
    links = LINK.findall(README.read_text())
    assert len(links) > 15
    assert [(name, file, definition(name, file)) for name, file, _ in links] == [(n, f, int(at)) for n, f, at in links]


def test_every_file_that_is_linked_exists_and_the_readme_is_short():
    for document in (README, *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([\w./]+)(?:#L\d+)?\)", document.read_text()):
            assert (document.parent / target).exists(), target
    assert len(README.read_text().splitlines()) <= 220


def cures() -> list[str]:
    """The messages of the troubleshooting tables."""
    return [
        m
        for cell in re.findall(r"^\| (`.*?) \|", FAILURES.read_text(), re.MULTILINE)
        for m in re.findall(r"`(.*?)`", cell)
    ]


def text_of(node: ast.expr) -> str:
    """A string as it stands in the code, "…" for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
        case ast.FormattedValue(value=ast.Call(func=ast.Name(id="flag"))):
            return "--…"
        case ast.Constant() | ast.FormattedValue() | ast.Name() | ast.Attribute() | ast.Call():
            return "…"
    return ""


def errors() -> dict[str, str]:
    """What the scripts say in errors, and where: the text of each that is raised, answered, or ends a script."""
    found = {}
    for path in [path for path in PRODUCT if path.suffix == ".py" and path.name != "bench.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("fail", "SystemExit", "ask") or (name.endswith("Error") and name not in INTERNAL):
                text = next((text for arg in node.args if len(text := text_of(arg)) > 1), "")
                found |= {text: f"{path.name}:{node.lineno}"} if re.search(r"\w", text) else {}
    return found


INTERNAL = {"AssertionError", "EOFError", "CallTimeoutError"}  # no user sees these


def test_every_error_is_in_the_troubleshooting_tables():
    patterns = [re.sub(r"\\?…|\d+", ".*", re.escape(message)) for message in cures()]
    # A message that begins with a flag has its cure in it; the rest are no errors of their own.
    own = re.compile(r"--|error: …$|usage: |no prompt_logprobs")
    missing = {
        text: where
        for text, where in errors().items()
        if not own.match(text) and not any(re.search(pattern, text) for pattern in patterns)
    }
    assert missing == {}


def test_every_message_of_the_troubleshooting_tables_can_be_printed():
    sources = "".join(re.sub(r"\{[^{}]*\}", "…", path.read_text()) for path in [*PRODUCT, ROOT / "offline/toy.py"])
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # strings that go on in the next line
    assert len(cures()) > 80
    for message in set(cures()) - {"ratio", "--max-staleness 0 --sync-every 1"}:
        words = max(re.split(r"…|--\w+ \w+: |\d+", message), key=len).strip()
        assert words in sources or "max_lora_rank" in message, message  # that one is vLLM's own


def test_flags_it_names_exist():
    import launch

    known = {flag for action in launch.launch_parser()._actions for flag in action.option_strings}
    known |= {"--plot"}
    text = re.sub(r"`python bench\.py .*?`", "", README.read_text())  # those are parsed below
    assert {f for f in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text) if f not in known} == set()


# --- what they tell people to type ---


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_are_understood(words):
    import launch
    from config import config_from

    program, rest = (words[1], words[2:]) if words[0] == "python" else (words[0], words[1:])
    if "--help" in rest:
        assert program == "launch.py"  # launch_parser makes it
    elif program == "launch.py":
        args = launch.launch_parser().parse_args(rest)
        config_from(args, args.local)
    elif program == "bench.py":
        parser = argparse.ArgumentParser()
        importlib.import_module(f"benches.bench_{rest[0]}").add_flags(parser)
        parser.parse_args(rest[1:])
    elif program == "pytest":
        assert (ROOT / rest[0]).exists()
    elif program == "pip":
        assert all((ROOT / rest[i + 1]).exists() for i, word in enumerate(rest) if word == "-r")
    else:  # test_report.py draws the curves; hf is the Hub's
        assert (program, *rest[:1]) in {("trainer.py", "--plot"), ("hf", "auth")}, words


@pytest.mark.parametrize("name", ["scale", "routing"])
def test_figures_of_the_simulations_are_met(name, tmp_path):
    """The benchmarks that take seconds; the others measure, and want the machine for themselves."""
    command = [sys.executable, str(ROOT / "bench.py"), name, f"--save-to={tmp_path}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json", f"{name}.png"}


@pytest.mark.slow
def test_forks_data_reward_and_loss_train_together(tmp_path, toy_dir):
    (tmp_path / "sums.jsonl").write_text(blocks("json")[0])
    (tmp_path / "my_rewards.py").write_text(next(block for block in blocks("python") if "def concise" in block))
    chosen = [
        words[2:]
        for words in commands()
        for mark in ("--answer-column", "--reward", "dr_grpo")
        if mark in words and "--model" not in words
    ]
    flags = dict.fromkeys(flag for words in chosen for flag in words)
    command = [sys.executable, str(ROOT / "launch.py"), *flags, "--replicas=1", "--max-steps=1", "--batch-size=16",
               "--run=fork", "--port=0"]  # fmt: skip
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    row = json.loads((tmp_path / "runs/fork/metrics.jsonl").read_text())
    assert 0 <= row["reward/mean"] <= 1.2


def test_forks_the_other_loss_has_the_derivative_it_says():
    import torch

    from config import Config

    scope = {}
    exec(next(block for block in blocks("python") if "def clipped_objective" in block), scope)
    cfg = dataclasses.replace(Config(), eps_high=0.28)
    log_ratio = torch.tensor([0.5, -0.5, 0.1], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 2.0])
    objective, slope = scope["clipped_objective"](log_ratio.detach(), advantages, cfg)
    weight = (log_ratio.exp().clamp(max=1.28) * advantages).detach()
    (weight * log_ratio).sum().backward()
    assert torch.equal(slope, log_ratio.grad)
    assert torch.equal(objective, (weight * log_ratio).detach())


def main() -> None:
    text = LINK.sub(lambda m: f"[`{m[1]}`]({m[2]}#L{definition(m[1], m[2])})", README.read_text())
    README.write_text(text)


if __name__ == "__main__":
    main()
