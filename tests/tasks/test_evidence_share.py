import math

import pytest
import torch

from megatron_credit.tasks.evidence_share import WrongResponse, measure_evidence_shares
from megatron_credit.tasks.imitation import build_model
from megatron_credit.tasks.sample import logprobs, sample_responses
from megatron_credit.tasks.tokenizer import build_credit_tokenizer

QUESTION = "State the final answer to the following arithmetic problem: 6 + 7 - 8 ="
RIGHT = "6+7=13;13-8=5;<answer>5</answer>"
TEXT = "6+7=13;13-8=15;<answer>15</answer>"
ASKED = f"<|user|>{QUESTION}<|assistant|>"
# 6 + 7 = 1 3 ; are seven tokens, 1 3 - 8 = 1 5 ; eight, and four of the answer
FIRST_WRONG, END_OF_STEP, LENGTH = 7, 15, 19
CONTEXTS = {
    "user": f"<|user|>{QUESTION}\nA solution of this problem:\n{RIGHT}<|assistant|>",
    "system": f"<|system|>A solution of this problem:\n{RIGHT}{ASKED}",
    "bare_right": f"{ASKED} 5",
    "bare_wrong": f"{ASKED} 15",
    "wrapped_right": f"<|user|>{QUESTION}\nThe answer is 5.<|assistant|>",
    "wrapped_wrong": f"<|user|>{QUESTION}\nThe answer is 15.<|assistant|>",
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_credit_tokenizer()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = build_model().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def predictions(model, context_ids, response_ids):
    """Probabilities of each next token, one forward pass a position."""
    rows = []
    for place in range(len(response_ids)):
        ids_BL = torch.tensor([context_ids + response_ids[:place]])
        with torch.no_grad():
            rows.append(model(input_ids=ids_BL).logits[0, -1].softmax(-1))
    return torch.stack(rows)


def test_shares_against_one_pass_a_token(model, tokenizer):
    response_ids = tokenizer(TEXT)["input_ids"]
    assert len(response_ids) == LENGTH
    behind = {
        name: predictions(model, tokenizer(context)["input_ids"], response_ids)
        for name, context in {"plain": ASKED, **CONTEXTS}.items()
    }

    def share(signal):
        return sum(signal[FIRST_WRONG:END_OF_STEP]) / sum(signal)

    def kl(name):
        pairs = zip(behind[name].tolist(), behind["plain"].tolist(), strict=True)
        return [sum(p * math.log(p / q) for p, q in zip(*pair, strict=True)) for pair in pairs]

    def gap(name):
        right, wrong = behind[f"{name}_right"], behind[f"{name}_wrong"]
        return [
            abs(math.log(right[place, token] / wrong[place, token]))
            for place, token in enumerate(response_ids)
        ]

    # a second response of another length: padding and order must not matter
    other = "6+7=3;3-8=-5;<answer>-5</answer>"
    pair = [
        WrongResponse(QUESTION, response_ids, TEXT, "5", "15"),
        WrongResponse(QUESTION, tokenizer(other)["input_ids"], other, "5", "-5"),
    ]
    one = measure_evidence_shares(model, tokenizer, pair[:1])
    expected = (
        share(kl("user")),
        share(kl("system")),
        share(gap("bare")),
        share(gap("wrapped")),
        8 / 19,
    )
    assert one == pytest.approx(expected, rel=1e-6)
    both = measure_evidence_shares(model, tokenizer, pair)
    second = measure_evidence_shares(model, tokenizer, pair[1:])
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(one, second, strict=True)], rel=1e-6)


def test_a_wrong_answer_behind_right_steps_is_the_wrong_step(model, tokenizer):
    text = "6+7=13;13-8=5;<answer>6</answer>"
    response = WrongResponse(QUESTION, tokenizer(text)["input_ids"], text, "5", "6")
    assert measure_evidence_shares(model, tokenizer, [response]).uniform == pytest.approx(3 / 17)


def test_logprobs_are_of_the_tokens_behind_their_context(model, tokenizer):
    context_ids, response_ids = tokenizer(ASKED)["input_ids"], tokenizer(RIGHT)["input_ids"]
    short_ids = response_ids[:3]
    long_TV, short_TV = logprobs(model, [context_ids] * 2, [response_ids, short_ids])
    expected_TV = predictions(model, context_ids, response_ids).log()
    torch.testing.assert_close(long_TV, expected_TV, rtol=0, atol=1e-9)
    torch.testing.assert_close(short_TV, expected_TV[:3], rtol=0, atol=1e-9)


def test_greedy_responses_do_not_depend_on_their_neighbours(model, tokenizer):
    chats = [ASKED, f"<|system|>{RIGHT}{ASKED}"]
    together = sample_responses(model, tokenizer, chats, temperature=0.0, max_new_tokens=5)
    alone = [
        sample_responses(model, tokenizer, [chat], temperature=0.0, max_new_tokens=5)[0]
        for chat in chats
    ]
    assert together == alone
    first = predictions(model, tokenizer(ASKED)["input_ids"], [0])[0].argmax().item()
    assert together[0][:1] == [first] or first == tokenizer.eos_token_id
