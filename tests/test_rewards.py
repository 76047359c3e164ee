"""rewards.py: what is a right answer, and scoring that nothing can hang, kill or fool. Ids like C06 are of cases.md."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import psutil
import pytest
from conftest import wait_for

from rewards import (
    RewardError,
    RewardPool,
    format_reward,
    grade,
    last_box,
    load_rewards,
    math_reward,
    total,
    try_rewards,
)  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
SANITY_SET = ROOT.parent / "shared" / "data" / "sanity_math_1460.jsonl"

# A gold, then answers that are right (✓) and wrong (✗): cases C and F, and the spellings of MATH, Minerva and Olympiad.
TABLE = r"""
\frac{1}{2} ✓ \frac{1}{2} ✓ 0.5 ✓ 1/2 ✓ \dfrac12 ✓ \frac{2}{4} ✗ \frac{1}{3} ✗ 2 ✗ -\frac12
1234567 ✓ 1,234,567 ✓ 1{,}234{,}567 ✗ 1234568 ✗ 1,234,568
10000 ✓ 10\,000 ✓ 10 000 ✓ 10^4 ✗ 10,0000 ✗ 10
(100,101) ✓ (100, 101) ✓ 100, 101 ✗ (100101) ✗ (101,100)
28\% ✓ 28 ✓ 0.28 ✓ 28 \text{ percent} ✗ 29\% ✗ 2.8
\frac{1}{2^{99}} ✓ 2^{-99} ✗ \frac{1}{2^{98}} ✗ 0
\frac{1}{2004!} ✗ \frac{1}{2006!} ✗ 0
\frac{x}{2^{99}} ✗ \frac{x}{2^{98}} ✗ x
0.000992 ✗ 0.0009924 ✗ 0.001
1331 \text{ and } 1728 ✓ 1728, 1331 ✓ 1331 \text{ or } 1728 ✗ 1728 ✗ 1331, 1728, 2
5 ✗ 5 \text{ or } 6 ✗ 3,4,5,6 ✗ 4=5 ✗ 0 ✓ x = 5 ✓ 5\text{ cm} ✓ \$5 ✓ 5 dollars ✓ 5\,\mathrm{m/s} ✓ 5. ✓ \text{five}
5 ✓ 5.0
(0,1) ✗ [0,1] ✗ (0,1] ✓ ]0,1[ ✓ 0<x<1 ✓ ]0;1[
[0,1] ✗ ]0,1[ ✗ (0,1) ✗ [1,0] ✓ 0 <= x <= 1
(0,1)\cup(2,3) ✓ (2,3)\cup(0,1) ✓ ]0,1[ \cup ]2,3[ ✓ ]2,3[\cup]0,1[ ✗ (0,1)\cup[2,3) ✗ (0,3)
[1,2] ✓ 1 \le x \le 2 ✗ 1 \le x < 2
(-\infty,3] \cup [4,\infty) ✓ x \in (-\infty, 3]\cup[4, \infty) ✗ (-\infty,3) \cup [4,\infty)
[2,\infty) ✓ x \ge 2 ✓ x>=2 ✓ [2, infinity) ✗ x > 2 ✗ (2,\infty)
(1,2) ✗ (2,1) ✗ \{1,2\} ✓ \left( 1, 2 \right) ✓ 1,2
\{1,2\} ✓ \{2,1\} ✓ \left\{2, 1\right\} ✗ \{1,2,3\} ✗ \{1\}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ✓ \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ✓ \left(\begin{array}{cc}1&2\\3&4\end{array}\right)
\begin{pmatrix}1&2\\3&4\end{pmatrix} ✗ \begin{pmatrix}1&2\\3&5\end{pmatrix} ✗ \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} ✗ \begin{pmatrix}1&2\end{pmatrix} ✓ \begin{bmatrix} 1 \\ \frac{4}{2} \end{bmatrix}
\text{(C)} ✓ C ✓ (C) ✓ \textbf{(C)} ✓ (C) 12 ✗ \textbf{(D)} ✗ c
\text{Monday} ✓ Monday ✓ monday ✗ Tuesday
\text{no solution} ✓ \text{No solutions} ✗ \text{solution} ✗ 0
\text{Yes} ✓ yes ✓ YES ✗ no
90 ✓ 90^\circ ✓ 90° ✓ 90 degrees ✗ 9
32\text{ square cm} ✓ 32\text{ cm}^2 ✓ 32 ✗ 23\text{ cm}^2
2s ✗ 2 ✗ 2S ✓ s \cdot 2
1010_2 ✓ 1010 ✓ 1010_{2} ✗ 1010_3 ✗ 1011_2
12:00 ✗ 1:00 ✓ 12:00 \text{ p.m.}
8\!:\!34 \text{ p.m.} ✓ 8:34 PM ✗ 8:34 \text{ a.m.} ✗ 9:34
\frac13 ✓ 0.333333 ✓ 0.\overline{3} ✗ 0.33 ✗ 0.3
\pi ✗ 3.14159 ✗ \frac{22}{7} ✓ pi
100 ✓ 1e2 ✓ 10^2 ✓ one hundred ✗ 1e3
\pm 2 ✓ 2,-2 ✓ -2, 2 ✗ 2
R-r ✓ -r+R ✗ r-R ✗ 0
3R^2 ✗ 3r^2 ✓ 3R^{2} ✗ 3R
aB ✗ Ab ✓ B a
\text{area is } R^2 ✗ \text{area is } r^2 ✓ \text{Area is } R^2
2 ✗ 2\text{ thousand} ✗ 2 dozen ✓ 2\text{ apples} ✓ two ✓ \text{two lines} ✗ two thousand ✗ 2 \text{ less} ✗ 2 million
5 ✗ 5 billion dollars ✗ 5\text{ thirds} ✗ \$5\text{ hundred} ✓ 5 children ✓ \text{Five}
2000 ✓ 2 thousand ✓ two thousand ✓ 2\text{ thousand people} ✓ 2{,}000 ✗ 2 hundred
2500000 ✓ 2.5 million ✓ \$2.5\text{ million} ✗ 2.5 ✗ 2.5 billion
24 ✓ 2 dozen ✓ \text{two dozen eggs} ✗ 2 ✗ 3 dozen
\frac{2}{3} ✓ two thirds ✗ 2 ✗ 3
3mg ✗ 3 ✓ 3 g m
C ✓ \textbf{(C)}\ 12 ✓ (C) \frac12 ✓ \text{C. } 12 ✓ C) 12 ✗ (D) 12 ✗ \textbf{(D)}\ 12 ✗ B ✗ 12
D ✗ (C) 12 ✓ (D)
12 ✓ (C) 12 ✗ (C) 13 ✗ C
\textbf{(B)}\ \frac{1}{2} ✓ B ✓ 0.5 ✓ (B) 1/2 ✗ (B) 3 ✗ (C) \frac12 ✗ A
\text{(B) Paris} ✓ Paris ✓ B ✗ \text{(A) Paris} ✗ London
2\pi r ✓ 2*pi*r ✓ 2 \cdot \pi \cdot r ✓ 2πr ✗ 2*pi*R ✗ 2*pi ✗ pi*r
\frac{1}{\sqrt n} ✓ \sqrt{1/n} ✓ sqrt(1/n) ✓ 1/sqrt(n) ✓ n^{-1/2} ✓ \frac{\sqrt{n}}{n} ✗ \sqrt{n} ✗ 1/n
\sqrt{x^2} ✗ x ✓ |x|
x^2+1 ✓ x**2 + 1 ✓ 1+x^{2} ✓ x*x+1 ✗ x**3+1 ✗ x^2-1
2^{10} ✓ 2**10 ✓ 2^10 ✓ 1024 ✗ 20 ✗ 2^1
\infty ✓ infinity ✓ inf ✗ -\infty
\sin(x) ✓ sin(x) ✓ \sin x ✗ \cos(x) ✗ cos(x)
x \le 3 ✓ x <= 3 ✓ x \leq 3 ✓ x \leqslant 3 ✓ (-\infty, 3] ✗ x < 3 ✗ x >= 3
\frac{\sqrt{3}- 1}{2} ✓ \frac{-1+\sqrt3}{2} ✓ (sqrt(3)-1)/2 ✗ \frac{\sqrt{3}+1}{2}
x = 5 ✓ 5 ✓ 5 = x ✗ y = 5 ✗ x = 6
2x + z - 5 = 0 ✓ 4x + 2z = 10 ✗ 2x + z + 5 = 0
11z^{17}(5+11z^{17}) ✓ 55z^{17}+121z^{34} ✗ 55z^{17}+121z^{17}
3+4i ✓ (2+i)^2 ✓ 3+4\mathrm{i} ✗ 3-4i ✗ 7
\frac{3}{2} ✓ 1\frac{1}{2} ✓ 1.5 ✗ 11/2
\frac{1}{6} ✗ 2^\infty ✗ 0.1667
y = 2x + 3 ✓ 2x+3 ✓ y=3+2x ✗ y = 2x - 3
(-1,0), (0,1), (2,3) ✓ (0,1), (-1,0), (2,3) ✗ (-1,0), (0,1) ✗ (0,-1), (0,1), (2,3)
f(x) = x, f(x) = 0 ✓ f(x)=0, f(x)=x ✗ f(x)=x ✗ f(x)=0, f(x)=2x
2^{n-1} ✓ \frac{2^n}{2} ✗ 2^n ✗ 2^n-1
\binom{n}{2} ✓ \frac{n(n-1)}{2} ✗ \frac{n(n+1)}{2}
\{-1, 0, 1\} ✓ \{0, 1, -1\} ✗ \{0, 1\}
a = 1, b = 2 ✗ a = 2, b = 1 ✓ a=1, b=2
n \equiv 1 \pmod{4} ✗ n \equiv 3 \pmod{4}
\emptyset ✓ \varnothing ✓ \{\} ✗ \{0\}
1.6 \times 10^{-19} ✓ 1.6e-19 ✓ 1.6 \cdot 10^{-19} \text{ C} ✓ 1.6 \times 10^{-19} \mathrm{~C} ✗ 1.6 \times 10^{-18}
1.6 \times 10^{-19} ✗ 1.7 \times 10^{-19} ✗ 0
3 \times 10^8 ✓ 3*10^8 ✓ 300000000 ✓ 3e8 \mathrm{~m} / \mathrm{s} ✗ 3 \times 10^9 ✗ 3
45 \mathrm{~m} / \mathrm{s} ✓ 45 ✓ 45 m/s ✓ 45 \text{ meters per second} ✗ 54 \mathrm{~m} / \mathrm{s}
9.8 \mathrm{~kg~m^{2} / s^{2}} ✓ 9.8 ✓ 9.8 \text{ J} ✗ 9.9
5.5 \text{ eV} ✓ 5.5 ✓ 5.5 eV ✗ 5.5 \times 10^6
\frac{m v^{2}}{2} ✓ \frac{1}{2} m v^2 ✗ \frac{M v^2}{2} ✗ m v^2
e^{-t} ✓ \exp(-t) ✓ \frac{1}{e^t} ✗ e^{t} ✗ e^{-T}
I(0) e^{-t/\tau} ✗ I(0) e^{t/\tau}
"""
OUTRIGHT = r"""
E=mc^2 ¦ x(t) = x_0 e^{-t/\tau} \cos(\omega t + \phi) ¦ 1.6 \times 10^{-19}
6.67 \times 10^{-11} \mathrm{~N} \mathrm{~m}^{2} / \mathrm{kg}^{2} ¦ \frac{2 m g}{k} ¦ v=\sqrt{2gh}
\sqrt{\frac{G M}{r}} ¦ \frac{4\pi^2 a^3}{G M} ¦ M_{\odot} ¦ 10 L_{\odot} ¦ 3.1 M_\odot ¦ 4.83 ¦ 10^{45} ¦ 1e33 ¦ e^{-t}
2 e^{-2 t}-e^{-t} ¦ \frac{1}{s^2+1} ¦ y = c_1 e^{-t}\sin t + c_2 e^{-t} \cos t, t > 0 ¦ u(t)-u(t-1) ¦ \delta(t)
\dot{x}+2x=0 ¦ \frac{d^{2} x}{d t^{2}}+\omega^{2} x=0 ¦ m \frac{d v}{d t}=-\gamma v ¦ \int_0^\infty e^{-x} dx
\sum_{n=1}^{N} n^2 ¦ \lim_{x \to 0} f(x) ¦ \left[\begin{array}{cc}1 & 2 \\ 3 & 4\end{array}\right]
\begin{array}{l} x=1 \\ y=2 \end{array} ¦ \left\{\begin{array}{ll}0 & t<0 \\ 1 & t>0\end{array}\right.
\mathrm{H}_2\mathrm{O} ¦ \mathrm{Fe}^{3+} ¦ \text{BCC} ¦ [111] ¦ [1\overline{1}0] ¦ (110) ¦ \langle 100 \rangle
1 \mathrm{s}^2 2 \mathrm{s}^2 2 \mathrm{p}^6 ¦ Na^+
\mathrm{CaO} + \mathrm{H}_2\mathrm{O} \rightarrow \mathrm{Ca(OH)}_2 ¦ \Delta G = \Delta H - T\Delta S
-\frac{13.6}{n^2} \text{ eV} ¦ 2.45 \mathrm{~eV} ¦ 96.5 \% ¦ I_{\text{ext}}
V_{\mathrm{out}} = -\frac{R_2}{R_1} V_{\mathrm{in}} ¦ 50 \Omega ¦ 2.2 \mathrm{k}\Omega ¦ 0.5 \mu\mathrm{m} ¦ 632.8 nm
20 \mathrm{~dB} ¦ 3 dB ¦ 7.5 \mathrm{~km} / \mathrm{s} / \mathrm{Mpc} ¦ 45000 \text{ parsecs} ¦ z = 0.05 ¦ 23:56
\approx 4.6 \text{ Gyr} ¦ 5.47 \mathrm{cm}^{-1} ¦ 1~\AA ¦ -2.5 \log_{10}\left(\frac{F}{F_0}\right) ¦ \hat{x} + \hat{y}
\vec{F} = q \vec{v} \times \vec{B} ¦ |\psi\rangle = \frac{1}{\sqrt2}(|0\rangle + |1\rangle) ¦ \hbar \omega
\nabla \cdot E = \rho/\epsilon_0 ¦ \frac{I m u \omega \sin (\omega t+\phi)}{R} ¦ a=\frac{F}{m}, \quad F=ma
T(1, 2) = (2, 1) ¦ f(x) = \begin{cases} 1 & x > 0 \\ 0 & x \le 0 \end{cases} ¦ n_i = 1.5 \times 10^{10} \text{ cm}^{-3}
0.9 c ¦ 5 \text{ or more} ¦ \text{increases by a factor of } 2 ¦ \arcsin{1.3 \sin \theta_w} ¦ \theta_w = \arcsin(n/2)
y-x, x-y ¦ \{x : x > 0\} ¦ \{(x,y) \mid x+y=1\} ¦ f: \mathbb{R} \to \mathbb{R} ¦ \mathbb{Z}/2\mathbb{Z} ¦ 2\mathbb{Z}
n! ¦ 2004! ¦ 9^{9^{9^9}} ¦ \log\log\log 5 ¦ x \equiv 3 \pmod 7 ¦ \lfloor x \rfloor ¦ \lceil 2^{2^{40}} \rceil
\overline{AB} ¦ \angle ABC = 30^\circ ¦ \triangle ABC ¦ AB \parallel CD ¦ A \cup B ¦ A \cap B^c ¦ \neg p \lor q ¦ 1:2:3
3 : 4 ¦ 50\% ¦ \$1,234.56 ¦ 1,000,000 ¦ 1/3 ¦ -\frac{1}{2} ¦ 1.\overline{6} ¦ 12_{5} ¦ \text{a} ¦ \text{I and III only}
\text{None of the above} ¦ True ¦ x
"""


def triples() -> list[tuple[str, str, float]]:
    """(gold, answer, value) of every answer in the table."""
    rows = [re.split(" ([✓✗]) ", line) for line in TABLE.strip().splitlines()]
    return [(row[0], row[i + 1], 1.0 * (row[i] == "✓")) for row in rows for i in range(1, len(row), 2)]


def boxed(answer: object) -> str:
    return rf"So the answer is $\boxed{{{answer}}}$."


@pytest.mark.parametrize(("gold", "answer", "value"), triples())
def test_answers_are_graded_as_a_teacher_would(gold, answer, value):
    assert grade(boxed(answer), gold) == value


def test_the_table_has_as_many_wrong_answers_as_right_ones():
    assert len(triples()) > 250
    assert 0.45 < sum(value for _, _, value in triples()) / len(triples()) < 0.55


def test_every_gold_equals_itself_and_nothing_else():
    for gold in {gold for gold, _, _ in triples()} | set(re.split(" ¦ |\n", OUTRIGHT.strip())):
        assert (gold, grade(boxed(f" {gold}"), gold)) == (gold, 1)
        assert (gold, grade(boxed(r"\text{something else}"), gold)) == (gold, 0)


@pytest.mark.parametrize("gold", [None, "", " ", r"\text{}", "$$", r"\frac{1}{", "1 +", "???", float("nan"), [], [""]])
def test_a_gold_that_is_missing_or_unreadable_is_unscorable_whatever_the_answer(gold):  # C14
    assert [grade(text, gold) for text in (boxed("5"), boxed(gold), "no box")] == [None, None, None]


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (["2400, 1350, 864"], "2400, 1350, 864", "2400"),  # F06
        (["10", "000"], "000, 10", "10000"),
        ([1, 2.5], "2.5, 1", "2.5"),
        (12345678901234567890, "12345678901234567890", "12345678901234567891"),
        (Decimal("0.10"), "0.1", "0.11"),
        (1e-7, r"1 \times 10^{-7}", "0"),
        (True, "true", "false"),
        ("5*4=<<5*4=20>>20\n#### 1,234", "1234", "20"),  # F07
        (r"so \boxed{5} it is", "5", "6"),
    ],
)
def test_a_gold_may_be_any_value_of_a_dataset(gold, right, wrong):
    assert [grade(boxed(right), gold), grade(boxed(wrong), gold)] == [1, 0]


def test_only_the_last_box_counts_and_it_must_be_closed():
    assert grade("".join(rf"\boxed{{{digit}}} " for digit in range(10)), "5") == 0  # C10
    assert grade(r"\boxed{840} so it is \boxed{840}", "840") == 1  # C03
    assert grade(r"\boxed {5}", "5") == 1  # C04
    assert grade(r"so we get \boxed{5", "5") == grade(r"\boxed{\frac{1}{2}", r"\frac12") == 0  # C05
    assert grade("the answer is 5", "5") == 0
    assert last_box(r"\boxed{\{1,2\}} \\") == r"\{1,2\}"
    assert format_reward([boxed("5"), boxed("5") + boxed("5"), boxed(""), r"\boxed{5", "5"]) == [0.1, 0, 0, 0, 0]


def test_nonsense_in_the_box_is_wrong_and_neither_an_error_nor_slow():
    nonsense = ["(" * 400 + "1,2" + ")" * 400, "9" * 5000, "{}", r"\begin{pmatrix}", "1/0", r"\pm" * 50, "=", r"1 <+ i"]
    start = time.monotonic()
    for answer in [*nonsense, r"9^{9^{9^9}}", r"\lfloor 2^{2^{40}} \rfloor", "10^{99999999}", "((9!)!)!"]:  # C13
        assert grade(boxed(answer), r"\sqrt{22}") == 0
    assert time.monotonic() - start < 8


def test_truncated_completions_score_0_and_messages_are_graded_by_their_text():
    texts = [[{"role": "assistant", "content": boxed(5)}], boxed(5), boxed(5)]
    with ThreadPoolExecutor(1) as threads:  # C11: not on the main thread
        assert threads.submit(math_reward, texts, ["5", "5", None], [False, True, True]).result() == [1, 0, None]


def test_none_counts_for_nothing_in_a_sum_unless_all_are_none():  # F08
    assert total({"a": [1.0, None, None, 0.0], "b": [None, 2.0, None, 3.0]}, [1, 0.5]) == [1, 1, None, 1.5]


# --- the pool --------------------------------------------------------------------------------------------------------

MY_REWARDS = """
import os, time

def half(answer, **columns):
    return [0.5 if gold == "a" else None for gold in answer]

async def of_trl(prompts, completions, completion_ids, answer):  # gets nothing else
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]

def longer_than(completions, log_metric, **kwargs):
    log_metric("n", len(completions))
    return [sum(len(other) < len(c) for other in completions) for c in completions]

def obeys(completions, **columns):
    for text in completions:
        while text == "hang":
            pass
        if text == "sleep":
            time.sleep(600)
        if text == "eat":
            hoard = [bytearray(2**24) for _ in range(1000)]
        if text == "die":
            os._exit(7)
    return [float(text) for text in completions]

def exits(completions, **columns):
    raise SystemExit(3)

def no_such_column(completions, difficulty):
    return [1.0]

def three(completions, **columns):
    return [1.0, 1.0, 1.0]

def nothing(completions, **columns):
    pass

not_a_function = 5
"""


@pytest.fixture(scope="module")
def my_rewards(tmp_path_factory) -> Path:
    """A working directory with reward files of a user; it is the current one."""
    before, directory = Path.cwd(), tmp_path_factory.mktemp("user")
    (directory / "sub").mkdir()
    (directory / "sub" / "rewards.py").write_text("import beside\ndef f(completions, **columns): return [beside.x]\n")
    (directory / "sub" / "beside.py").write_text("x = 7")
    (directory / "my_rewards.py").write_text(MY_REWARDS)
    (directory / "broken_rewards.py").write_text("import a_package_that_is_not_installed\n")
    (directory / "typo_rewards.py").write_text("def f(:\n")
    os.chdir(directory)
    yield directory
    os.chdir(before)


@pytest.fixture(scope="module")
def pool_of(my_rewards):
    """A function that starts a pool for functions of my_rewards; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(names: str, **settings) -> RewardPool:
            spec = ",".join(name if ":" in name else f"my_rewards:{name}" for name in names.split(","))
            return stack.enter_context(contextlib.closing(RewardPool(load_rewards(spec), **settings)))

        yield start


@pytest.mark.skipif(not SANITY_SET.exists(), reason="needs ../shared")
def test_every_gold_of_the_sanity_set_is_right_and_the_next_one_is_wrong(pool_of):
    golds = [json.loads(line)["answer"] for line in SANITY_SET.read_text().splitlines()]
    pool, others = pool_of("rewards:math_reward", workers=2), golds[1:] + golds[:1]
    assert pool.score([boxed(gold) for gold in golds], {"answer": golds}) == [1.0] * 1460
    scores = pool.score([boxed(other) for other in others], {"answer": golds})
    found_equal = {(gold, other) for gold, other, score in zip(golds, others, scores, strict=True) if score}
    assert {pair for pair in found_equal if pair[0] != pair[1]} == {("60", r"60^\circ")}  # 60 degrees


def test_functions_are_called_once_per_group_as_trl_does(pool_of):  # F13, F21
    pool = pool_of("of_trl,longer_than,half,half,sub/rewards.py:f", workers=1, weights=[1, 1, 1, 2, 0.1])
    columns = {"prompts": [[{"role": "user", "content": "?"}]] * 2, "completion_ids": [[1], [2]], "answer": ["a", "x"]}
    expected = {"of_trl": [1, 0], "longer_than": [0, 0], "half": [0.5, None], "half_2": [0.5, None], "f": [7, 7]}
    assert pool.scores(["a", "bb"], {**columns, "difficulty": 3}) == expected
    assert pool.score(["a", "bb"], columns) == pytest.approx([3.2, 0.7])
    assert pool_of("longer_than", workers=1).score(["a", "bb", "c"], {}) == [0, 2, 0]


def test_one_gold_for_the_whole_group_is_enough_and_a_column_of_another_length_is_named(pool_of):
    with contextlib.closing(RewardPool(math_reward, workers=1)) as pool:
        assert pool.score([boxed("5"), boxed("6"), "none"], {"answer": "5"}) == [1.0, 0.0, 0.0]
        assert pool.score([boxed("5")] * 3, {"answer": ["5", "6", None]}) == [1.0, 0.0, None]
        with pytest.raises(ValueError, match="column answer has 3 values for 2 completions"):
            pool.score(["a", "b"], {"answer": ["1", "2", "3"]})


def test_a_worker_that_is_lost_costs_its_completion_only(pool_of):
    pool = pool_of("obeys", workers=2, timeout_s=1)
    assert pool.score(["1", "hang", "sleep", "eat", "die", "2"], {}) == [1.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    assert (pool.timeouts, pool.failed) == (4, 0)
    assert pool.score(["3"], {}) == [3.0]


def test_a_reward_that_fails_on_some_completions_costs_those_only_until_nearly_all_fail(pool_of, capfd):  # F30
    pool = pool_of("obeys", workers=1)
    assert [pool.score(["1", "no number", "2"], {}) for _ in range(3)] == [[1.0, None, 2.0]] * 3
    assert (pool.timeouts, pool.failed) == (0, 3)
    assert capfd.readouterr().out.count("Traceback") == 1
    with pytest.raises(RewardError, match="could not convert"):
        [pool.score(["no number"] * 8, {}) for _ in range(13)]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("exits", r"my_rewards:exits raised SystemExit: 3 \(.*my_rewards.py, line \d+\); it is called with .*answer"),
        ("no_such_column", "no_such_column raised TypeError.*difficulty.*it is called with completions"),
        ("three", r"my_rewards:three returned \[1.0, 1.0, 1.0\] for \d completions"),
        ("nothing", "my_rewards:nothing raised TypeError: 'NoneType'"),
    ],
)
def test_a_broken_reward_is_named_before_the_run_and_at_the_first_group(pool_of, function, complaint):
    assert re.search(complaint, try_rewards(load_rewards(f"my_rewards:{function}"), "?", {"answer": "5"}))
    assert try_rewards([math_reward, format_reward], [{"role": "user", "content": "?"}], {"answer": "5", "n": 1}) == ""
    with pytest.raises(RewardError, match=complaint), contextlib.closing(pool_of(function, workers=1)) as pool:
        pool.score(["a"] * 8, {"answer": "5"})


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("no_such_file:f", "no module no_such_file; put no_such_file.py into .*user"),
        ("my_reward:f", "no module my_reward; did you mean my_rewards?"),
        ("sub/reward.py:f", r"no module sub/reward.py; did you mean rewards\? put reward.py into .*sub"),
        ("my_rewards:halv", "my_rewards has no function halv; did you mean half.* define it"),
        ("my_rewards:not_a_function", "my_rewards:not_a_function: is a int, not a function"),
        ("broken_rewards:f", "importing broken_rewards failed: .*; install a_package_that_is_not_installed"),
        ("typo_rewards:f", "importing typo_rewards failed: SyntaxError"),
        ("my_rewards:half,", "must be module:function"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_at_start(my_rewards, spec, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_rewards(spec)


def test_a_function_that_workers_cannot_import_is_refused():
    with pytest.raises(ValueError, match=r"lambda.* cannot import it"):
        RewardPool(lambda completions, **columns: [1.0])


def test_a_pool_outlives_its_processes_serves_many_threads_and_leaves_nothing_behind(pool_of):
    def workers() -> set[psutil.Process]:
        return {child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())} - before

    before = set(psutil.Process().children())
    pool = pool_of("obeys", workers=2, timeout_s=60)
    assert pool.score(["1", "2"], {}) == [1.0, 2.0]
    for process in workers():
        process.kill()
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda i: pool.score([str(i)] * 3, {}), range(60))) == [[i] * 3 for i in range(60)]
        waiting, busy = threads.submit(pool.score, ["hang", "1"], {}), list(workers())
        wait_for(lambda: any(process.cpu_percent() > 50 for process in busy))
        pool.close()
        with pytest.raises(RewardError, match="closed"):
            waiting.result(timeout=10)
    assert not workers()
    assert pool.timeouts == 0


TRAINER = """
import psutil, sys, threading
sys.path.insert(0, {root!r})
from rewards import RewardPool, load_rewards
pool = RewardPool(load_rewards("my_rewards:obeys"), workers=2, timeout_s=600)
pool.score(["1"], {{}})
for what in ("hang", "sleep"):
    threading.Thread(target=pool.score, args=([what], {{}}), daemon=True).start()
print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
try:
    threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_busy_workers_die_with_the_trainer_and_without_a_traceback(my_rewards, tmp_path, how):
    script = tmp_path / "trainer.py"  # elsewhere than the reward file; workers do not run it again
    script.write_text(TRAINER.format(root=str(ROOT)))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    trainer = subprocess.Popen([sys.executable, str(script)], cwd=my_rewards, start_new_session=True, **pipes)
    try:
        processes = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        wait_for(lambda: any(process.cpu_percent() > 50 for process in processes))
        os.killpg(trainer.pid, how)
        _, alive = psutil.wait_procs(processes, timeout=10)
        _, errors = trainer.communicate(timeout=10)
    finally:
        trainer.kill()
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert "Traceback" not in errors


def test_one_completion_can_be_graded_by_hand():
    command = [sys.executable, str(ROOT / "rewards.py"), r"so \boxed{0.5}", r"\frac{1}{2}"]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "1.0\n"
