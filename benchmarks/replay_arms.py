"""The policy gradient with and without replay, on the same tokens at the same weights.

    python -m benchmarks.replay_arms [--seeds 3] [--write-docs]

A seed is a random checkpoint in bfloat16 and one rollout of a real SGLang server.  The dumped tokens then go
through a real actor's train pass once for each arm, in float32 and in bfloat16; no optimizer step is made.
The gradient of each arm is compared with that of the policy that sampled: the server's weights and routes, in float32.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.agreement import MODEL, generate
from benchmarks.measure import flags, machine, write_result
from benchmarks.page import gradient_section, RESULTS_PAGE, with_section
from benchmarks.tiny_jobs import R3, run, torchrun
from r3train.config.options import train_options
from r3train.verify.tiny import TinyOptions, build

ANSWER = 32
TINY_FLAGS = f"""--rm-type accepted_words --rollout-batch-size 16 --n-samples-per-prompt 8
 --rollout-max-response-len {ANSWER} --rollout-ignore-eos --max-tokens-per-gpu 2048
 --num-rollout 1 --max-weight-staleness 0""".split()
# (standard deviation of the weights, the server's dtype); in float32 both sides round alike
SETTINGS = ((0.1, "bfloat16"), (0.2, "bfloat16"), (0.2, "float32"))


def main() -> None:
    arguments = flags(__doc__, seeds=3, first_seed=0, write_docs=False)
    result: dict[str, Any] = {
        "machine": machine(),
        "command": shlex.join(["python", "-m", "benchmarks.replay_arms", "--seeds"])
        + f" {arguments.seeds}",
        "answer": ANSWER,
        "runs": [],
    }
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for initializer_range, dtype in SETTINGS:
            with tempfile.TemporaryDirectory() as scratch:
                found = one_seed(seed, initializer_range, dtype, Path(scratch))
            of = {"seed": seed, "initializer_range": initializer_range, "server_dtype": dtype}
            result["runs"].append(of | found)
            for actor, arms in found["actors"].items():
                for arm, at in arms.items():
                    words = f"k3 {at['k3']:.2e} ess {at['ess']:.2f} cos {at['all'][0]:.4f} router {at['router'][0]:.4f}"
                    print(f"{of} actor {actor} {arm}: {words}", file=sys.stderr, flush=True)
            if arguments.output is not None:  # what is done is kept
                arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.write_docs:
        page = RESULTS_PAGE.read_text(encoding="utf-8")
        RESULTS_PAGE.write_text(with_section(page, gradient_section(result)), encoding="utf-8")
    write_result(arguments.output, result)


def one_seed(
    seed: int, initializer_range: float, server_dtype: str, scratch: Path
) -> dict[str, Any]:
    """Generate once, and take the gradient of every arm; returns the worker's findings."""
    options = TinyOptions(**MODEL, seed=seed, dtype="bfloat16", initializer_range=initializer_range)
    build(scratch / "tiny", options)
    given = [*TINY_FLAGS, *R3, "--hf-checkpoint", str(scratch / "tiny" / "model")]
    given += ["--prompt-data", str(scratch / "tiny" / "prompts.jsonl")]
    given += ["--rollout-seed", str(seed), "--run-dir", str(scratch)]
    given += ["--sglang-dtype", server_dtype]
    config = train_options(lambda config: config).main(given, standalone_mode=False)
    facts = generate(config, 1, scratch)
    (scratch / "resolved.toml").write_text(config.to_toml(), encoding="utf-8")
    worker = ["-m", "benchmarks.replay_arms_worker", "--rollouts", str(scratch / "rollouts")]
    worker += ["--config", str(scratch / "resolved.toml"), "--output", str(scratch / "found.json")]
    run(torchrun(1, *worker))
    return {**facts, **json.loads((scratch / "found.json").read_text())}


if __name__ == "__main__":
    main()
