r"""When is an answer right?

`grade` compares the last \boxed{...} of a completion with the gold answer as a mathematics teacher would: the same
spelling after normalising, or the same number, or the same parts (lists, pairs, intervals, matrices), or the same to
math-verify, which is not asked about values that differ as numbers, because it takes tiny differences for none. A gold
answer that is missing or cannot be read gives None: never trained on.

`RewardPool` runs reward functions in worker processes, one completion per call. Symbolic algebra can hang or eat all
memory, and math-verify's own timeout works on a main thread only, so a worker that takes too long is killed: its
completion gets 0 and nothing else is lost. Workers are forked from a small host process that has imported everything
and runs nothing, so a new one is ready at once. All of them end with the trainer.

A reward of your own is a function in a file of the working directory, called as TRL calls it:

    def concise(completions, **columns):  # the dataset's columns by name, as lists; returns a number or None for each
        return [max(0.0, 1 - len(completion) / 4000) for completion in completions]

    python trainer.py --reward my_rewards:concise,rewards:math_reward      # several are summed
    python rewards.py 'so \boxed{0.5}' '\frac{1}{2}'                       # grade one completion by hand
"""

import ctypes
import gc
import importlib
import json
import logging
import math
import numbers
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import NoReturn

from config import Config

Reward = Callable[..., list[float | None]]

MAX_ANSWER_CHARS = 1000  # no gold is as long, and parsing takes its time
SLOW_S = 0.2  # a completion that takes longer stops holding up the others: one more worker takes over
MAX_SLOW = 8  # times `workers`: so many slow completions may run into their timeout at a time
START_TIMEOUT_S = 120.0  # for the host to import math-verify and the reward files
WARM_UP = (  # fills the tables of math-verify's parser
    r"\frac{\sqrt{3}}{2}+2\pi", r"\sqrt{5}", r"(x+1)(x-1)", r"-2x^2+3xy", r"3^{12}", r"\frac{x-1}{y}", r"y=2x+3", r"5!",
    r"x^4/x^2", r"\log_2 3", r"\sin^2 x", r"\begin{pmatrix}a\end{pmatrix}", r"1<x<\infty", r"\sqrt[3]{2}",
)  # fmt: skip


class RewardError(Exception):
    """A reward function is broken: the run must stop, not train on what it returns."""


# --- one spelling for one value --------------------------------------------------------------------------------------

UNICODE = {"−": "-", "–": "-", "×": r"\times ", "π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "∪": r"\cup "}
ARGUMENT = r"(\\(?!frac|sqrt)[a-zA-Z]+|[0-9a-zA-Z])"  # what TeX takes as an argument without braces
BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:\{,\}|,\s*\\!|\\!\s*,(?:\s*\\!)?)\s*(?=\d{3})", ""),  # thousands: 1{,}234 and 1,\!234
        (r"\{,\}", ","),
        (r"\\!|\\?\$|[°£€]|\\displaystyle(?![a-zA-Z])|(?<!\\)\\[()]", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\}|\\degree)|\\degree(?![a-zA-Z])", ""),
        (r"(?:(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s)+", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\\{\s*\\\}|\\varnothing", r"\\emptyset"),
        (r"\\mathrm\s*\{([ei])\}", r"\1"),
        (r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|it|sf)|mbox)\s*\{", r"\\text{"),
        (r",?\s*\\text\{\s*,?\s*(?:and|or)\s*\}|,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ","),
        (r"\s*(?:\\?%|\\text\{\s*percent\s*\}|(?<![A-Za-z{])percent)", r"\\%"),
        (r"(?<=\d)\s*(?:cm|mm|km|kg|ft|mph|sec|min|hrs?)(?![A-Za-z])(?:\s*\^\s*\{?\d\}?)?", ""),
        (rf"\\(frac|sqrt)\s*{ARGUMENT}", r"\\\1{\2}"),  # \frac12, \sqrt3
        (rf"(\\frac{BRACED})\s*{ARGUMENT}", r"\1{\2}"),
        (r"_\{(\d+)\}", r"_\1"),
    )
]
THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:([ ,])\d{3})(?:\1\d{3})*(?!\d)")
TEXT = re.compile(r"\\text\{([^{}]*)\}")
PLAIN_WORDS = re.compile(r"\\text\{[^{}]*\}|(?<![\\{A-Za-z\d])[A-Za-z]+(?: [A-Za-z]+)*")
UNIT = re.compile(r"([\w})])\s*\\text\{[^{}]*[A-Za-z][^{}]*\}(?:\s*\^\s*\{?\d+\}?)?")


def normalise(answer: str) -> str:
    """One spelling for one value: no units, currency or layout; words are inside \\text{...}, symbols are not."""
    text = answer.translate(str.maketrans(UNICODE))
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = PLAIN_WORDS.sub(lambda m: rf"\text{{{m[0]}}}" if is_phrase(m[0]) else m[0], text)
    if ":" not in text:  # in a time, the words are a.m. and p.m.
        text = UNIT.sub(r"\1", text)
    text = TEXT.sub(lambda m: m[0] if re.search("[A-Za-z]{2}", m[1]) else m[1], text)
    in_brackets = re.search(r"[(\[]|\\\{", text)  # there, (100,101) is a pair
    text = THOUSANDS.sub(lambda m: m[0] if m[1] == "," and in_brackets else m[0].replace(m[1], ""), text)
    text = text.strip().rstrip(" .,;")
    return re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # the choice (C)


def is_phrase(letters: str) -> bool:
    """Whether letters without a backslash are words, and not a product like xyz or a function; not if in \\text."""
    return re.search(r"[A-Za-z]{4}", letters) is not None and not re.search(r"\\text|sqrt|infinity", letters)


def last_box(completion: str) -> str | None:
    """What is inside the last \\boxed{...}; None if there is none, or if it is not closed."""
    boxes = list(re.finditer(r"\\boxed\s*\{", completion))
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(completion, boxes[-1].end() if boxes else len(completion)):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return completion[boxes[-1].end() : brace.start()]
    return None


# --- is it the same value --------------------------------------------------------------------------------------------

EQUALS = r"(?<![<>!:\\])=|\\in(?![a-zA-Z])"
RELATION = re.compile(r"[<>]|\\(?:[lg]eq?|[lg]t|mathbb)(?![a-zA-Z])")
MATRIX = re.compile(r"\\begin\{[pb]matrix\}(.*)\\end\{[pb]matrix\}", re.DOTALL)
BRACKETS = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", re.DOTALL)
DECIMAL = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?"
NUMBER = re.compile(rf"([+-]?)(?:({DECIMAL})(?:/(\d+))?|\\frac\{{({DECIMAL})\}}\{{({DECIMAL})\}})")
REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\overline\{(\d+)\}")
WITH_BASE = re.compile(r"(-?[0-9][0-9A-Za-z]*)_(\d+)")


def grade(completion: str, answer: str | None) -> float | None:
    """1.0 if the last \\boxed{...} of a completion is the gold `answer`, else 0.0; None without a usable gold.

    What the strictness is, where mathematicians differ:
    - Only the last box counts, and it must be closed. Repeating it is fine; a list of guesses is another answer.
    - Lists and sets have no order, pairs and intervals do. Every part must match, as often as the gold has it. A pair
      may lack its parentheses.
    - Exact values must be equal; a decimal stands for one if it is right to 10^-6 (1/3 is 0.333333, not 0.33).
    - 28\\% is 28 and is 0.28. 1e2 is 100. Unsimplified values count; `x = 5` is 5.
    - A unit, a currency or a base (1010_2) may be left out. Another base is wrong; units are not compared.
    - Words ignore case, punctuation and a final s ("no solution", "No solutions"); times (12:00) are words.
    """
    gold = read_gold(answer)
    if gold is None:
        return None
    box = last_box(completion)
    if box is None or len(box) > MAX_ANSWER_CHARS:
        return 0.0
    try:
        return float(same(gold, normalise(box)))
    except MemoryError:
        raise
    except Exception:  # as in read_gold
        return 0.0


@lru_cache(maxsize=1024)
def read_gold(answer: str | None) -> str | None:
    """The normalised gold; None if it is missing, empty, cut off or no mathematics that can be read."""
    if answer is None or answer != answer or last_box(rf"\boxed{{{answer}}}") != str(answer):  # NaN, unclosed braces
        return None
    gold = normalise(str(answer))
    try:
        return gold if gold and readable(gold) else None
    except MemoryError:
        raise
    except Exception:  # made-up mathematics makes sympy raise anything
        return None


def readable(gold: str) -> bool:
    """Whether a normalised gold is words, a number, something that math-verify can read, or made of such parts."""
    if is_words(gold):
        return bool(words(gold))
    kind, parts = pieces(gold)
    if kind:
        return all(map(readable, parts))
    value = gold.removesuffix(r"\%")
    return number(value) is not None or WITH_BASE.fullmatch(value) is not None or parse_math(value) is not None


def same(gold: str, pred: str) -> bool:
    """Whether two normalised answers are the same value; anything with a comma, a bracket or = is taken apart."""
    if squeeze(gold) == squeeze(pred):
        return True
    if is_words(gold) or is_words(pred):
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
    if kinds <= {"list", "set", ""} or kinds == {"union"}:
        return same_in_any_order(golds, preds)
    return (len(kinds) == 1 or kinds == {"list", "()"}) and all(map(same, golds, preds))


def same_words(gold: str, pred: str) -> bool:
    """Whether two texts or times have the same words; a.m. or p.m. may be left out, as a unit may."""
    golds, preds = words(gold), words(pred)
    short, long = sorted((golds, preds), key=len)
    return golds == preds or (":" in gold and long in ([*short, "am"], [*short, "pm"]))


def same_in_any_order(golds: list[str], preds: list[str]) -> bool:
    """Whether each gold part has an answer part of its own; both have the same length."""
    left = list(preds)
    for gold in golds:
        match = next((i for i, pred in enumerate(left) if same(gold, pred)), None)
        if match is None:
            return False
        del left[match]
    return True


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
    if gold.endswith(r"\%") or pred.endswith(r"\%"):
        return same_percentage(gold, pred)
    if WITH_BASE.fullmatch(gold) or WITH_BASE.fullmatch(pred):
        (a, _, gold_base), (b, _, pred_base) = gold.partition("_"), pred.partition("_")
        return a.lower() == b.lower() and (not gold_base or not pred_base or gold_base == pred_base)
    a, b = number(gold), number(pred)
    if a is None or b is None:
        return same_math(gold, pred)
    return a == b or ("." in gold + pred and abs(a - b) < Fraction(1, 10**6) and abs(a - b) <= abs(a) / 10**5)


def same_percentage(gold: str, pred: str) -> bool:
    """Whether two values of which one or both are percentages are the same: 28\\%, 28, 0.28."""
    texts = gold, pred
    plain = [text.removesuffix(r"\%") for text in texts]
    exact = [value if value == text else rf"\frac{{{value}}}{{100}}" for value, text in zip(plain, texts, strict=True)]
    return same(*plain) or same(*exact)


@lru_cache(maxsize=1024)
def same_math(gold: str, pred: str) -> bool:
    """math-verify's verdict, asked only about values that are not apart as numbers."""
    from math_verify import verify

    a, b = parse_math(gold), parse_math(pred)
    if a is None or b is None or are_apart(a, b):
        return False
    return verify(a, b, allow_set_relation_comp=True, timeout_seconds=None)


@lru_cache(maxsize=1024)
def parse_math(text: str):
    """A normalised answer as a sympy object; None if math-verify cannot read it."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeout is off
    layout = NormalizationConfig(malformed_operators=True, nits=True, boxed="last")
    boxed = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False, normalization_config=layout)
    found = parse(rf"\boxed{{{text}}}", [boxed], fallback_mode="no_fallback", parsing_timeout=None)
    if not found or found[0].has(sympy.nan, sympy.zoo):
        return None
    letters = {s: sympy.I if s.name == "i" else sympy.Symbol(s.name, real=True) for s in found[0].free_symbols}
    return found[0].subs(letters) if letters else found[0]


def are_apart(a, b) -> bool:
    """Whether two sympy expressions differ as numbers: exact ones at all, decimals by 10^-6 or 1 in 10^5."""
    import sympy

    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: sympy.Rational(17 + 6 * i, 13) for i, symbol in enumerate(symbols)}
    try:
        x, y = a.subs(point).evalf(30), b.subs(point).evalf(30)
        gap, size = abs(x - y), max(abs(x), abs(y))
        if a.has(sympy.Float) or b.has(sympy.Float):
            return bool(gap > 1e-6 or gap > 1e-5 * size)
        return bool(gap > 1e-20 * size or gap == sympy.oo)
    except MemoryError:
        raise
    except Exception:  # sympy raises anything when an expression has no value
        return False


# --- the parts of an answer ------------------------------------------------------------------------------------------


def is_words(text: str) -> bool:
    """Whether a normalised answer is compared as words: it has some, or it is a time."""
    return r"\text{" in text or re.search(r"\d\s*:\s*\d", text) is not None


def words(text: str) -> list[str]:
    """The words of a text, without case, punctuation and final s; of a time, without leading zeros."""
    text = re.sub(r"\\text|(?<!\d)\.|\.(?!\d)", "", text.lower())
    text = re.sub(r"\s*:\s*", ":", re.sub(r"(?<![\d.:])0+(?=\d)", "", text))
    found = re.sub(r"[^a-z0-9:.+*/^=-]+", " ", text).split()
    return [word.rstrip("s") if len(word) > 3 else word for word in found]


def squeeze(text: str) -> str:
    """Without case and without the spaces that say nothing."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text.lower())


def split(text: str, separator: str) -> list[str]:
    """The parts between separators (a regex) that are outside of all brackets; one part if brackets do not match."""
    parts, depth, start = [], 0, 0
    for token in re.finditer(rf"(?P<separator>{separator})|[(\[{{]|[)\]}}]", text):
        if token["separator"] is None:
            depth += 1 if token[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
        if depth < 0:
            return [text]
    return [*parts, text[start:].strip()]


def pieces(text: str) -> tuple[str, list[str]]:
    """(kind, parts) of a list, set, pair, interval, union or matrix; ("", [text]) of anything else."""
    if matrix := MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[1].split(r"\\") if row.strip()]
        return f"matrix of {len(rows)} rows", [cell.strip() for row in rows for cell in row]
    union, parts = split(text, r"\\cup(?![a-zA-Z])"), split(text, "[,;]")
    if len(union) > 1:
        return "union", union
    if len(parts) > 1 or re.search(r"\\pm(?![a-zA-Z])", text):
        return "list", plus_and_minus(parts)
    outer = BRACKETS.fullmatch(text)
    inner = split(outer[2], "[,;]") if outer else []
    if outer and outer[1] + outer[3] == r"\{\}":
        return "set", plus_and_minus(inner)
    return (outer[1] + outer[3], inner) if len(inner) > 1 else ("", [text])


def plus_and_minus(parts: list[str]) -> list[str]:
    r"""The parts, each \pm written out as two."""
    signs = {part: "+-" if re.search(r"\\pm(?![a-zA-Z])", part) else "+" for part in parts}
    return [part.replace(r"\pm", sign).lstrip("+ ") for part in parts for sign in signs[part]]


def has_name(text: str) -> bool:
    """Whether there is a letter that is no function or operator: x, f(2), \\theta."""
    return re.search("[a-zA-Z]", re.sub(r"\\(?:frac|sqrt|cdot|times|div|pi|pm)(?![a-zA-Z])", "", text)) is not None


def number(text: str) -> Fraction | None:
    """An integer, a decimal, a repeating decimal or a fraction, exactly; None if it is something else."""
    text = squeeze(text)
    if match := REPEATING.fullmatch(text):
        sign, whole, fixed, period = match.groups()
        repeated = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(fixed)
        return int(sign + "1") * (Fraction(f"{whole or 0}.{fixed or 0}") + repeated)
    if not (match := NUMBER.fullmatch(text)):
        return None
    sign, top, slash, frac_top, frac_bottom = match.groups()
    bottom = Fraction(slash or frac_bottom or 1)
    return Fraction(sign + (top or frac_top)) / bottom if bottom else None


# --- reward functions ------------------------------------------------------------------------------------------------


def math_reward(completions: list[str], answer: list[str | None], **columns) -> list[float | None]:
    """`grade` of each completion: 1 if its last box is the gold answer, 0 if not, None without a usable gold."""
    return [grade(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def format_reward(completions: list[str], **columns) -> list[float]:
    """0.1 for exactly one box, closed and not empty: a small reward to add to another."""
    return [0.1 * (text.count(r"\boxed") == 1 and bool((last_box(text) or "").strip())) for text in completions]


def warm_up() -> None:
    """Import math-verify and fill its parser's tables; a reward file may have such a function, called once at start."""
    for answer in WARM_UP:
        grade(rf"\boxed{{{answer}}}", "x^2")


def load_rewards(spec: str) -> list[Reward]:
    """The functions that "module:function,module:function" names; ValueError with the cure if one cannot be used."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # python /some/where/trainer.py looks in /some/where only
    return [load_reward(name.strip()) for name in spec.split(",")]


def load_reward(name: str) -> Reward:
    """The function that "module:function" names; see load_rewards."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"reward {name!r}: must be module:function, for example rewards:math_reward")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise ValueError(f"reward {name}: importing {module_name} failed: {error}; install {error.name}") from error
        where = f"put {module_name}.py into {os.getcwd()}, or correct the name"
        raise ValueError(f"reward {name}: there is no module {module_name}; {where}") from error
    except Exception as error:
        raise ValueError(f"reward {name}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(f"reward {name}: {module_name} has no function {function_name}; define it or correct the name")
    if not callable(function):
        raise ValueError(f"reward {name}: is a {type(function).__name__}, not a function; name a function")
    return function


# --- in the host and the workers -------------------------------------------------------------------------------------


def host(parent_fd: int, memory_mb: int, names: list[str]) -> None:
    """Import the functions once, then fork and end workers as the pool asks; ends them all when the pool is gone."""
    pool, workers, host_pid = Connection(parent_fd), set(), os.getpid()
    try:
        functions = [(name, load_reward(name)) for name in names]
        for module in {sys.modules[function.__module__] for _, function in functions}:
            getattr(module, "warm_up", lambda: None)()
    except BaseException as error:
        return pool.send(f"{type(error).__name__}: {error}")
    sys.stdout.flush()  # else every worker prints it again
    gc.freeze()  # the collector would copy what the workers share
    pool.send(None)
    try:
        while True:
            pid = pool.recv()
            if pid is None:
                with Connection(reduction.recv_handle(pool)) as connection:
                    if (pid := os.fork()) == 0:
                        pool.close()
                        work(connection, functions, memory_mb, host_pid)
                workers.add(pid)
            elif pid in workers:
                workers.remove(pid)
                end(pid)
            pool.send(pid)
    except (EOFError, OSError):  # the pool was closed, or the trainer is dead
        for pid in workers:
            end(pid)


def end(pid: int) -> None:
    """Kill a worker and wait for it, so that nothing is left of it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def work(connection: Connection, functions: list[tuple[str, Reward]], memory_mb: int, host_pid: int) -> NoReturn:
    """Score one completion after another until the line is closed or memory runs out."""
    try:
        confine(memory_mb, host_pid)
        connection.send(None)
        while True:
            verdict = score_one(functions, *connection.recv())
            sys.stdout.flush()  # what a reward function printed
            connection.send(verdict)
    finally:
        os._exit(1)  # without a word and without the host's clean-up: the pool sees that the line is closed


def confine(memory_mb: int, host_pid: int) -> None:
    """Cap the memory at `memory_mb` above what is in use, and die with the host (Linux only)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also in the middle of a long computation
    if os.getppid() != host_pid:
        os._exit(1)
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    cap = in_use + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (cap if hard == resource.RLIM_INFINITY else min(cap, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def score_one(functions: list[tuple[str, Reward]], completion: str, columns: dict) -> tuple[float | None, str]:
    """(sum of the rewards, ""), the sum None if one of them is; or (None, what is wrong with which function)."""
    arguments = {**{name: [value] for name, value in columns.items()}, "completions": [completion]}
    total: float | None = 0.0
    for name, function in functions:
        try:
            rewards = function(**arguments)
        except MemoryError:
            raise
        except BaseException as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({line.filename}, line {line.lineno})"
            return None, f"reward {name} raised {what}; it is called with {', '.join(arguments)}"
        if problem := what_is_wrong(rewards):
            return None, f"reward {name} {problem}: it must return a list with one number or None for each completion"
        total = None if total is None or rewards[0] is None else total + float(rewards[0])
    return total, ""


def what_is_wrong(rewards: object) -> str | None:
    """What is wrong with the rewards of one completion; None if nothing is."""
    if isinstance(rewards, str) or not hasattr(rewards, "__len__") or not hasattr(rewards, "__getitem__"):
        return f"returned a {type(rewards).__name__}"
    if len(rewards) != 1:
        return f"returned {len(rewards)} rewards for 1 completion"
    reward = rewards[0]
    if reward is not None and not isinstance(reward, numbers.Real):
        return f"returned [{reward!r}]"
    if reward is not None and not math.isfinite(reward):
        return f"returned {reward}"
    return None


# --- the pool, in the trainer ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """A forked process and the line to it."""

    pid: int
    connection: Connection


class RewardPool:
    """Scores completions in `workers` processes; score() may be called from many threads at a time.

    `functions` is one reward function or a list of them, whose rewards are summed; None from one makes the sum None.
    A completion whose worker takes longer than `timeout_s`, dies or needs more than `memory_mb` gets 0 and is counted
    in `timeouts`. RewardError: a function cannot run in a worker, raises or returns something else than numbers.
    """

    def __init__(
        self,
        functions: Reward | list[Reward],
        workers: int = Config.reward_workers,
        timeout_s: float = Config.reward_timeout_s,
        memory_mb: int = Config.reward_memory_mb,
    ):
        functions = [functions] if callable(functions) else functions
        self.names = [importable_name(function) for function in functions]
        self.timeout_s, self.memory_mb = timeout_s, memory_mb
        self.timeouts = 0
        self.lanes, self.max_lanes = 0, workers * (1 + MAX_SLOW)
        self.tasks: queue.SimpleQueue = queue.SimpleQueue()
        self.closed = False
        self.lock = threading.Lock()  # of the counters
        self.control_lock = threading.Lock()  # of the line to the host
        self.start_host()
        for _ in range(workers):
            self.add_lane()

    def score(self, completions: list[str], columns: dict[str, object]) -> list[float | None]:
        """The reward of each completion; a column is a list with one value per completion, or one value for all."""
        futures, rows = [Future() for _ in completions], by_completion(columns, len(completions))
        with self.lock:
            if self.closed:
                raise RewardError("the reward pool is closed")
            for task in zip(futures, completions, rows, strict=True):
                self.tasks.put(task)
        return [future.result() for future in futures]  # comes: a lane gives every task a result within the timeout

    def close(self) -> None:
        """End all processes; what is still being scored fails."""
        with self.lock:
            self.closed = True
        self.tasks.put(None)
        with self.control_lock:
            self.control.close()
            stop(self.host)

    def add_lane(self) -> bool:
        """Start one more thread that scores completions; False if there are enough."""
        with self.lock:
            if self.lanes == self.max_lanes or self.closed:
                return False
            self.lanes += 1
        threading.Thread(target=self.lane, name="rewards", daemon=True).start()
        return True

    def lane(self) -> None:
        """Score tasks in a worker of its own until the pool is closed, or a task was so slow that a lane was added."""
        worker, relieved = None, False
        while not relieved and (task := self.tasks.get()) is not None:
            future, completion, columns = task
            try:
                if worker and worker.connection.poll(0):  # it says something unasked: it died
                    worker = self.end(worker)
                worker = worker or self.fork()
                verdict, relieved = self.ask(worker, completion, columns)
                if verdict is None or relieved:
                    worker = self.end(worker)
                future.set_result(self.reward(verdict))
            except Exception as error:  # the caller of score() raises it
                future.set_exception(error)
        if not relieved:
            self.tasks.put(None)  # for the next lane
        if worker:
            self.end(worker)
        with self.lock:
            self.lanes -= 1

    def ask(self, worker: Worker, completion: str, columns: dict) -> tuple[tuple | None, bool]:
        """What score_one returns in the worker, None if it took too long or died; and whether a lane was added."""
        relieved, deadline = False, time.monotonic() + self.timeout_s
        try:
            worker.connection.send((completion, columns))
            if not worker.connection.poll(min(SLOW_S, self.timeout_s)):
                relieved = self.add_lane()
            if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                return worker.connection.recv(), relieved
        except (EOFError, OSError):
            pass
        return None, relieved

    def reward(self, verdict: tuple | None) -> float | None:
        """The reward in a worker's verdict: 0 and counted without one; RewardError if the function is broken."""
        if verdict is not None:
            reward, problem = verdict
            if problem:
                raise RewardError(problem)
            return reward
        with self.lock:
            if self.closed:
                raise RewardError("the reward pool was closed while it scored")
            self.timeouts += 1
        return 0.0

    def start_host(self) -> None:
        """Start the process that forks workers, and wait until it has imported everything."""
        self.control, theirs = Pipe()
        paths = json.dumps([os.path.abspath(path) for path in sys.path])
        code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {__name__} as rewards; "
        code += "rewards.host(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])"
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-c", code, paths, str(fd), str(self.memory_mb), *self.names]
            # In a session of its own: Ctrl-C is for the trainer.
            self.host = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            problem = receive(self.control)
        except (EOFError, OSError) as error:
            problem = f"their host died: {error!r}"
        if problem:
            stop(self.host)
            raise RewardError(f"the reward workers cannot start: {problem}")

    def fork(self) -> Worker:
        """A new worker, ready; the host is started again if it died."""
        problem = None
        for _ in range(2):
            ours, theirs = Pipe()
            try:
                with theirs:
                    pid = self.fork_with(theirs)
                receive(ours)
                return Worker(pid, ours)
            except (EOFError, OSError) as error:  # the host died this moment
                problem = error
        raise RewardError(f"no reward worker can be started, is there memory left? {problem!r}")

    def fork_with(self, line: Connection) -> int:
        """The pid of a new worker that has the other end of a line."""
        with self.control_lock:
            if self.closed:
                raise RewardError("the reward pool is closed")
            if self.host.poll() is not None:
                self.start_host()
            self.control.send(None)
            reduction.send_handle(self.control, line.fileno(), self.host.pid)
            return receive(self.control)

    def end(self, worker: Worker) -> None:
        """Kill a worker."""
        worker.connection.close()
        try:
            with self.control_lock:
                self.control.send(worker.pid)
                receive(self.control)
        except (EOFError, OSError):
            pass  # the host is dead, and its workers with it


def by_completion(columns: dict[str, object], num_completions: int) -> list[dict]:
    """The columns as one dict for each completion; ValueError if a list has another length."""
    full = {name: v if isinstance(v, list | tuple) else [v] * num_completions for name, v in columns.items()}
    for name, values in full.items():
        if len(values) != num_completions:
            raise ValueError(f"column {name} has {len(values)} values for {num_completions} completions")
    return [{name: values[i] for name, values in full.items()} for i in range(num_completions)]


def receive(connection: Connection) -> object:
    """The next message; EOFError if there is none for START_TIMEOUT_S, or never will be."""
    if not connection.poll(START_TIMEOUT_S):
        raise EOFError(f"no answer for {START_TIMEOUT_S:.0f} s")
    return connection.recv()


def stop(process: subprocess.Popen) -> None:
    """Wait for a process whose line was closed; kill it if it does not end."""
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def importable_name(function: Reward) -> str:
    """The "module:function" by which a worker finds a function; ValueError if it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", repr(function))
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not function:
        cure = "define it with def at the top level of a file of its own, such as my_rewards.py"
        raise ValueError(f"reward function {name}: the reward workers cannot import it; {cure}")
    return f"{module}:{name}"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python rewards.py COMPLETION ANSWER")
    print(grade(sys.argv[1], sys.argv[2]))
