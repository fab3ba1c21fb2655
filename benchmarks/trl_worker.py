"""TRL's GRPO trainer on the tiny task, timed step by step.  Runs in .venv-trl, not in .venv.

Started by ``benchmarks.against_trl``; TRL and r3train share no environment, so this file imports
nothing of r3train.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "prompts", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("prompts-a-step", "group", "response", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    arguments = parser.parse_args()
    arguments.output.write_text(json.dumps(train(arguments)), encoding="utf-8")


def train(a: argparse.Namespace) -> dict:
    """Train ``steps`` steps; the times at which they ended, and the mean length of responses."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(a.threads)
    lines = [json.loads(line) for line in a.prompts.read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list([{"prompt": x["input"], "words": x["label"]} for x in lines])

    def accepted_words(completions: list[str], words: list[list[str]], **_: object) -> list[float]:
        return [
            sum(word in accepted for word in text.split()) / a.response
            for text, accepted in zip(completions, words)
        ]

    ends: list[float] = []
    seen: list[dict] = []
    generating: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

        def on_log(self, _args, _state, _control, logs: dict | None = None, **__: object) -> None:
            seen.append(logs or {})

    settings = trl.GRPOConfig(
        output_dir=str(a.output.parent / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=a.prompts_a_step * a.group,
        num_generations=a.group,
        max_completion_length=a.response,
        generation_kwargs={"min_new_tokens": a.response},
        max_steps=a.steps,
        learning_rate=a.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    generate = model.generate

    def timed_generate(*given: object, **named: object) -> object:
        began = time.perf_counter()
        result = generate(*given, **named)
        generating.append(time.perf_counter() - began)
        return result

    model.generate = timed_generate
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=accepted_words,
        args=settings,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(a.model),
        callbacks=[Clock()],
    )
    trainer.train()
    lengths = [x["completions/mean_length"] for x in seen if "completions/mean_length" in x]
    return {
        "trl": trl.__version__,
        "step_ends": ends,
        "generate_s": generating,
        "mean_length": sum(lengths) / len(lengths),
    }


if __name__ == "__main__":
    main()
