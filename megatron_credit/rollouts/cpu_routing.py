"""The experts that each token went to, from a CPU engine. Runs in vLLM's core process only.

vLLM 0.32 returns them from its second model runner, which needs a GPU. On a CPU the worker and the
scheduler share a process, and these two classes, which the command line names, share a record: the
worker writes down what the routers chose, the scheduler puts it into a finished request's answer,
where a GPU engine has it too.

Shape letters: P tokens of one step of the engine, all requests end to end; L tokens of one request,
the last one apart; D layers, K experts of a token.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class Record:
    """What the routers chose for the tokens of the requests that run."""

    def __init__(self) -> None:
        self._step: dict[int, torch.Tensor] = {}
        """[P, K] of each layer of the step that runs."""
        self._experts: dict[str, list[np.ndarray]] = {}
        """[tokens of a step, D, K] of each request and of each step that read some of it."""

    def watch(self, runner: CPUModelRunner) -> None:
        """Writes down every step of the model from now on."""
        for module in runner.model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._step.__setitem__, module.layer_id))
        runner.model.register_forward_hook(partial(self._end_step, runner), with_kwargs=True)

    def _end_step(
        self,
        runner: CPUModelRunner,
        _model: torch.nn.Module,
        _inputs: tuple[Any, ...],
        options: dict[str, Any],
        _output: Any,
    ) -> None:
        experts_PDK = torch.stack([self._step[layer] for layer in sorted(self._step)], dim=1)
        experts_PDK = experts_PDK.to(torch.int16).numpy()
        position_P = options["positions"].tolist()
        ends = runner.query_start_loc.np
        for number, request_id in enumerate(runner.input_batch.req_ids):
            start, end = int(ends[number]), int(ends[number + 1])
            if position_P[start] == 0:  # new, or read again, with newer weights
                self._experts[request_id] = []
            self._experts[request_id].append(experts_PDK[start:end])

    def build_connector_meta(
        self, _scheduled: SchedulerOutput, _requests: dict[str, Request]
    ) -> None:
        """Nothing: the worker needs no word of the scheduler."""

    def take_output(self, request: Request, _output: ModelRunnerOutput | None) -> Any:
        """The experts of a finished request; None while it runs.

        RuntimeError where some were not seen: of a prompt that a cache held, say.
        """
        if not request.is_finished():
            return None
        experts_LDK = np.concatenate(self._experts[request.request_id])
        if len(experts_LDK) != request.num_tokens - 1:
            raise RuntimeError(
                f"routing of {len(experts_LDK)} tokens was seen in a request that read "
                f"{request.num_tokens - 1}"
            )
        return experts_LDK

    def request_finished(self, request: Request) -> None:
        """Forgets the request."""
        self._experts.pop(request.request_id, None)

    def reset(self) -> None:
        """Keeps everything: requests that run are read again, and written down again."""


_record = Record()


class RecordingWorker(CPUWorker):
    """Watches its model."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """As before."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        _record.watch(self.model_runner)


class RecordingScheduler(Scheduler):
    """Has the record where a scheduler of a GPU engine has its auxiliary outputs."""

    @property
    def aux_output_connector(self) -> Record:
        """Asked for the experts of each request that gave tokens."""
        return _record

    @aux_output_connector.setter
    def aux_output_connector(self, connector: None) -> None:
        assert connector is None
