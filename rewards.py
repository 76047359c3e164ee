r"""When is an answer right, and who may say so?

`grade` compares the last \boxed{...} of a completion with the gold answer as a mathematics teacher would: the same
spelling after normalising, or the same number, or the same parts (lists, pairs, intervals, matrices), or the same value
wherever both are real numbers; math-verify is asked about sets and relations.

A reward of your own is a function in a file, called as TRL calls it: once per group, with lists of equal length.

    def concise(completions, **columns):  # prompts, completion_ids, truncated and the dataset's columns, by name
        return [max(0.0, 1 - len(completion) / 4000) for completion in completions]  # None: cannot be scored

    python launch.py --local --reward my.py:concise,rewards:math_reward    # several are summed
    python rewards.py 'so \boxed{0.5}' '\frac{1}{2}'                       # grade one completion by hand

`RewardPool` runs the functions in processes that can be killed, because algebra can hang or eat all memory. A function
that fails on a group is asked about one completion at a time, so only the bad ones lose their reward.
"""

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import logging
import math
import multiprocessing
import os
import pickle
import re
import resource
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from fractions import Fraction
from functools import lru_cache
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path

import pebble

from config import Config, did_you_mean
from grading.spelling import has_name, last_box, normalise, number, pieces, split, squeeze

Reward = Callable[..., list[float | None]]

REWARD_MEMORY_MB = 1024  # what a worker may use beyond its imports
MAX_ANSWER_CHARS = 1000  # no gold is as long, and parsing takes its time


class RewardError(Exception):
    """A reward function is broken: the run must stop, not train on what it returns."""


# --- is it the same value --------------------------------------------------------------------------------------------

EQUALS = r"(?<![<>!:\\])=|\\in(?![a-zA-Z])"
RELATION = re.compile(r"[<>]|\\(?:[lg]eq?|[lg]t|mathbb)(?![a-zA-Z])")
WITH_BASE = re.compile(r"(-?[0-9][0-9A-Za-z]*)_(\d+)")
CHOICE = re.compile(r"\(?([A-J])(?:\)|(?<!\(.)[.:])\s*(?=[ \d\\])(?!\\c[au]p)(.+)", re.DOTALL)
TOO_LARGE = re.compile(r"\^\{?[^{}^]*\^\{?[^{}^]*\^|\^\{?\d+\^\{?\d\d|\^\{?-?\d{6}|(?:\d{5}|[!}]\)?)!|(?:log.*){4}")
MAX_DEPTH = 10  # of brackets: antlr's time grows exponentially


def grade(completion: str, answer: object) -> float | None:
    """1.0 if the last \\boxed{...} of a completion is the gold `answer`, else 0.0; None without a usable gold.

    A gold is any value of a dataset: text (of which what follows ####, or is in the last box, counts), a number, or a
    list: a single item is the gold, several are all wanted, in any order. Where mathematicians differ:
    - Only the last box counts, and it must be closed. Repeating it is fine; a list of guesses is another answer.
    - Lists and sets have no order, pairs and intervals do. Every part must match, as often as the gold has it. A pair
      may lack its parentheses. A choice may come with its text, (C) 12: both must be what the gold has of it.
    - Exact values must be equal; a decimal stands for one if it is right to 10^-6 (1/3 is 0.333333, not 0.33).
    - 28\\% is 28 and is 0.28; 2 thousand is 2000. Unsimplified values count; `x = 5` is 5. R is not r.
    - A unit, a currency, what is counted (5 apples) or a base (1010_2) may be left out; only bases are compared.
    - Words ignore case, punctuation and a final s ("no solution", "No solutions"); times (12:00) are words.
    """
    gold, box = read_gold(answer), last_box(completion)
    if gold is None or box is None:
        return None if gold is None else 0.0
    if squeeze(box) == squeeze(gold):
        return 1.0
    try:
        return float(len(box) <= MAX_ANSWER_CHARS and same_answer(normalise(gold), normalise(box)))
    except MemoryError:
        raise
    except Exception:  # made-up mathematics makes sympy raise anything
        return 0.0


def read_gold(answer: object) -> str | None:
    """The gold as text; None if it is missing or NaN, empty, cut off, or ends in an operator."""
    if isinstance(answer, list | tuple):
        parts = [read_gold(part) for part in answer]
        return None if None in parts or not parts else "; ".join(parts)
    if answer is None or answer != answer:  # NaN
        return None
    text = str(answer)
    if "####" in text:  # GSM8K
        text = text.rpartition("####")[2].strip().partition("\n")[0]
    text = last_box(text) or text
    value = normalise(text) if last_box(rf"\boxed{{{text}}}") == text else ""
    return text if re.search("[A-Za-z0-9]", value) and not re.search(r"(?<![\^_])[-+*/=<>]$", value) else None


def same_answer(gold: str, pred: str) -> bool:
    """`same`, where a normalised answer may be a choice with its text: what both have of it must match."""
    (label, text), (pred_label, pred_text) = label_and_text(gold), label_and_text(pred)
    if not (label and text) and not (pred_label and pred_text):
        return same(gold, pred)
    same_label = not label or not pred_label or label == pred_label
    return same_label and (not text or not pred_text or same(text, pred_text))


def label_and_text(answer: str) -> tuple[str, str]:
    """Of a normalised answer: (C) 12 has both, C the first, 12 the second."""
    if match := CHOICE.fullmatch(re.sub(r"^\\text\{\s*\(?([A-J])[).:]\s+", r"(\1) \\text{", answer)):
        return match[1], match[2].strip()
    return (answer, "") if re.fullmatch("[A-J]", answer) else ("", answer)


def same(gold: str, pred: str) -> bool:
    """Whether two normalised answers are the same value; anything with a comma, a bracket or = is taken apart."""
    if squeeze(gold) == squeeze(pred):
        return True
    if any(r"\text{" in text or re.search(r"\d\s*:\s*\d", text) for text in (gold, pred)):
        return same_words(gold, pred)
    (gold_kind, golds), (pred_kind, preds) = pieces(gold), pieces(pred)
    kinds = {gold_kind, pred_kind}
    if not kinds & {"list", "set"} and len(split(gold, EQUALS) + split(pred, EQUALS)) > 2:
        return same_equation(gold, pred)
    if kinds == {""}:
        return same_value(gold, pred)
    if "" in kinds and not kinds & {"list", "set"}:  # 1 < x < 2 and (1, 2)
        return RELATION.search(gold + pred) is not None and same_math(gold, pred)
    if len(golds) != len(preds):
        return False
    if kinds <= {"list", "set", ""} or kinds == {"union"}:  # in any order
        for part in golds:
            match = next((other for other in preds if same(part, other)), None)
            if match is None:
                return False
            preds.remove(match)
        return True
    return (len(kinds) == 1 or kinds == {"list", "()"}) and all(map(same, golds, preds))


def same_words(gold: str, pred: str) -> bool:
    """Whether two texts or times have the same words; a.m. or p.m. may be left out, as a unit may."""
    golds, preds = words(gold), words(pred)
    short, long = sorted((golds, preds), key=len)
    return golds == preds or (":" in gold and long in ([*short, "am"], [*short, "pm"]))


def words(text: str) -> list[str]:
    """The words of a text, without case, punctuation and final s; of a time, without leading zeros."""
    text = re.sub(r"[A-Za-z]{2,}", lambda m: m[0].lower(), text)  # a single letter is a symbol
    text = re.sub(r"\\text|(?<!\d)\.|\.(?!\d)", "", text)
    text = re.sub(r"\s*:\s*", ":", re.sub(r"(?<![\d.:])0+(?=\d)", "", text))
    found = re.sub(r"[^A-Za-z0-9:.+*/^=-]+", " ", text).split()
    return [word.rstrip("s") if len(word) > 3 else word for word in found]


def same_equation(gold: str, pred: str) -> bool:
    """Whether equations are the same, where one side may be only the value: x = 5 and 5, 2 + 3 = 5 and 5."""
    golds, preds = split(gold, EQUALS), split(pred, EQUALS)
    if len(golds) == 1:  # what stands before the value is a name, or must have that value, too
        return same(gold, preds[-1]) and all(has_name(part) or same(gold, part) for part in preds[:-1])
    if len(preds) == 1:
        return len(golds) == 2 and has_name(golds[0]) and len(squeeze(golds[0])) <= 4 and same(golds[1], pred)
    if len(golds) == len(preds) == 2 and squeeze(golds[0]) == squeeze(preds[0]):
        return same(golds[1], preds[1])
    return same_math(gold, pred)


def same_value(gold: str, pred: str) -> bool:
    """Whether two expressions without commas and equals signs have the same value."""
    plain = gold.removesuffix(r"\%"), pred.removesuffix(r"\%")
    if plain != (gold, pred):  # 28\%, 28, 0.28
        both = zip(plain, (gold, pred), strict=True)
        return same(*plain) or same(*[text if text == all_ else rf"\frac{{{text}}}{{100}}" for text, all_ in both])
    if WITH_BASE.fullmatch(gold) or WITH_BASE.fullmatch(pred):
        (a, _, gold_base), (b, _, pred_base) = gold.partition("_"), pred.partition("_")
        return a.lower() == b.lower() and (not gold_base or not pred_base or gold_base == pred_base)
    a, b = number(gold), number(pred)
    if a is None or b is None:
        return same_math(gold, pred)
    return a == b or ("." in gold + pred and abs(a - b) < Fraction(1, 10**6) and abs(a - b) <= abs(a) / 10**5)


@lru_cache(maxsize=1024)
def same_math(gold: str, pred: str) -> bool:
    """Whether two expressions have the same value; math-verify's verdict on sets, relations and what has no value."""
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeout is off
    a, b = parse_math(gold), parse_math(pred)
    if a is None or b is None:
        return False
    equal = same_where_real(a, b)
    return verify(a, b, allow_set_relation_comp=True, timeout_seconds=None) if equal is None else equal


@lru_cache(maxsize=1024)
def parse_math(text: str):
    """A normalised answer as a sympy object; None if it cannot be read, or its value would fill the memory."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    depth = max(accumulate((char in "({[") - (char in ")}]") for char in text))
    if depth > MAX_DEPTH or TOO_LARGE.search(text):
        return None
    cased = ConversionConfig(lowercase_symbols=False)
    found = latex2sympy(text, is_real=True, normalization_config=None, conversion_config=cased)
    if found.has(sympy.nan, sympy.zoo):
        return None
    return found.subs({symbol: sympy.I for symbol in found.free_symbols if symbol.name == "i"})


def same_where_real(a, b) -> bool | None:
    """Whether two sympy expressions have the same value wherever both are real; None if they have no value.

    Exact ones must agree to 10^-20, decimals to 10^-6 and 1 in 10^5. sqrt(1/n) is 1/sqrt(n); sqrt(x^2) is not x.
    """
    import sympy

    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return None
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    limit, relative = (1e-6, 1e-5) if a.has(sympy.Float) or b.has(sympy.Float) else (math.inf, 1e-20)
    verdicts: dict[bool, list[bool]] = {True: [], False: []}  # by whether both values are real
    try:
        for signs in ((1, 1), (-1, -1), (1, -1))[: 3 if symbols else 1]:
            point = {symbol: signs[i % 2] * sympy.Rational(17 + 6 * i, 13) for i, symbol in enumerate(symbols)}
            x, y = a.subs(point).evalf(30), b.subs(point).evalf(30)
            gap, size = abs(x - y), max(abs(x), abs(y))
            equal = x == y or (size.is_finite and gap <= limit and gap <= relative * size)
            verdicts[bool(x.is_real and y.is_real)].append(bool(equal))
    except MemoryError:
        raise
    except Exception:  # sympy raises anything when an expression has no value
        return None
    return all(verdicts[True] or verdicts[False])


# --- reward functions ------------------------------------------------------------------------------------------------


def math_reward(completions: list, answer: list, truncated: list | None = None, **columns) -> list[float | None]:
    """`grade` of each completion, text or messages; 0 if it was truncated, None without a usable gold."""
    cut = truncated or [False] * len(completions)
    texts = ["" if is_cut else text_of(completion) for completion, is_cut in zip(completions, cut, strict=True)]
    return [grade(text, gold) for text, gold in zip(texts, answer, strict=True)]


def format_reward(completions: list, **columns) -> list[float]:
    """0.1 for exactly one box, closed and not empty: a small reward to add to another."""
    return [0.1 * (text.count(r"\boxed") == 1 and bool(last_box(text))) for text in map(text_of, completions)]


def text_of(completion: str | list[dict]) -> str:
    """The text of a completion, or the content of the last of its messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


def warm_up() -> None:
    """Import sympy and fill the parser's tables. A reward file may have such a function, called in each new worker."""
    for text in (r"\frac{\sqrt{3}}{2}+2\pi", r"-2x^2+3xy", r"\frac{x-1}{y}", r"x^4/x^2", r"\log_2 3", r"1<x<\infty"):
        same_math(text, "x^2")


# --- which functions, and calling them as TRL does -------------------------------------------------------------------


def load_rewards(spec: str) -> list[Reward]:
    """The functions that "module:function,folder/file.py:function" names; ValueError with the cure if there is none."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # python /some/where/trainer.py looks in /some/where only
    return [load_reward(name.strip()) for name in spec.split(",")]


def load_reward(name: str) -> Reward:
    """The function that "module:function" or "file.py:function" names; see load_rewards."""
    where, _, function_name = name.rpartition(":")
    if not (where and function_name):
        raise ValueError(f"reward {name!r}: must be module:function, for example rewards:math_reward")
    file = Path(where if where.endswith(".py") else f"{where}.py").expanduser().resolve()
    try:
        module = load_file(file) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        if isinstance(error, FileNotFoundError) or getattr(error, "name", "") == where.partition(".")[0]:
            near = did_you_mean(file.stem, [path.stem for path in file.parent.glob("*.py")])
            cure = f"put {file.name} into {file.parent}, or name its path: folder/{file.name}:{function_name}"
            raise ValueError(f"reward {name}: there is no module {where}; {near}{cure}") from error
        cure = f"; install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        what = f"importing {where} failed: {type(error).__name__}: {error}{cure}"
        raise ValueError(f"reward {name}: {what}") from error
    if (function := getattr(module, function_name, None)) is None:
        near = did_you_mean(function_name, [key for key, value in vars(module).items() if inspect.isfunction(value)])
        raise ValueError(f"reward {name}: {where} has no function {function_name}; {near}define it or correct the name")
    if not callable(function):
        raise ValueError(f"reward {name}: is a {type(function).__name__}, not a function; name a function")
    return function


def load_file(path: Path) -> object:
    """The module in a file, named by the file's path: a file of one's own may be called rewards.py, too."""
    if str(path) not in sys.modules:
        sys.path += [str(path.parent)] * (str(path.parent) not in sys.path)  # for what it imports from its folder
        spec = importlib.util.spec_from_file_location(str(path), path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[str(path)] = module
    return sys.modules[str(path)]


def importable_name(function: Reward) -> str:
    """The "module:function" by which a worker finds a function; ValueError if it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", repr(function))
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not function:
        cure = "define it with def at the top level of a file of its own, such as my_rewards.py"
        raise ValueError(f"reward function {name}: the reward workers cannot import it; {cure}")
    return f"{module}:{name}"


def arguments(function: Reward, completions: list[str], columns: dict[str, list]) -> dict:
    """What TRL calls a function with: messages if the prompts are, and only what it names if it has no **columns."""
    loggers = dict.fromkeys(("log_extra", "log_metric"), lambda *args: None)
    given = {**loggers, **columns, "completions": completions}
    prompts = columns.get("prompts")
    if prompts and isinstance(prompts[0], list):  # chat; what the prompt has begun of the answer is part of it
        begun = [prompt[-1]["content"] if prompt[-1]["role"] == "assistant" else "" for prompt in prompts]
        texts = map("".join, zip(begun, completions, strict=True))
        given["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    return {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}


def call(name: str, completions: list[str], columns: dict[str, list]) -> tuple[list[float | None] | None, str, str]:
    """(rewards, "", "") of a group, or (None, what is wrong with the function, its traceback)."""
    given, returned = {}, None
    try:
        function = load_reward(name)
        given = arguments(function, completions, columns)
        returned = function(**given)
        returned = asyncio.run(returned) if inspect.iscoroutine(returned) else returned
        rewards = [None if reward is None else float(reward) for reward in returned]
    except MemoryError:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame for frame in frames[::-1] if frame.filename != __file__), frames[-1])
        what = f"{type(error).__name__}: {error} ({line.filename}, line {line.lineno})"
        what += f", having returned {returned!r:.100}" if returned is not None else ""
        return None, f"reward {name} raised {what}; it is called with {', '.join(given)}", traceback.format_exc()
    if len(rewards) == len(completions) and all(reward is None or math.isfinite(reward) for reward in rewards):
        return rewards, "", ""
    what = f"returned {rewards} for {len(completions)} completions: it must be one number or None for each"
    return None, f"reward {name} {what}", ""


def try_rewards(functions: list[Reward], prompt: str | list[dict], columns: dict[str, object]) -> str:
    """Why a run with these rewards would stop at its first group, or "": calls them here, for one row of the dataset.

    The two completions are made up; a function that scores one of them is good enough.
    """
    texts = [rf"So the answer is \boxed{{{columns.get('answer')}}}.", "I do not know."]
    given = {key: [value] * 2 for key, value in columns.items()}
    given |= {"prompts": [prompt] * 2, "completion_ids": [[0], [0]], "truncated": [False, False]}
    for name in map(importable_name, functions):
        problem = call(name, texts, given)[1]
        if problem and all(call(name, [text], {key: v[:1] for key, v in given.items()})[1] for text in texts):
            return problem
    return ""


# --- in a worker -----------------------------------------------------------------------------------------------------


def begin(names: list[str]) -> None:
    """Import the functions, then cap the memory above what is in use; die with the trainer (on Linux)."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a long computation at once, which a handler does not
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != multiprocessing.parent_process().pid:
        os._exit(1)
    with contextlib.suppress(Exception):  # told when the function is called
        for module in {sys.modules[load_reward(name).__module__] for name in names}:
            getattr(module, "warm_up", lambda: None)()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (statm := Path("/proc/self/statm")).exists():
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        cap = int(statm.read_text().split()[0]) * resource.getpagesize() + REWARD_MEMORY_MB * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (cap if hard == resource.RLIM_INFINITY else min(cap, hard), hard))


def work(name: str, group: bytes) -> tuple[list[float | None] | None, str, str]:
    """`call`, for a pickled (completions, columns)."""
    try:
        return call(name, *pickle.loads(group))
    except MemoryError:
        os._exit(1)  # nothing works well in it any more
    finally:
        sys.stdout.flush()  # what a reward function printed


# --- the pool, in the trainer ----------------------------------------------------------------------------------------


class RewardPool:
    """Scores groups in `workers` processes; may be called from many threads at a time.

    A completion whose worker takes longer than `timeout_s`, dies or needs more than REWARD_MEMORY_MB gets 0 and counts
    in `timeouts`; one on which a function fails gets None from it and counts in `failed`. RewardError: the first group
    fails whole, or nearly all of the last 100 completions do.
    """

    def __init__(
        self,
        functions: Reward | list[Reward],
        workers: int = Config.reward_workers,
        timeout_s: float = Config.reward_timeout_s,
        weights: list[float] | None = None,
    ):
        specs = [importable_name(function) for function in ([functions] if callable(functions) else functions)]
        short = [spec.rpartition(":")[2] for spec in specs]
        names = [f"{name}_{short[:i].count(name) + 1}" if name in short[:i] else name for i, name in enumerate(short)]
        self.specs = dict(zip(names, specs, strict=True))  # by the name for metrics
        self.workers, self.timeout_s, self.weights = workers, timeout_s, list(weights or [1.0] * len(specs))
        if len(self.weights) != len(specs):
            raise ValueError(f"{len(self.weights)} reward weights for {len(specs)} rewards: give one for each")
        self.timeouts = self.failed = 0  # completions
        self.recent = {name: deque(maxlen=100) for name in names}  # whether the function failed
        self.closed, self.lock = False, threading.Lock()
        self.pool = self.start()

    def start(self) -> pebble.ProcessPool:
        """A new pool of processes, which start at once."""
        main = sys.modules["__main__"]
        main.__spec__ = main.__spec__ or ModuleSpec("__main__", None)  # else each worker imports the trainer's script
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        specs = list(self.specs.values())
        pool = pebble.ProcessPool(self.workers, initializer=begin, initargs=[specs], context=context)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited: Ctrl-C is for the trainer
        pool.schedule(int)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pool

    def score(self, completions: list[str], columns: dict[str, object]) -> list[float | None]:
        """The weighted sum of the rewards of each completion; see `scores`."""
        return total(self.scores(completions, columns), self.weights)

    def scores(self, completions: list[str], columns: dict[str, object]) -> dict[str, list[float | None]]:
        """The rewards of one group by each function; a column is a list with one value for each, or one for all.

        Columns besides the dataset's: `prompts`, `completion_ids`, `truncated`. If prompts are lists of messages,
        completions reach the functions as messages.
        """
        size = len(completions)
        full = {name: list(v) if isinstance(v, list | tuple) else [v] * size for name, v in columns.items()}
        for name in full:
            if len(full[name]) != size:
                raise ValueError(f"column {name} has {len(full[name])} values for {size} completions")
        return {name: self.scores_of(name, completions, full) if size else [] for name in self.specs}

    def scores_of(self, name: str, completions: list[str], columns: dict[str, list]) -> list[float | None]:
        """One function's rewards: of the group at once, or else of each completion alone."""
        answer = self.ask(name, completions, columns)
        if answer[0] is not None or len(completions) == 1:
            answers = [answer] if answer[0] is None else [([reward], "", "") for reward in answer[0]]
        else:
            rows = [{key: values[i : i + 1] for key, values in columns.items()} for i in range(len(completions))]
            with ThreadPoolExecutor(len(rows)) as threads:
                answers = list(threads.map(lambda text, row: self.ask(name, [text], row), completions, rows))
        failures = [(problem, trace) for _, problem, trace in answers if problem]
        with self.lock:
            recent, first = self.recent[name], not self.recent[name]
            recent.extend(bool(problem) for _, problem, _ in answers)
            said, self.failed = self.failed, self.failed + len(failures)
            self.timeouts += sum(rewards is None and not problem for rewards, problem, _ in answers)
        if failures and ((first and len(failures) == len(answers)) or sum(recent) > 95):
            raise RewardError(failures[0][0])
        if failures and not said:
            print(f"{failures[0][0]}; such completions cannot be scored\n{failures[0][1]}", flush=True)
        return [rewards[0] if rewards else None if problem else 0.0 for rewards, problem, _ in answers]

    def ask(self, name: str, completions: list[str], columns: dict[str, list]) -> tuple:
        """What `call` returns in a worker; (None, "", "") if it took too long or died."""
        group = pickle.dumps((completions, columns))
        for _ in range(3):
            with self.lock:
                if self.closed:
                    raise RewardError("the reward pool is closed")
                if not self.pool.active:  # its workers were killed while they were idle
                    self.pool.join()
                    self.pool = self.start()
                pool = self.pool
                future = pool.schedule(work, [self.specs[name], group], timeout=self.timeout_s)
            while not future.done() and pool.active:
                wait([future], timeout=1.0)
            error = future.exception() if future.done() else BrokenProcessPool()
            if isinstance(error, pebble.ProcessExpired | TimeoutError):
                return None, "", ""
            if not isinstance(error, BrokenProcessPool):
                return future.result()
        raise RewardError("the reward workers cannot start, or are killed as soon as they do: is there memory left?")

    def close(self) -> None:
        """End all processes; what is still being scored fails."""
        with self.lock:
            self.closed = True
        self.pool.stop()
        self.pool.join()


def total(scores: dict[str, list[float | None]], weights: list[float]) -> list[float | None]:
    """The weighted sum of each completion's rewards that are not None; None if all are."""
    rows = [
        [reward * weight for reward, weight in zip(row, weights, strict=True) if reward is not None]
        for row in zip(*scores.values(), strict=True)
    ]
    return [sum(row) if row else None for row in rows]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python rewards.py COMPLETION ANSWER")
    print(grade(sys.argv[1], sys.argv[2]))
