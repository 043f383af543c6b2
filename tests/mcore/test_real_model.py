"""SmolLM2-135M-Instruct, a pretrained model: in, one step, out. `scripts/fetch-smollm2` gets it."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_credit.objective.config import ObjectiveConfig

MODEL = Path(__file__).parents[2] / "build" / "smollm2-135m-instruct"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not MODEL.is_dir(), reason="no pretrained model; scripts/fetch-smollm2 gets one (93 MB)"
    ),
]
QUESTIONS = {"What is the capital of France?": ("Paris.", "Rome."), "What is 2 + 3?": ("5", "6")}
# Nine query heads and three key-value heads: three tensor ranks, or one.
WORLDS = (1, 3)
# Through 30 layers in float32.
TOLERANCE = 2e-4


def sequences() -> list[TrainSequence]:
    """A right answer with credit 1 and a wrong one with credit -1 to each question."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    found = []
    for question, answers in QUESTIONS.items():
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        for answer, credit in zip(answers, (1.0, -1.0), strict=True):
            response = [*tokenizer.encode(answer), tokenizer.eos_token_id]
            found.append(
                TrainSequence(
                    token_ids_L=torch.tensor([*prompt, *response]),
                    num_prompt=len(prompt),
                    mask_T=torch.ones(len(response), dtype=torch.bool),
                    rollout_logprob_T=torch.zeros(len(response)),
                    advantage_T=torch.full((len(response),), credit),
                    old_logprob_T=None,
                    reference_logprob_T=None,
                )
            )
    return found


def run(rank: int, world_size: int, directory: str) -> None:
    """One step of the policy; rank 0 writes the scores before and after, and the model after."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous-{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )
    from megatron_credit.mcore.hf_files import write_checkpoint
    from megatron_credit.mcore.parallel import start_parallel
    from megatron_credit.mcore.policy import Policy

    parallel = ParallelConfig(tensor=world_size)
    policy = Policy.build(
        policy=PolicyConfig(model=MODEL),
        optimizer=OptimizerConfig(lr=1e-5),
        parallel=parallel,
        ranks=start_parallel(parallel, seed=1, timeout_s=300),
        seed=1,
    )
    batch = sequences()
    before = policy.score(batch, temperature=1.0)
    update = policy.update(batch, objective=ObjectiveConfig(importance="none"), temperature=1.0)
    after = policy.score(batch, temperature=1.0)
    place = Path(directory, f"step-{world_size}")
    if rank == 0:
        write_checkpoint(place, policy.weights(), MODEL)
        found = {"before": scores(before), "after": scores(after), "metrics": update.metrics}
        torch.save(found, place / "found.pt")
    else:
        for _ in policy.weights():
            pass
    dist.destroy_process_group()


def scores(scored):
    return [(one.logprob_T, one.entropy_T) for one in scored]


@pytest.fixture(scope="module", params=WORLDS)
def stepped(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("real")
    multiprocessing.spawn(run, args=(request.param, str(directory)), nprocs=request.param)
    return directory / f"step-{request.param}"


def largest_gap(found, model_dir: Path) -> float:
    """Of log-probs and entropies from those of transformers, in nats."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    gaps = []
    for sequence, (logprob_T, entropy_T) in zip(sequences(), found, strict=True):
        with torch.no_grad():
            logits_LV = model(sequence.token_ids_L[None]).logits[0]
        log_TV = logits_LV[sequence.num_prompt - 1 : -1].log_softmax(-1)
        response_T = sequence.token_ids_L[sequence.num_prompt :]
        expected_T = log_TV.gather(-1, response_T[:, None])[:, 0]
        gaps += [logprob_T - expected_T, entropy_T + (log_TV.exp() * log_TV).sum(-1)]
    return torch.cat(gaps).abs().max().item()


def test_in_one_step_and_out(stepped):
    found = torch.load(stepped / "found.pt")
    assert largest_gap(found["before"], MODEL) <= TOLERANCE
    assert largest_gap(found["after"], stepped) <= TOLERANCE
    assert found["metrics"]["optimizer/skipped"] == 0
    before, after = margins(found["before"]), margins(found["after"])
    # It knows what it was taught, and the step tells right from wrong more clearly.
    assert min(before) > 0
    assert all(new > old for new, old in zip(after, before, strict=True))


def margins(found) -> list[float]:
    """Of each question, by how many nats the right answer is likelier than the wrong one."""
    logprobs = [logprob_T.sum().item() for logprob_T, _ in found]
    return [right - wrong for right, wrong in zip(logprobs[::2], logprobs[1::2], strict=True)]
