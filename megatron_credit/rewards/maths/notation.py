r"""One spelling for LaTeX, plain text and Unicode: 3*x**2 and 3\times x^2 become the same."""

import re
import unicodedata

UNICODE = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": r"\cdot ", "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ", "\u2219": r"\cdot ", "\u00f7": "/", "\u2044": "/", "\u2215": "/",
    "\u2264": r"\le ", "\u2265": r"\ge ", "\u2a7d": r"\le ", "\u2a7e": r"\ge ", "\u2260": r"\ne ",
    "\u2248": r"\approx ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
    "\u2205": r"\emptyset ", "\u00b1": r"\pm ", "\u2213": r"\mp ", "\u221e": r"\infty ",
    "\u221a": r"\sqrt ", "\u221b": r"\sqrt[3]", "\u00b0": r"\degree ", "\u2026": r"\ldots ",
    "\u03c0": r"\pi ", "\u03b1": r"\alpha ", "\u03b2": r"\beta ", "\u03b3": r"\gamma ",
    "\u03b8": r"\theta ", "\u03bb": r"\lambda ", "\u03bc": r"\mu ", "\u03c6": r"\phi ",
    "\u03c9": r"\omega ", "\u2211": r"\sum ", "\u222b": r"\int ", "\u27e8": r"\langle ",
    "\u27e9": r"\rangle ", "\u20ac": "", "\u00a3": "", "~": " ", "\u00a0": " ", "\u2009": " ",
    "\u00bc": r"\frac{1}{4}", "\u00bd": r"\frac{1}{2}", "\u00be": r"\frac{3}{4}",
    "\u2153": r"\frac{1}{3}", "\u2154": r"\frac{2}{3}",
}  # fmt: skip
RAISED = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a",
                       "0123456789-+")  # fmt: skip
RAISED_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b\u207a]+")

COMMANDS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "geq": "ge", "leqslant": "le",
    "geqslant": "ge", "neq": "ne", "lt": "<", "gt": ">", "times": "cdot", "ast": "cdot",
    "div": "/", "varnothing": "emptyset", "infin": "infty", "dots": "ldots", "cdots": "ldots",
    "dotsc": "ldots", "dotsb": "ldots", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|",
    "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "colon": ":", "circ": "degree",
    "textdegree": "degree", "arcsin": "asin", "arccos": "acos", "arctan": "atan",
    "varphi": "phi", "vartheta": "theta", "varepsilon": "epsilon", "implies": ";",
}  # fmt: skip
ESCAPED = {"\\": ";", "%": "%", "|": "|", "/": "/", ":": "", "{": r"\{", "}": r"\}"}
"""A line break in an array separates things; other escaped signs are blanks."""
NO_MEANING = {
    "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "displaystyle",
    "textstyle", "quad", "qquad", "limits", "nolimits", "thinspace", "enspace", "middle",
    "phantom", "boldsymbol", "boxed", "fbox",
}  # fmt: skip
COMMAND = re.compile(r"\\(?:([A-Za-z]+)\s*|([^A-Za-z]))")
FONT = re.compile(r"\\(?:mathbf|mathit|mathsf|mathcal|mathbb|bm|vec|hat)\s*\{([^{}]*)\}")
WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|hbox|mathrm|rm|operatorname\*?)\s*\{([^{}]*)\}"
)
FUNCTIONS = {
    "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh",
    "tanh", "ln", "log", "exp", "abs", "floor", "ceil", "binom", "gcd", "lcm", "max", "min",
}  # fmt: skip
PLAIN = {"pi": "pi", "infinity": "infty", "inf": "infty", "oo": "infty", "theta": "theta",
         "alpha": "alpha", "beta": "beta", "arcsin": "asin", "arccos": "acos",
         "arctan": "atan", "frac": "frac"}  # fmt: skip
PLAIN_WORD = re.compile(r"(?<![A-Za-z\\])([A-Za-z]+)(?![A-Za-z])")
ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[^{}]*\}")


def to_notation(text: str) -> str:
    r"""The text in our spelling: no dollars, fonts or spacing commands; \cdot / ^ \sqrt \pi \infty
    \le \ge \ne \{ \} \text{..} \degree \ldots; one blank between words."""
    text = _ascii(_without_markup(text.strip()))
    text = WORDS.sub(lambda match: _words(match[1]), text)
    while FONT.search(text):
        text = FONT.sub(r"\1", text)
    text = COMMAND.sub(_command, text)
    text = _plain_operators(text)
    text = " ".join(PLAIN_WORD.sub(_plain_word, text).split())
    return _unwrapped(re.sub(r"(?<=\S)\s*[.;,]$", "", text).strip())


def _without_markup(text: str) -> str:
    """Without Markdown emphasis and the signs that open and close a formula."""
    for mark in ("**", "__", "`", "*"):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)]
    text = re.sub(r"\*\*(?=\.?$)", "", text) if text.count("**") == 1 else text
    return re.sub(r"\\[()\[\]](?!\d*(?:pt|em|ex)\])|\\?\$", " ", text).strip()


def _ascii(text: str) -> str:
    text = RAISED_RUN.sub(lambda run: "^{" + run[0].translate(RAISED) + "}", text)
    text = re.sub("\u221a\\s*([A-Za-z]|\\d+)", r"\\sqrt{\1}", text)
    for sign, spelling in UNICODE.items():
        text = text.replace(sign, spelling)
    return unicodedata.normalize("NFKC", text)


def _words(words: str) -> str:
    r"""What \text{words} stands for: words, unless it is a number, a letter or a function."""
    inner = words.strip()
    if inner in FUNCTIONS or inner in PLAIN:
        return f" {inner} "
    if re.fullmatch(r"[A-Za-z]|[-+]?[\d.,/]+\s*", inner):
        return f" {inner} "
    return r"\text{" + words + "}"


def _command(match: re.Match[str]) -> str:
    name, sign = match[1], match[2]
    if sign is not None:
        if sign in ",!":
            return ""
        return ESCAPED.get(sign, " ")
    if name in NO_MEANING:
        return " "
    name = COMMANDS.get(name, name)
    if not name.isalpha():
        return rf"\{name}" if name in "{}" else name
    return rf"\{name}" if name in ("text", "begin", "end") else rf"\{name} "


def _plain_operators(text: str) -> str:
    """Operators as typed on a keyboard."""
    text = text.replace("{,}", ",").replace("**", "^").replace("==", "=").replace("...", r"\ldots ")
    text = re.sub(r"<=", r"\\le ", text)
    text = re.sub(r">=", r"\\ge ", text)
    text = re.sub(r"!=", r"\\ne ", text)
    text = re.sub(r"\+\s*/?\s*-(?=\s*\d)", r"\\pm ", text) if re.search(r"\+/-|\+-", text) else text
    text = re.sub(r"\^\s*(?:\{\s*\\degree\s*\}|\\degree)", r"\\degree ", text)
    return text.replace("*", r"\cdot ")


def _plain_word(match: re.Match[str]) -> str:
    r"""A function or constant written without its backslash; also sqrt(2) as \sqrt{2}."""
    before = match.string[: match.start()]
    if before.count(r"\text{") > before.count("}") or before.endswith((r"\begin{", r"\end{")):
        return match[0]
    word = PLAIN.get(match[0].lower() if len(match[0]) > 2 else match[0], match[0])
    if word in FUNCTIONS or word != match[0] or word in PLAIN:
        return rf"\{word} "
    return match[0]


def _unwrapped(text: str) -> str:
    r"""Without \text{..} or braces around the whole."""
    match = re.fullmatch(r"\\text\{([^{}]*)\}|\{([^{}]*)\}", text)
    return text if match is None else (match[1] or match[2] or "").strip()
