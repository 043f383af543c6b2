"""The fixed sentences around a method's evidence, and the turns they stand in.

The trainer writes contexts with them, and the shipped model was taught to read exactly these.
A `solution` is the text of a response without its end token; a `question` the user's turn.
"""

GUIDE = "A solution of this problem:"
"""Announces a solution, in the user's turn or in the system's."""
ANSWER_IS = "The answer is"
"""Announces a final answer in the user's turn."""
RETRY = "Wrong, try again."
"""What the user says after a failed attempt."""


def solution_below(question: str, solution: str) -> str:
    """The user's turn: the question, and a solution as evidence below it."""
    return f"{question}\n{system_solution(solution)}"


def system_solution(solution: str) -> str:
    """The system's turn: a solution as reference; the user's turn stays as it is."""
    return f"{GUIDE}\n{solution}"


def answer_below(question: str, answer: str) -> str:
    """The user's turn: the question, and a final answer as evidence below it."""
    return f"{question}\n{ANSWER_IS} {answer}."


def bare_answer(answer: str) -> str:
    """What stands between the opening of the assistant's turn and the response."""
    return f" {answer}"
