"""Maths answers a second of the verifier pool: alone, beside one that hangs, and under attack.

    OMP_NUM_THREADS=1 python benchmarks/verifiers.py [--workers 2] [--answers 4000] [--out FILE]

`throughput`: different answers, so that none is answered from another's verdict. `math_verify`: the
same pairs through math-verify's own parse and verify, in one process and without a time limit.
`beside a hang`: one more answer that computes for ever; the time is that of all the others.
`attack`: 10,000 answers, of which some crash, hang or fork; every verdict is compared.
"""

import argparse
import itertools
import json
import logging
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from megatron_credit.rewards.config import CustomConfig, MathConfig, PoolConfig
from megatron_credit.rewards.pool import Question, VerifierPool
from megatron_credit.rewards.verdict import count_outcomes

sys.path.append(str(Path(__file__).parents[1] / "tests"))
VERIFIERS = {"math": MathConfig(), "unruly": CustomConfig(path="rewards.unruly:check")}
HANG = Question("unruly", "spin for ever", "yes")


def pairs(rng: random.Random) -> Iterator[tuple[str, str]]:
    """(reference, answer) for ever, of the sorts that training on maths questions meets; about
    three quarters are right."""
    for number in itertools.count(2):
        a, b, c = (rng.randint(2, 60) for _ in range(3))
        wrong = rng.random() < 0.25
        d = c + wrong
        yield str(number + a), str(number + a + wrong)
        yield rf"\frac{{{a}}}{{{number}}}", rf"\dfrac{{{2 * a}}}{{{2 * number + wrong}}}"
        yield f"{a * number}", f"{a * number + wrong:,}"
        yield f"{a / 8:.3f}", rf"\frac{{{a + wrong}}}{{8}}"
        yield rf"{a}\sqrt{{{number}}}", f"{a + wrong}*sqrt({number})"
        yield rf"\frac{{{a} + \sqrt{{{b}}}}}{{{number}}}", f"({a} + sqrt({b + wrong}))/{number}"
        yield f"(x+{number})(x-{a})", f"x^2 + {number - a}x - {number * a + wrong}"
        yield f"({number}, {c})", rf"\left({number}, {d}\right)"
        third = rf"\frac{{{a}}}{{{b}}}"
        yield rf"{number}, {third}", rf"{third} \text{{ and }} {number + wrong}"
        yield rf"(-\infty, {number}]", rf"x \le {number + wrong}"
        yield f"x = {number}", str(number + wrong)
        yield rf"{number}\pi", rf"{number + wrong}\pi"
        yield rf"{number} \text{{ cm}}", str(number + wrong)
        yield f"y = {a}x + {number}", f"{a}x - y + {number + wrong} = 0"
        yield rf"\frac{{x+{a}}}{{x-{number}}}", f"({'x'}+{a + wrong})/(x-{number})"
        yield rf"{number}e^{{{a}x}}", rf"{number + wrong}\cdot e^{{{a}x}}"


def questions(count: int, seed: int) -> list[Question]:
    """Responses of some length with a boxed answer."""
    drawn = itertools.islice(pairs(random.Random(seed)), count)
    thoughts = "We compute 3 + 4 = 7 and go on from there. " * 40
    return [Question("math", rf"{thoughts} \boxed{{{given}}}", wanted) for wanted, given in drawn]


def throughput(pool: VerifierPool, count: int, repeats: int) -> dict[str, Any]:
    """Answers a second, and what the verdicts were."""
    rates = []
    for repeat in range(repeats):
        asked = questions(count, repeat)
        start = time.perf_counter()
        verdicts = pool.grade(asked)
        rates.append(count / (time.perf_counter() - start))
    outcomes = count_outcomes(verdict.outcome for verdict in verdicts)
    return {**spread(rates), "unit": "answers/s", "outcomes": outcomes}


def math_verify_rate(count: int) -> dict[str, Any]:
    """math-verify itself on the same pairs, and how often it says right."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    drawn = list(itertools.islice(pairs(random.Random(0)), count))
    start = time.perf_counter()
    right = 0
    for wanted, given in drawn:
        expected, found = (parse(f"${text}$", parsing_timeout=None) for text in (wanted, given))
        right += verify(expected, found, timeout_seconds=None)
    rate = count / (time.perf_counter() - start)
    return {"median": round(rate, 1), "unit": "answers/s", "processes": 1, "right": right / count}


def beside_a_hang(pool: VerifierPool, count: int, repeats: int) -> dict[str, Any]:
    """Seconds until `count` answers have verdicts, without and with one that hangs before them."""
    seconds: dict[str, list[float]] = {"alone": [], "beside": []}
    for repeat, (name, times) in itertools.product(range(repeats), seconds.items()):
        asked = questions(count, 1000 + repeat)
        hanging = threading.Thread(target=pool.grade, args=([HANG] if name == "beside" else [],))
        hanging.start()
        start = time.perf_counter()
        pool.grade(asked)
        times.append(time.perf_counter() - start)
        hanging.join()
    return {name: {**spread(times), "unit": "s"} for name, times in seconds.items()}


def attack(workers: int, count: int) -> dict[str, Any]:
    """How many of `count` verdicts are missing or not what they must be."""
    rng = random.Random(5)
    expected = {"exit": "error", "segfault": "error", "raise": "error", "sleep": "timeout"}
    kinds, weights = ["be", "fork", "print", *expected], [990, 2, 2, 2, 2, 2, 1]
    asked = [(rng.choices(kinds, weights)[0], rng.random() < 0.5) for _ in range(count)]
    texts = [
        Question("unruly", f"{kind} {number}", str(number) if right else "no")
        for number, (kind, right) in enumerate(asked)
    ]
    start = time.perf_counter()
    with VerifierPool(VERIFIERS, PoolConfig(workers=workers, time_limit_s=1.0)) as pool:
        verdicts = pool.grade(texts)
    seconds = time.perf_counter() - start
    wanted = [expected.get(kind, "right" if right else "wrong") for kind, right in asked]
    wrong = sum(
        verdict.outcome != outcome for verdict, outcome in zip(verdicts, wanted, strict=True)
    )
    return {
        "answers": count,
        "harmful": sum(kind in expected for kind, _ in asked),
        "lost": count - len(verdicts),
        "not as expected": wrong,
        "seconds": round(seconds, 1),
    }


def spread(values: list[float]) -> dict[str, Any]:
    """Median and extremes."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "repeats": len(values),
    }


def main() -> None:
    """Measures everything and writes one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--answers", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = PoolConfig(workers=arguments.workers, time_limit_s=5.0)
    start = time.perf_counter()
    with VerifierPool(VERIFIERS, settings) as pool:
        first = time.perf_counter() - start
        pool.grade(questions(200, 99))  # what sympy sets up at its first uses
        result = {
            "date": date.today().isoformat(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "load_average": os.getloadavg()[0],
            "workers": arguments.workers,
            "start_s": round(first, 2),
            "throughput": throughput(pool, arguments.answers, arguments.repeats),
            "math_verify": math_verify_rate(500),
            "500 answers": beside_a_hang(pool, 500, arguments.repeats),
            "4000 answers": beside_a_hang(pool, 4000, 3),
        }
    result["attack"] = attack(arguments.workers, 10_000)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
