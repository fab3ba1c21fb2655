"""Disagreement of actor and engine about the same tokens, without R3 and with it.

    python -m benchmarks.agreement [--seeds 3] [--write-docs]
    python -m benchmarks.agreement --ranks 8 --config configs/qwen3_30b_a3b.toml [any training flag]

Without --config the model is a random one, small weights and larger ones being two settings.  A seed
is a checkpoint (without --config) and a rollout from a real SGLang server in bfloat16.  The
dumped tokens then go through the actor in float32 and in bfloat16, each with its own routes and with
the replayed ones: four readings of the same tokens, nothing is trained in between.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, write_result
from benchmarks.page import RESULTS_PAGE, results_page
from benchmarks.tiny_jobs import R3, run, torchrun
from r3train.config import RunConfig
from r3train.config.options import train_options
from r3train.verify.tiny import TinyOptions, build

# deep and wide enough that bfloat16 moves some tokens to other experts in every layer
MODEL = dict(
    num_layers=8,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=32,
    topk=4,
    moe_intermediate_size=64,
)
TINY_FLAGS = """--rm-type accepted_words --rollout-batch-size 16 --n-samples-per-prompt 8
 --rollout-max-response-len 48 --rollout-ignore-eos --max-tokens-per-gpu 2048""".split()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Every other flag is one of train_async.py.",
        allow_abbrev=False,  # --seed is one of those, and no beginning of --seeds
    )
    parser.add_argument("--config", help="recipe of the model; without it a tiny random one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="of the actor")
    parser.add_argument("--server-dtype", default="bfloat16")
    parser.add_argument(
        "--initializer-range",
        type=float,
        nargs="+",
        default=[0.1, 0.2],
        help="of the tiny model's weights; each is a setting of its own",
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--write-docs", action="store_true", help="write docs/internals/results.md")
    arguments, flags = parser.parse_known_args()
    if arguments.config is not None:
        flags = ["--config", arguments.config, *flags]
    result = {
        "machine": machine(),
        "command": shlex.join(
            ["python", "-m", "benchmarks.agreement", "--seeds", str(arguments.seeds)]
            + ["--ranks", str(arguments.ranks), *flags]
        ),
        "server_dtype": arguments.server_dtype,
        "runs": [],
    }
    settings = [None] if arguments.config is not None else arguments.initializer_range
    for setting in settings:
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as scratch:
                found = one_seed(seed, setting, arguments, flags, Path(scratch))
            result["runs"].append({"initializer_range": setting, **found})
            for actor in ("float32", "bfloat16"):
                off, on = found[actor]["off"], found[actor]["on"]
                line = f"seed {seed}, actor {actor}: k3 KL {off['k3']:.3g} -> {on['k3']:.3g}"
                print(line, file=sys.stderr, flush=True)
    write_result(arguments.output, result)
    if arguments.write_docs:
        earlier = RESULTS_PAGE.read_text(encoding="utf-8")
        RESULTS_PAGE.write_text(results_page(result, earlier), encoding="utf-8")


def one_seed(
    seed: int,
    initializer_range: float | None,
    arguments: argparse.Namespace,
    flags: list[str],
    scratch: Path,
) -> dict[str, Any]:
    """Generate once and read four times; returns the worker's findings and facts of the model."""
    given = list(flags)
    if initializer_range is not None:
        options = TinyOptions(
            **MODEL, seed=seed, dtype="bfloat16", initializer_range=initializer_range
        )
        build(scratch / "tiny", options)
        given = [*TINY_FLAGS, "--hf-checkpoint", str(scratch / "tiny" / "model"), *given]
        given += ["--prompt-data", str(scratch / "tiny" / "prompts.jsonl")]
    given += [*R3, "--num-rollout", "1", "--max-weight-staleness", "0", "--rollout-seed", str(seed)]
    given += ["--run-dir", str(scratch), "--sglang-dtype", arguments.server_dtype]
    config = train_options(lambda config: config).main(given, standalone_mode=False)
    facts = generate(config, arguments.ranks, scratch)
    (scratch / "resolved.toml").write_text(config.to_toml(), encoding="utf-8")
    worker = ["-m", "benchmarks.agreement_worker", "--rollouts", str(scratch / "rollouts")]
    worker += ["--config", str(scratch / "resolved.toml"), "--output", str(scratch / "found.json")]
    run(torchrun(arguments.ranks, *worker))
    return {"seed": seed, **facts, **json.loads((scratch / "found.json").read_text())}


def generate(config: RunConfig, ranks: int, scratch: Path) -> dict[str, Any]:
    """One rollout from the servers of the configuration, dumped; facts of the model."""
    from r3train.observe.console import RunDisplay
    from r3train.launch.engines import Engines
    from r3train.launch.preflight import preflight
    from r3train.launch.build_routes import build_routes
    from r3train.loop.replay_source import dump_rollout

    job = preflight(config, ranks)
    engines = Engines(
        job, scratch, RunDisplay(1, enabled=False), 0, build_routes(job.config, job.hf)
    )
    try:
        engines.start_server()
        engines.wait_ready()
        groups = engines.start_producer().next_batch(0)
    finally:
        engines.close()
    dump_rollout(scratch / "rollouts", 0, groups)
    return {
        "layers": len(job.hf.moe_layer_numbers),
        "experts": job.hf.num_experts,
        "topk": job.hf.num_experts_per_tok,
        "hidden": job.hf.hidden_size,
        "samples": sum(len(group) for group in groups),
    }


if __name__ == "__main__":
    main()
