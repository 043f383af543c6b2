"""What is equal to what, kind by kind; docs/verifiers.md says why."""

import pytest

from megatron_credit.rewards.config import MathConfig
from megatron_credit.rewards.maths.verifier import MathVerifier

R, W, U = "right", "wrong", "unparsed"

CALCULUS = [
    ("7", "the sum is 3+4=7", U), (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}", R),
    (r"\int_0^1 x dx", "1/2", R), (r"\lim_{x\to 0}\frac{\sin x}{x}", "1", R),
]  # fmt: skip
COLLECTIONS = [
    ("n=2,3,4", "n=1,2,3", W), ("n=2,3,4", "n=4,3,2", R), ("D=(0,1)", "D=(0,1.5)", W),
    (r"\pm 2021", "2021", W), (r"\pm 2021", "2021,-2021", R), ("(1,2)", "(2,1)", W),
    ("(1,2)", r"\{1,2\}", W), ("(1,2)", "1,2", W), (r"\{1,2\}", "2,1", R),
    (r"\{1,2\}", r"\{2,1,1\}", R), ("(1,2)", "(1,2)", R), ("1, 234", "1,234", R),
    ("100,200", "100, 200", R), (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \frac{2\pi}{3})", W),
    (r"\left( 3, \frac{\pi}{2} \right)", "(3, pi/2)", R), ("x=2,y=3", "y=3, x=2", R),
    ("x=2,y=3", "x=3, y=2", W), ("x=2,y=3", "2,3", W), (r"\emptyset", r"\{\}", R),
    (r"x=1\pm\sqrt2", r"1+\sqrt2, 1-\sqrt2", R), (r"\{1,2,3\}", "{1,2,3}", R),
    ("1,2", "1 and 2", R), ("1,2", "1,2,3", W), ("1,2,3", "1,2", W), ("1,1,2", "1,2", W),
    ("x=1,x=2", "1,2", R), ("1,2", "x=1, x=2", R), ("x=1", "x=1,x=2", W), ("5", "5 or 6", W),
    ("5", "5, 6", W), (r"k\pi, k \in \mathbb{Z}", r"k\pi, k\in \mathbb{Z}", R),
    (r"\left\{\frac{1}{2}, 3\right\}", "3, 0.5", R), (r"\langle 1,2\rangle", "(1,2)", W),
    ("(2,3),(4,5)", "(3,2),(4,5)", W),
    (r"x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}",
     r"\frac{-b+\sqrt{b^2-4ac}}{2a}, \frac{-b-\sqrt{b^2-4ac}}{2a}", R),
]  # fmt: skip
EQUATIONS = [
    ("(1,3)", "(1,2) = (1,3)", W), ("(1,3)", "P = (1,3)", R), (r"|x|", r"\lvert x\rvert", R),
    ("x=5", "5", R), ("5", "x=5", R), ("x=5", "y=5", W), ("7", "3+4=7", R), ("7", "3+5=7", W),
    ("y=2x+1", "2x-y+1=0", R), ("2x+4y-3=0", "y=-1/2*x+3/4", R), ("3x-y+13=0", "3x+4y+14=0", W),
    ("x=5", "2x=10", W), ("x=5", "x-5=0", W), ("x=5", "5=x", R), (r"x \ne 3", r"x \neq 3", R),
    ("y=x^2", "x^2", R), ("y=x^2", "y=x^3", W), ("x^2+y^2=1", "x^2+y^2-1=0", R),
    ("x^2+y^2=1", "y^2+x^2=1", R), ("x^2+y^2=1", "x^2+y^2=2", W), ("x+y=1", "2x+2y=2", R),
    ("x=5", "5=y", W), ("x=2", "x^2=4", W), ("xy=1", "y=1/x", W), ("|z|=1", "|z|=1", R),
    (r"0.\overline{36}", "4/11", R), (r"0.3\overline{6}", "11/30", R), ("4", "2+2=4", R),
    ("4", "2+2=5", W), ("4", "x=2+2=4", R), ("5", "5 = 5", R),
]  # fmt: skip
EXPRESSIONS = [
    (r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}", R), ("x", r"\sqrt{x^2}", W), ("|x|", r"\sqrt{x^2}", R),
    (r"2\ln x", r"\ln x^2", R), (r"\sin^2x+\cos^2x", "1", R), ("x^2+1", "1 + x²", R),
    ("x^2+1", "x^2-1", W), ("(x+1)^2", "x^2+2x+1", R), ("2i", "2i", R), ("1+i", "1-i", W),
    (r"e^{i\pi}", "-1", R), (r"\frac{x}{y}", r"\frac{y}{x}", W), ("ABC", "ABC", R),
    ("x^2+x", "x(x+1)", R), ("(x-1)(x+1)", "x^2-1", R), (r"\frac{x^2-1}{x-1}", "x+1", R),
    ("2^x", "4^{x/2}", R), ("x^2", "x^3", W), ("x", "y", W), ("2x", "x", W), ("a+b", "b+a", R),
    ("ab", "ba", R), (r"\sin 2x", r"2\sin x\cos x", R), (r"\tan x", r"\sin x/\cos x", R),
    ("e^{x+1}", r"e\cdot e^x", R), ("1+2i", "1+2i", R), ("1+2i", "2i+1", R), ("i^2", "-1", R),
    (r"\frac{1}{1+i}", r"\frac{1-i}{2}", R), ("5", "x", W),
    (r"x \in \mathbb{R}", r"x \in \mathbb{R}", R), (r"\mathbb{R}", r"\mathbb{R}", R),
    (r"\mathbb{R}", "R", R), ("p", "q", W),
]  # fmt: skip
FUNCTIONS = [
    (r"F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1}", r"F_n = \sum_{k=0}^{n-2} F_k F_{n-k-2}", W),
    ("f(x)=x^2", "x^2", R), ("f(x)=x^2", "t^2", W), ("f(x)=x^2", "f(t)=t^2", R),
    ("f(x)=x^2", "g(x)=x^2", W), ("x^2", "f(x)=x^2", R), ("f(x)=2x", "f(x)=2x+1", W),
    ("f(x,y)=x+y", "f(a,b)=a+b", R), ("f^{-1}(x)=x/2", "x/2", R),
    ("f(x)=(x+1)^2=x^2+2x+1", "x^2+2x+1", R), ("a_n=2n", "2n", R), ("a_n=2n", "2n+1", W),
]  # fmt: skip
INEQUALITIES_AND_INTERVALS = [
    ("(1,2)", "[1,2]", W), ("[0,1)", "[0,1)", R), ("[0,1)", "(0,1]", W),
    ("x<3", r"(-\infty,3)", R), (r"(-\infty,3)", "x<3", R), ("x<3", "x<=3", W), ("x<3", "3>x", R),
    ("0<x<12.5", "(0,12.5)", R), (r"(-\infty,1)\cup(2,\infty)", "x<1 or x>2", R),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)", R), ("x<3", "y<3", W),
    (r"x \in [0,1]", "[0,1]", R), ("5", r"\[5\]", R), ("[1,2,3]", "[1,2,3]", R),
    ("[1,2,3]", "[3,2,1]", W), (r"(-\infty,\infty)", r"(-\infty,+\infty)", R),
    (r"(-\infty, 2]", r"x \le 2", R), ("[1,2]", r"1\le x\le 2", R), ("[1,2]", "1<x<2", W),
    ("x>2", "x<2", W), (r"x\ge2", "x>=2", R), ("a<b", "b>a", R), ("2x<6", "x<3", W),
    (r"\left[ \frac12, \infty \right)", "[0.5, ∞)", R),
]  # fmt: skip
MATRICES = [
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", R),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", W),
    (r"\begin{pmatrix}1 & 2\end{pmatrix}", "(1,2)", W),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", R),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", W),
]  # fmt: skip
NUMBERS = [
    (r"10^{-500}\sqrt2", r"10^{-500}\sqrt3", W), (r"10^{-500}\sqrt8", r"2\sqrt2/10^{500}", R),
    ("1/2", "0.5", R), (r"\frac12", "0.50", R), ("1e-10", "2e-10", W),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", W), (r"\frac{1}{2004!}", r"\frac{1}{2006!}", W),
    ("7", "3+4", R), (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}", W),
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}", W),
    (r"1 - \frac{1}{\mathrm{e}}", "1 - 1/e", R), ("sqrt(2)/2", r"\frac{\sqrt2}{2}", R),
    (r"\frac{1}{\sqrt2}", "sqrt(2)/2", R), ("sqrt(2)", "1.41421", W), ("1.41421", "sqrt(2)", R),
    ("0.333", "1/3", R), ("0.3", "1/3", W), ("1/3", "0.333", W), ("3.14", r"\pi", R),
    ("3.14", "3.1416", W), ("4", r"4\sqrt(2)", W), ("1,234", "1234", R), ("1234", "1,234", R),
    ("2 1/2", "2.5", R), (r"2\frac12", "5/2", R), (r"\infty", r"-\infty", W),
    (r"\infty", "infinity", R), ("5", r"\infty", W), ("1010_2", "1010_{2}", R),
    ("0.1+0.2", "0.3", R), ("1", "9^9^9^9", U), (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2", R),
    ("5", "5.0", R), ("5", "$5$.", R), ("5", r"\(5\)", R), ("5", "**5**", R), ("-5", "- 5", R),
    ("5", "+5", R), ("5", r"5\,", R), ("1000000", "10^6", R), ("1000000", "1e6", R),
    ("1000000", r"1\times 10^6", R), ("0.000001", "10^{-6}", R), ("1e-10", "0", W),
    ("10^{-20}", "0", W), ("1e-300", "2e-300", W), ("0.1", "0.10000000001", W),
    ("1/3", "0.33333333333333333333", W), (r"\pi", "3.14159265358979323846", W),
    (r"\pi", "22/7", W), ("e", "2.718281828", W), (r"\sqrt2", r"\sqrt2+10^{-30}", W),
    (r"\log_2 8", "3", R), (r"\ln e", "1", R), ("100", "1", W), (r"2\sqrt{3}", "sqrt(12)", R),
    (r"2\sqrt{3}", "2*3^(1/2)", R), ("2√3", r"2\sqrt3", R), (r"\frac{\sqrt{3}}{3}", "1/√3", R),
    (r"\frac{1+\sqrt5}{2}", "(1+sqrt(5))/2", R), (r"\frac{1+\sqrt5}{2}", "1.618", W),
    (r"\sqrt[3]{2}", "2^(1/3)", R), ("3!", "6", R), (r"\binom{10}{3}", "120", R), ("5", "5!", W),
    ("5", r"\boxed{5}", R), ("10", "1010_2", W), ("-1/2", r"-\frac{1}{2}", R),
    ("-1/2", r"\frac{-1}{2}", R), ("-1/2", r"\frac{1}{-2}", R), ("1/2", r"\frac{2}{4}", R),
    ("3 1/2", "3.5", R), (r"3\frac{1}{2}", "7/2", R), (r"3 \cdot \frac{1}{2}", "1.5", R),
    ("2^{100}", "1267650600228229401496703205376", R),
    ("2^{100}", "1267650600228229401496703205377", W), ("100!", "100! + 1", W),
    (r"\frac{10^{50}+1}{10^{50}}", "1", W), (r"\frac{3}{4}\pi", r"3\pi/4", R),
    (r"\lfloor 2.5 \rfloor", "2", R), ("100", "10²", R), ("½", "0.5", R), ("12", "3\u00d74", R),
    ("4", "12÷3", R),
]  # fmt: skip
SEQUENCES_AND_RATIOS = [
    ("12:00", "1:00", W), ("12:00", "12:00", R), (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1", W),
    (r"1:2:3:\ldots", r"1:4:9:\ldots", W), ("1:2", "2:4", R), ("1:2", "2:1", W),
    (r"1, 3, 5, \ldots", "1,3,5,...", R), (r"1, 3, 5, \ldots", "3,1,5,...", W), ("3:4", "3/4", W),
    ("3 : 4", "3:4", R), ("2:3:4", "4:6:8", R),
]  # fmt: skip
UNITS = [
    (r"50\%", "0.5", R), (r"50\%", "50", R), ("50", "50%", R), ("0.5", "0.5%", W),
    ("0.5", "50%", R), ("50%", "5%", W), (r"90^\circ", "90", R), ("90", "90°", R),
    (r"\frac{\pi}{2}", "90°", W), (r"5 \text{ cm}", "5", R), ("5", "5 cm", R), ("5 cm", "5 m", W),
    (r"5\text{ cm}", "5 centimeters", R), (r"5 \text{ m}", "5m", R), ("3 million", "3000000", R),
    ("$5", "5 dollars", R), (r"25\%", "0.25", R), ("25%", "1/4", R), (r"12.5\%", "12.5", R),
    ("25%", "25 percent", R), ("25%", "0.0025", W), (r"30^\circ", "30 degrees", R),
    ("30°", "31°", W), (r"10 \text{ dollars}", r"\$10", R), ("10", "10 apples", R),
    ("10", r"10 \text{ cm}^2", R), (r"10\text{ cm}^2", r"10\text{ cm}", W),
    (r"5 \mathrm{~km}", "5 km", R), ("5 km/h", "5", R), (r"2\pi \text{ cm}", r"2\pi", R),
]  # fmt: skip
WORDS = [
    (r"19, 46, \text{ and } 82", "21, 36, and 82", W),
    (r"19, 46, \text{ and } 82", "82, 19 and 46", R), (r"\text{Evelyn}", "Evelyn", R),
    (r"\text{(C)}", "C", R), ("Tuesday", "Monday", W), ("5", "Monday", U),
    (r"a=1 \text{ or } a=-2", "a=-2 or a=1", R), (r"\text{Yes}", "yes", R), ("Yes", "No", W),
    ("no solution", "No solution", R), (r"\text{undefined}", "0", W),
    ("0", r"\text{undefined}", U), (r"\text{June 20}", "June 20", R), ("5", "maybe 5", U),
    ("5", "I think the answer is 5", U), ("5", "not 5", U), ("5", "5 is the answer", U),
    ("5", "?", U), ("5", "5?", U), (r"(2,3) \text{ and } (4,5)", "(4,5),(2,3)", R),
]  # fmt: skip
KINDS = {
    "calculus": CALCULUS,
    "collections": COLLECTIONS,
    "equations": EQUATIONS,
    "expressions": EXPRESSIONS,
    "functions": FUNCTIONS,
    "inequalities_and_intervals": INEQUALITIES_AND_INTERVALS,
    "matrices": MATRICES,
    "numbers": NUMBERS,
    "sequences_and_ratios": SEQUENCES_AND_RATIOS,
    "units": UNITS,
    "words": WORDS,
}
PAIRS = [pytest.param(*pair, id=f"{kind}:{pair[0]}:{pair[1]}") for kind in KINDS
         for pair in KINDS[kind]]  # fmt: skip
VERIFIER = MathVerifier(MathConfig())


@pytest.mark.parametrize(("reference", "answer", "outcome"), PAIRS)
def test_verdict(reference, answer, outcome):
    assert VERIFIER.compare(answer, reference, {}).outcome == outcome


@pytest.mark.parametrize("reference", sorted({pair.values[0] for pair in PAIRS}))
def test_a_reference_is_its_own_answer(reference):
    verdict = VERIFIER.compare(reference, reference, {})
    assert verdict.outcome == "right"
    assert VERIFIER.check_reference(reference, {}) is None


def test_equal_answers_have_equal_normal_forms():
    spellings = [
        ["0.5", "1/2", r"\frac12", "2/4", "50%", r"x = \frac{1}{2}"],
        ["sqrt(2)/2", r"\frac{1}{\sqrt2}", "2^{-1/2}"],
        ["1, 2", "2, 1", r"\{2, 1\}"],
        ["(x+1)^2", "x^2 + 2x + 1"],
        [r"(-\infty, 3]", "x <= 3"],
    ]
    for equal in spellings:
        forms = {
            VERIFIER.compare(answer, "123456789", {}).parsed.removeprefix("x = ")
            for answer in equal
        }
        assert len(forms) == 1, forms


def test_what_a_right_answer_is_called_is_the_reference():
    verdict = VERIFIER.compare(r"\sin^2 x + \cos^2 x", "1", {})
    assert (verdict.outcome, verdict.parsed) == ("right", "1")


@pytest.mark.parametrize(
    ("reference", "problem"),
    [("", "no answer"), ("1/(", "cannot be read"), ("2+2=5", "does not hold"), ("1/0", "read")],
)
def test_unusable_references(reference, problem):
    assert problem in VERIFIER.check_reference(reference, {})
    with pytest.raises(ValueError):
        VERIFIER.compare("7", reference or "  ", {})


def test_a_tolerance_is_relative_to_the_reference():
    loose = MathVerifier(MathConfig(rel_tolerance=0.01))
    assert loose.compare("1.415", r"\sqrt2", {}).outcome == "right"
    assert loose.compare("1.43", r"\sqrt2", {}).outcome == "wrong"
    assert loose.compare("1.0001e-10", "1e-10", {}).outcome == "right"
    assert loose.compare("2e-10", "1e-10", {}).outcome == "wrong"
