"""Rank 0's side of the rollout, built from a checked job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from r3train.data.order import PromptOrder
from r3train.evidence.console import RunDisplay
from r3train.launch.job import Job
from r3train.rewards.registry import Reward
from r3train.rollout.backend import SamplingParams
from r3train.rollout.engine_control import EngineControl
from r3train.rollout.producer import Producer
from r3train.rollout.sglang_answer import ExpectedRoutes
from r3train.rollout.sglang_client import SGLangClient
from r3train.rollout.sglang_server import SGLangServer
from r3train.types import RolloutSample
from r3train.weights.publish import DistributedPublisher, WeightPublisher
from r3train.weights.publish_disk import DiskPublisher


class Engines:
    """Rank 0's side of the rollout: servers (ours or others'), control, producer, publisher."""

    def __init__(self, job: Job, run_dir: Path, display: RunDisplay, start_rollout: int):
        self.job = job
        self._start_rollout = start_rollout
        config = job.config
        self._routes = None
        if config.replay.use_rollout_routing_replay:
            self._routes = ExpectedRoutes(
                job.hf.num_hidden_layers, job.hf.num_experts_per_tok, job.hf.num_experts
            )
        self._server: SGLangServer | None = None
        self._producer: Producer | None = None
        self._control: EngineControl | None = None
        self._publisher: WeightPublisher | None = None
        self._run_dir = run_dir
        self._display = display
        self._addrs = list(config.rollout.rollout_external_engine_addrs)

    def start_server(self) -> None:
        """Launch SGLang and return at once; ``wait_ready`` waits for it."""
        config = self.job.config
        if self._addrs:
            return
        self._server = SGLangServer(
            config.model.hf_checkpoint,
            self._run_dir / "logs" / "sglang.log",
            dtype="bfloat16" if config.model.bf16 else "float32",
            server_args=config.rollout.sglang,
            return_routed_experts=self._routes is not None,
            seed=config.rollout.rollout_seed,
            start_timeout_s=config.rollout.rollout_server_start_timeout_s,
        )
        self._server.start()

    def check_alive(self) -> None:
        """Raise EngineDied when the server that this job owns has ended."""
        if self._server is not None:
            self._server.check_alive()

    def wait_ready(self) -> None:
        """Wait for the servers, showing what they are doing."""
        if self._server is not None:
            with self._display.phase("starting SGLang") as phase:
                self._server.on_progress = lambda _, line: phase.detail(line)
                self._server.wait_ready()
            self._addrs = [self._server.addr]
        self._control = EngineControl(
            self._addrs,
            api_key=self._api_key,
            timeout_s=self.job.config.rollout.rollout_request_timeout_s,
            check_alive=self.check_alive,
            routes=self._routes,
        )
        if self._routes is not None:
            self._control.require_routed_experts()

    @property
    def _api_key(self) -> str | None:
        return self._server.api_key if self._server is not None else None

    @property
    def publisher(self) -> WeightPublisher:
        """The configured transport of new weights."""
        if self._publisher is None:
            assert self._control is not None, "wait_ready first"
            trainer = self.job.config.trainer
            cuda = torch.cuda.is_available()
            if trainer.update_weight_transfer_mode == "disk":
                self._publisher = DiskPublisher(
                    self._control,
                    directory=self._run_dir / "weights",
                    hf_checkpoint=self.job.config.model.hf_checkpoint,
                    bucket_bytes=trainer.update_weight_buffer_size,
                )
            else:
                self._publisher = DistributedPublisher(
                    self._control,
                    bucket_bytes=trainer.update_weight_buffer_size,
                    backend="nccl" if cuda else "gloo",
                    device="cuda" if cuda else "cpu",
                )
        return self._publisher

    def probe(self, token_ids: np.ndarray) -> list[np.ndarray]:
        """Log-probs of one text on every server."""
        assert self._control is not None
        return [
            self._control.probe_log_probs(token_ids, server=i)
            for i in range(self._control.num_servers)
        ]

    def start_producer(self) -> Producer:
        """Begin generating."""
        job, rollout = self.job, self.job.config.rollout
        order = PromptOrder(len(job.prompts), rollout.rollout_seed, job.config.data.rollout_shuffle)
        addrs, api_key = self._addrs, self._api_key

        def make_client() -> SGLangClient:
            return SGLangClient(
                addrs,
                routes=self._routes,
                api_key=api_key,
                request_timeout_s=rollout.rollout_request_timeout_s,
                max_concurrency=rollout.rollout_max_concurrency,
                check_alive=self.check_alive,
                detokenize=lambda ids: job.tokenizer.decode(ids, skip_special_tokens=True),
            )

        self._producer = Producer(
            make_client,
            lambda group: job.prompts[order.indices(group, 1)[0]],
            SamplingParams(
                max_new_tokens=rollout.rollout_max_response_len,
                temperature=rollout.rollout_temperature,
                top_p=rollout.rollout_top_p,
                top_k=rollout.rollout_top_k,
                stop_token_ids=tuple(rollout.rollout_stop_token_ids) or job.hf.eos_token_ids,
                ignore_eos=rollout.rollout_ignore_eos,
                max_context_len=rollout.rollout_max_context_len,
                seed=rollout.rollout_seed,
            ),
            rollout_batch_size=rollout.rollout_batch_size,
            n_samples_per_prompt=rollout.n_samples_per_prompt,
            num_rollout=rollout.num_rollout,
            max_weight_staleness=rollout.max_weight_staleness,
            max_concurrency=rollout.rollout_max_concurrency,
            start_step=self._start_rollout,
            score=score_function(job.reward),
            check_alive=self.check_alive,
        )
        return self._producer

    def close(self) -> None:
        """End generation, leave the update group, stop our server; nothing outlives the job."""
        for part in (self._producer, self._publisher, self._control):
            if part is not None:
                part.close()
        if self._server is not None:
            self._server.stop()
        self.job.reward.close()


def score_function(reward: Reward) -> Callable[[RolloutSample], float]:
    """A sample's reward from its own text."""

    def score(sample: RolloutSample) -> float:
        return reward(sample.prompt, sample.text, sample.token_ids[sample.prompt_len :].tolist())

    return score
