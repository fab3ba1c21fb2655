"""A small random Qwen3-MoE, and its HF twin as the reference, for the tests of the real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import urllib.request
from pathlib import Path

import numpy as np

from r3train.cpu.torchvision_stub import declare_torchvision_ops
from r3train.engine.score import GivenText, score
from r3train.engine.sglang_http import SGLangHTTP
from r3train.types import Prompt, RouteShape, Scores

NUM_LAYERS, TOPK, NUM_EXPERTS, VOCAB, EOS = 3, 2, 8, 512, 1
ROUTES = RouteShape(num_layers=NUM_LAYERS, topk=TOPK, num_experts=NUM_EXPERTS)


def make_model(directory: Path, seed: int) -> Path:
    """Write a checkpoint of random weights, without a tokenizer: the server gets token ids."""
    declare_torchvision_ops()
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOPK,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        dtype=torch.float32,
    )
    Qwen3MoeForCausalLM(config).eval().save_pretrained(directory)
    return directory


def prompt_of(seed: int, length: int = 24) -> Prompt:
    """A random prompt of the model's vocabulary, without special tokens."""
    ids = np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)
    return Prompt(prompt_id=f"p{seed}", index=seed, text="", token_ids=ids, label=None)


def _scores(addr: str, text: GivenText) -> Scores:
    async def ask() -> Scores:
        http = SGLangHTTP([addr])
        try:
            return await score(http, 0, text, "a-probe.")
        finally:
            await http.aclose()

    return asyncio.run(ask())


def probe_log_probs(addr: str, token_ids: np.ndarray, *, adapter: str | None = None) -> np.ndarray:
    """A server's log-probs of a given text, float32[T]: entry 0 is 0.  The prefix cache is not used."""
    return _scores(addr, GivenText(np.asarray(token_ids), "of a probe", adapter=adapter)).log_probs


def cached_tokens(addr: str, token_ids: np.ndarray, *, adapter: str) -> int:
    """Tokens of a text that a server had cached; all of it is cached afterwards."""
    last, ids = len(token_ids) - 1, np.asarray(token_ids)
    text = GivenText(ids, "of a probe", log_probs_from=last, adapter=adapter, new_tokens=1)
    return _scores(addr, text).cached_tokens


def wait_until_running(addr: str, count: int, then_s: float = 0.3) -> None:
    """Wait until so many requests are being decoded, and a moment more for some tokens of each."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"http://{addr}/v1/loads?include=core", timeout=10) as answer:
            (load,) = json.load(answer)["loads"]
        if load["num_running_reqs"] >= count:
            return time.sleep(then_s)
        assert time.monotonic() < deadline, load
        time.sleep(0.02)


def checkpoint_tensors(directory: Path) -> dict:
    """The tensors of a checkpoint under their names on disk (one per expert)."""
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


class Reference:
    """HF's log-probs and routes of a text, in float32."""

    def __init__(self, directory: Path) -> None:
        declare_torchvision_ops()
        import torch
        from transformers import Qwen3MoeForCausalLM

        self._torch = torch
        self._model = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def __call__(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float32[T] log-probs (entry 0 is 0) and int64[T-1, L, K] routes."""
        torch = self._torch
        with torch.no_grad():
            tokens = torch.as_tensor(np.asarray(token_ids), dtype=torch.int64)
            out = self._model(tokens[None], output_router_logits=True)
            log_probs = torch.log_softmax(out.logits[0].float(), -1)
            scored = log_probs[:-1].gather(1, tokens[1:, None])[:, 0]
            routes = [torch.topk(layer.float(), TOPK, -1).indices for layer in out.router_logits]
        values = np.concatenate([[0.0], scored.numpy()]).astype(np.float32)
        return values, torch.stack(routes, 1).numpy()[:-1]


class MixedReference:
    """HF's log-probs and routes of a text whose tokens several weight versions generated.

    Version v has the weights of ``directories[v % len]``.
    """

    def __init__(self, directories: list[Path]) -> None:
        self._references = [Reference(path) for path in directories]

    def __call__(
        self, token_ids: np.ndarray, prompt_len: int, versions: np.ndarray, *, keep_kv: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """versions: int[R] of the response tokens.  As ``Reference``: float32[T], int64[T-1, L, K].

        A token of version v was predicted by the forward of the token before it under v's weights.
        ``keep_kv`` builds on the keys and values of older weights; else each version computes all
        that stands before it anew.
        """
        import torch

        # weights of each row's forward: those of the token that it predicted
        of_row = np.concatenate([np.full(prompt_len - 1, versions[0]), versions])
        edges = [0, *(np.flatnonzero(np.diff(of_row)) + 1).tolist(), len(of_row)]
        log_probs, routes, cache = [np.zeros(1, np.float32)], [], None
        tokens = torch.as_tensor(np.asarray(token_ids), dtype=torch.int64)
        for first, last in zip(edges[:-1], edges[1:], strict=True):
            model = self._references[of_row[first] % len(self._references)]._model
            with torch.no_grad():
                start = first if keep_kv else 0
                out = model(
                    tokens[None, start:last],
                    past_key_values=cache if keep_kv else None,
                    use_cache=keep_kv,
                    output_router_logits=True,
                )
            cache = out.past_key_values if keep_kv else None
            scores = torch.log_softmax(out.logits[0].float(), -1)[first - start :]
            scored = scores.gather(1, tokens[first + 1 : last + 1, None])[:, 0]
            log_probs.append(scored.numpy())
            chosen = [torch.topk(r.float(), TOPK, -1).indices for r in out.router_logits]
            routes.append(torch.stack(chosen, 1).numpy()[first - start :])
        return np.concatenate(log_probs), np.concatenate(routes)


def shared_memory_of(processes: list) -> set[str]:
    """SGLang's files in /dev/shm that these processes hold open."""
    found = set()
    for process in processes:
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(path)
                if target.startswith("/dev/shm/sglang"):
                    found.add(target)
    return found
