"""Speaks to one engine over HTTP: token ids in, token ids with their log-probs out."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from megatron_credit.batch.rollout import Completion
from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.errors import EngineError, log_tail

MAX_CONNECTIONS = 64
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Samples of one prompt, their seeds counting upwards from `seed`; temperature 0 is greedy."""

    prompt_ids: Sequence[int]
    num_samples: int
    temperature: float
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    seed: int


class EngineClient:
    """One engine. Every method raises EngineError, within its timeout, when the engine is dead,
    hangs or refuses, with the address, what was asked and the end of the log where it is known."""

    def __init__(
        self,
        address: str,
        *,
        request_timeout_s: float,
        log_path: Path | None = None,
        api_key: str | None = None,
    ) -> None:
        self.address = address
        self._log_path = log_path
        self._timeout_s = request_timeout_s
        self._http = httpx.Client(
            base_url=address,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(
                max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS
            ),
        )
        self._pool = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="engine-request")

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the engine serves; EngineError when it does not within the timeout, or when
        something else answers at the address."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._http.get(vllm_api.HEALTH, timeout=5.0).status_code == 200:
                    break
                problem = "answers, but is not healthy"
            except httpx.HTTPError as error:
                problem = f"does not answer ({type(error).__name__})"
            if time.monotonic() > deadline:
                raise self._error("start", f"{problem} after {timeout_s:.0f} s")
            time.sleep(POLL_S)
        self.weight_version()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """For each request its samples, in order. All requests are in flight together."""
        bodies = [vllm_api.generate_request(**asdict(request)) for request in requests]
        futures = [
            self._pool.submit(self.post, vllm_api.GENERATE, body, self._timeout_s, "generation")
            for body in bodies
        ]
        return [vllm_api.completions(future.result()) for future in futures]

    def reset_prefix_cache(self) -> None:
        """Forgets keys and values that older weights computed."""
        self.post(vllm_api.RESET_CACHE, None, self._timeout_s, "prefix cache reset")

    def weight_version(self) -> int:
        """The number of the weights in use; -1 for those that the engine loaded itself."""
        answer = self._request("GET", vllm_api.VERSION, None, self._timeout_s, "weight version")
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise self._error("weight version", f"gave no version: {str(answer)[:200]}")
        return vllm_api.version_number(answer["weight_version"])

    def post(self, path: str, body: Any, timeout_s: float, purpose: str) -> Any:
        """The JSON answer to a POST."""
        return self._request("POST", path, body, timeout_s, purpose)

    def close(self) -> None:
        """Closes the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _request(self, method: str, path: str, body: Any, timeout_s: float, purpose: str) -> Any:
        try:
            answer = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.TimeoutException:
            raise self._error(purpose, f"gave no answer within {timeout_s:.0f} s") from None
        except httpx.HTTPError as error:
            raise self._error(purpose, f"broke the connection ({error})") from None
        if answer.status_code != 200:
            raise self._error(purpose, f"answered {answer.status_code}: {answer.text[:500]}")
        try:
            return answer.json() if answer.content else None
        except ValueError:
            raise self._error(purpose, "answered something that is not JSON") from None

    def _error(self, purpose: str, problem: str) -> EngineError:
        return EngineError(
            f"{purpose}: the engine at {self.address} {problem}{log_tail(self._log_path)}"
        )
