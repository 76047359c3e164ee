r"""How an answer is spelled: one spelling for one value, and the parts of which an answer is made.

What `rewards.grade` compares. LaTeX and plain text, units and currencies, number words and magnitudes come to one form.
Text in, text out: nothing in this file calls sympy.
"""

import re
from fractions import Fraction
from functools import lru_cache

# --- one spelling for one value --------------------------------------------------------------------------------------

UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "∪": r"\cup ",
     "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "²": "^2", "³": "^3", "°": r"^\circ "}
)  # fmt: skip
NUMBER_WORDS = dict(zip(re.findall(
    r"\w+", "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
), map(str, [*range(20), *range(20, 100, 10)]), strict=True))  # fmt: skip
MAGNITUDES = {
    "dozen": "12", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}", "billion": "10^{9}",
    "trillion": "10^{12}", "half": r"\frac{1}{2}", "third": r"\frac{1}{3}", "quarter": r"\frac{1}{4}",
}  # fmt: skip
WORDS, MANY = "|".join(NUMBER_WORDS), rf"({'|'.join(MAGNITUDES)})s?(?![A-Za-z])"
UNIT_NAME = re.compile(  # plurals need not be here
    "[numckMGT]?(?:m|g|s|Hz|eV|J|N|Pa|W|V|A|L|l|mol|bar|pc|cal|T|K|C|F|Wb|rad)|(?i:(?:nano|micro|milli|centi|kilo|mega)?"
    "(?:met(?:er|re)|gram|lit(?:er|re)|watt|joule|newton|volt|amp(?:ere)?|ohm|hertz|pascal|second|mole|parsec|calorie)|"
    "ton|tesla|erg|dyne|gauss|kelvin|celsius|fahrenheit|degree|radian|arcsec|atm|torr|psi|in|inch|ft|foot|feet|yd|yard|"
    "mi|mile|[mk]ph|kmh|au|ly|lbs?|pound|oz|ounce|min|minute|sec|h|hrs?|hour|d|day|week|month|[mg]?yr|year|century|acre|"
    "hectare|gallon|cup|dollar|cent|usd|euro?|rupee|rs|yen|yuan|peso|unit|way|person|people|children|men|women|of|the|per|"
    "square|cubic|sq|cu|each|old|long|tall|wide|high)"
)
NO_UNIT = re.compile("(?i)less|more|fewer|times|plus|minus|this|than|unless|mod|if|for|when|where|is|are|such|not?|all")
PLAIN_UNITS = "cm|mm|km|kg|ft|mph|sec|min|hrs?|[kMG]?Hz|[kMG]?eV|mL|km/h|(?<= )m/s"  # without \text: others are symbols
FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|max|min|gcd|lcm"
GREEK = "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|pi|rho|sigma|tau|phi|chi|psi|omega"
SHORT_WORDS = "yes|no|odd|may|red|sun|mon|tue|wed|thu|fri|sat"
ARGUMENT = r"(\\(?!frac|sqrt)[a-zA-Z]+|[0-9a-zA-Z])"  # what TeX takes as an argument without braces
BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
INSIDE = r"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"
DECIMAL = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?"
LABEL = r"\\text\{(?:[^{}]|\{[^{}]*\})*\}(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"  # a unit and its power
REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:\{,\}|,\s*\\!|\\!\s*,(?:\s*\\!)?)\s*(?=\d{3})", ""),  # thousands: 1{,}234 and 1,\!234
        (r"\{,\}", ","),
        (r"\\!|\\?\$|[£€]|\\(?:displaystyle|limits)(?![a-zA-Z])|(?<!\\)\\[()]", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\}|\\degree)(?:\s*[CF](?![A-Za-z]))?|\\degree(?![a-zA-Z])", ""),
        (r"(?:(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s)+", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\([lg])(?:eqslant|eqq|eq)(?![a-zA-Z])|([<>])=", lambda m: rf"\{m[1] or 'lg'[m[2] == '>']}e "),
        (r"\\\{\s*\\\}|\\varnothing", r"\\emptyset"),
        (r"\\mathrm\s*\{([ei])\}", r"\1"),
        (r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{", r"\\text{"),
        (r"(?<![A-Za-z\\])(?:inf|infinity|oo)(?![A-Za-z])", r"\\infty "),
        (rf"(?<![A-Za-z\\])({FUNCTIONS}|{GREEK})(?=[\W\d_]|$)(?!\}})", r"\\\1 "),
        (r",?\s*\\text\{\s*,?\s*(?:and|or)\s*\}|,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ","),
        (r"\s*(?:\\?%|\\text\{\s*percent\s*\}|(?<![A-Za-z{])percent)", r"\\%"),
        (rf"(?<=\d)\s*(?:{PLAIN_UNITS})(?![A-Za-z(])(?:\s*\^\s*\{{?\d\}}?)?", ""),
        (rf"\\?sqrt\s*{INSIDE}", r"\\sqrt{\1}"),  # sqrt(1/n); the second is one inside the first
        (rf"\\?sqrt\s*{INSIDE}", r"\\sqrt{\1}"),
        (r"\*\*", "^"),
        (rf"\^\s*{INSIDE}", r"^{\1}"),
        (r"\^(-\d+|\d\d+)", r"^{\1}"),
        (r"(?<=[\w)}\]])\s*\*\s*(?=[\w(\\{.])", r"\\cdot "),
        (r"\\(frac|sqrt)\s+(?=\{)", r"\\\1"),
        (rf"\\(frac|sqrt)\s*{ARGUMENT}", r"\\\1{\2}"),  # \frac12, \sqrt3
        (rf"(\\frac{BRACED})\s*{ARGUMENT}", r"\1{\2}"),
        (r"_\{(\d+)\}", r"_\1"),
        (r"(?:(?<![\w)}\]\s])|(?<=\\cup)|(?<=\\in))\s*([\[\]])([^\[\]]*[,;][^\[\]]*)([\[\]])",  # ]0,1[
         lambda m: f" {'(['[m[1] == '[']}{m[2]}{')]'[m[3] == ']']}"),
    )
]  # fmt: skip
WORD_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"\\text\{{\s*((?i:(?:an? )?(?:{WORDS}|{MANY})(?![A-Za-z]))[^{{}}]*)\}}", r" \1 "),
        (rf"(?<![A-Za-z\\])((?i:{WORDS}))(?![A-Za-z])", lambda m: NUMBER_WORDS[m[1].lower()]),
        (r"(?<!\d)([2-9])0[ -](?=[1-9](?!\d))", r"\1"),  # twenty-five
        (rf"(?<![A-Za-z\\])(?i:an? (?={MANY}))", "1 "),
        (rf"(?<=[\d)}}])(?i:[ -]*{MANY})", lambda m: rf"\cdot {MAGNITUDES[m[1].lower()]}"),
        (r"\\text\{[^{}]*\}|(?<![\\{A-Za-z\d])" rf"(?=[A-Za-z ]*[A-Za-z]{{4}}|(?i:{SHORT_WORDS})(?![A-Za-z]))"
         "[A-Za-z]+(?: [A-Za-z]+)*", lambda m: m[0] if m[0][0] == "\\" else rf"\text{{{m[0]}}}"),
        (rf"(?<=[\w)}}])\s*(?:/|\\cdot)?\s*{LABEL}(?:\s*(?:/|\\cdot)?\s*{LABEL})*",
         lambda m: "" if is_unit(m[0]) else m[0]),
        (r"\\text\{([^{}]*)\}", lambda m: m[0] if re.search("[A-Za-z]{2}", m[1]) else m[1]),
    )
]  # fmt: skip
THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:([ ,])\d{3})(?:\1\d{3})*(?!\d)")


@lru_cache(maxsize=1024)
def normalise(answer: str) -> str:
    """One spelling for one value: no units, currency or layout; words are inside \\text{...}, symbols are not."""
    text = answer.translate(UNICODE)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    for pattern, replacement in WORD_REWRITES if re.search("[A-Za-z]{2}", text) else []:
        text = pattern.sub(replacement, text)
    in_brackets = re.search(r"[(\[]|\\\{", text)  # there, (100,101) is a pair
    text = THOUSANDS.sub(lambda m: m[0] if m[1] == "," and in_brackets else m[0].replace(m[1], ""), text)
    text = text.strip().rstrip(" .,;")
    return re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # the choice (C)


def is_unit(text: str) -> bool:
    """Whether words after a value are a unit or what is counted (a plural), which may be left out."""
    names = re.findall("[A-Za-z]+", re.sub(r"\\(?:text|cdot)", " ", text))
    if any(map(NO_UNIT.fullmatch, names)):
        return False
    return all(map(UNIT_NAME.fullmatch, names)) or any(re.fullmatch("[A-Za-z]{2,}[^s]s", name) for name in names)


def last_box(completion: str) -> str | None:
    """What is inside the last \\boxed{...}; None if there is none, or if it is not closed."""
    boxes = list(re.finditer(r"\\boxed\s*\{", completion))
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(completion, boxes[-1].end() if boxes else len(completion)):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return completion[boxes[-1].end() : brace.start()]
    return None


# --- the parts of an answer ------------------------------------------------------------------------------------------

MATRIX = re.compile(r"[(\[]?\s*\\begin\{(?:[pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\w+\}\s*[)\]]?", re.DOTALL)
BRACKETS = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", re.DOTALL)
POWER_OF_10 = r"(?:\\times|\\cdot)10\^(?:\{([+-]?\d{1,3})\}|(\d))"
NUMBER = re.compile(rf"([+-]?)(?:({DECIMAL})(?:/(\d+)|{POWER_OF_10})?|\\frac\{{({DECIMAL})\}}\{{({DECIMAL})\}})")
REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\overline\{(\d+)\}")


def squeeze(text: str) -> str:
    """Without the spaces that say nothing."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


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
    """An integer, a decimal, 1.6 \\times 10^{-19}, a repeating decimal or a fraction, exactly; None for others."""
    text = squeeze(text)
    if match := REPEATING.fullmatch(text):
        sign, whole, fixed, period = match.groups()
        repeated = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(fixed)
        return int(sign + "1") * (Fraction(f"{whole or 0}.{fixed or 0}") + repeated)
    if not (match := NUMBER.fullmatch(text)):
        return None
    sign, top, slash, power, digit, frac_top, frac_bottom = match.groups()
    bottom = Fraction(slash or frac_bottom or 1)
    return Fraction(sign + (top or frac_top)) * Fraction(10) ** int(power or digit or 0) / bottom if bottom else None
