"""Equal by construction is right, different by construction is wrong, whatever the spelling."""

from fractions import Fraction

import sympy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_credit.rewards.config import MathConfig
from megatron_credit.rewards.maths.verifier import MathVerifier

VERIFIER = MathVerifier(MathConfig())
EXAMPLES = settings(max_examples=60, deadline=None)
RATIONALS = st.fractions(min_value=-1000, max_value=1000, max_denominator=200)
SMALL = st.integers(-9, 9)


def outcome(reference: str, answer: str) -> str:
    return VERIFIER.compare(answer, reference, {}).outcome


def spellings(value: Fraction) -> list[str]:
    sign, top, bottom = ("-" if value < 0 else ""), abs(value.numerator), value.denominator
    found = [
        f"{sign}{top}/{bottom}",
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"$\dfrac{{{sign}{top}}}{{{bottom}}}$",
        rf"x = {sign}\frac{{{3 * top}}}{{{3 * bottom}}}",
        f"({sign}{top})/({bottom})",
        f"\u2212{top} \u00f7 {bottom}" if value < 0 else f"{top} \u00f7 {bottom}",
    ]
    if top > bottom > 1:
        found.append(f"{sign}{top // bottom} {top % bottom}/{bottom}" if value > 0 else found[0])
    if bottom == 1:
        found += [f"{sign}{top}", f"{sign}{top}.0", f"{sign}{top:,}", rf"{sign}{top}\text{{ cm}}"]
    return found


@EXAMPLES
@given(RATIONALS, st.data())
def test_a_number_is_right_in_every_spelling(value, data):
    ways = spellings(value)
    assert outcome(data.draw(st.sampled_from(ways)), data.draw(st.sampled_from(ways))) == "right"


@EXAMPLES
@given(RATIONALS, RATIONALS.filter(bool), st.integers(0, 300), st.data())
def test_another_number_is_wrong_however_near(value, step, magnitude, data):
    """But for what rounds to a reference of 10.0 and has no decimals of its own, such as 301/30."""
    other = value + step / 10**magnitude
    reference = data.draw(st.sampled_from(spellings(value)))
    has_decimals = 10**400 % other.denominator == 0
    assume("." not in reference or has_decimals or abs(other - value) > Fraction(1, 20))
    assert outcome(reference, data.draw(st.sampled_from(spellings(other)))) == "wrong"


@EXAMPLES
@given(st.integers(-10**6, 10**6), st.integers(1, 8), st.integers(1, 10**6))
def test_decimals_are_exact(digits, places, step):
    scale = Fraction(1, 10**places)
    written = f"{sympy.Rational(digits, 10**places).evalf(20):.{places}f}"
    exact = digits * scale
    assert outcome(written, f"{exact.numerator}/{exact.denominator}") == "right"
    other = exact + step * Fraction(1, 2 * 10**places) + scale
    assert outcome(written, f"{other.numerator}/{other.denominator}") == "wrong"


@EXAMPLES
@given(st.lists(SMALL, min_size=2, max_size=4), SMALL.filter(bool))
def test_polynomials(roots, shift):
    x = sympy.Symbol("x")
    product = sympy.Mul(*(x - root for root in roots))
    factored = "".join(f"(x - {root})".replace("- -", "+ ") for root in roots)
    expanded = sympy.latex(sympy.expand(product))
    assert outcome(factored, expanded) == "right"
    assert outcome(expanded, str(sympy.expand(product))) == "right"
    assert outcome(factored, f"{expanded} + {shift}") == "wrong"


@EXAMPLES
@given(st.lists(st.tuples(SMALL, SMALL), min_size=2, max_size=5, unique=True), st.randoms())
def test_the_order_of_a_collection_is_free_and_that_of_a_point_is_not(points, random):
    spelled = [f"({a}, {b})" for a, b in points]
    shuffled = random.sample(spelled, len(spelled))
    assert outcome(", ".join(spelled), ", ".join(shuffled)) == "right"
    assert outcome(", ".join(spelled), ", ".join(shuffled[:-1])) == "wrong"
    a, b = points[0]
    assert outcome(f"({a}, {b})", f"({b}, {a})") == ("right" if a == b else "wrong")


@EXAMPLES
@given(SMALL.filter(bool), SMALL.filter(bool), SMALL, SMALL.filter(bool))
def test_multiples_of_an_equation_are_the_same_equation(a, b, c, factor):
    line = f"{a}x + {b}y = {c}".replace("+ -", "- ")
    multiple = f"{factor * a}x + {factor * b}y = {factor * c}".replace("+ -", "- ")
    assert outcome(line, multiple) == "right"
    assert outcome(line, f"{multiple} + 1") == "wrong"


@EXAMPLES
@given(st.integers(2, 50), st.integers(2, 50))
def test_surds(a, b):
    assert outcome(rf"\sqrt{{{a * b * b}}}", f"{b}*sqrt({a})") == "right"
    assert outcome(rf"\frac{{1}}{{\sqrt{{{a}}}}}", rf"\frac{{\sqrt{{{a}}}}}{{{a}}}") == "right"
    assert outcome(rf"\sqrt{{{a * b * b}}}", f"{b}*sqrt({a + 1})") == "wrong"
    approximate = f"{sympy.sqrt(a).evalf(12)}"
    exact = sympy.sqrt(a).is_Integer
    assert outcome(rf"\sqrt{{{a}}}", approximate) == ("right" if exact else "wrong")


@settings(max_examples=300, deadline=1000)
@given(st.text(alphabet=r"01259.,+-*/^_()[]{}|\=<>!%$& abefxyz:", max_size=40))
def test_whatever_is_written_there_is_an_outcome(text):
    verdict = VERIFIER.compare(text, "1/2", {})
    assert verdict.outcome in ("right", "wrong", "unparsed")


@settings(max_examples=200, deadline=1000)
@given(st.text(max_size=30))
def test_text_in_any_language_has_an_outcome(text):
    assert VERIFIER.compare(text, "1/2", {}).outcome in ("right", "wrong", "unparsed")
