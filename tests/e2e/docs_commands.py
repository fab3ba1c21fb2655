"""The commands of the README and of docs/, as they stand there, and what a test may do with each."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.e2e.jobs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = r"(?:make|torchrun|r3train|python3?|pip|sbatch|bash|sinfo|docker)"
_COMMAND = re.compile(rf"^(?:\w+=\S* )*(?:\.venv/bin/)?{PROGRAMS} \S")


class Kind(Enum):
    """The way in which the tests run a command of the pages."""

    RUN = "run as it is"
    JOB = "run with two rollouts and a server that is there: pages need what it leaves"
    DRY = "run with --dry-run, without torchrun; with two rollouts in the slow tests"
    PLAN = "run with --dry-run on a checkpoint of the model's shape without weights: it needs GPUs"
    NODES = "likewise in the slow tests, by as many torchruns here as it names nodes"
    LONG = "run as it is, in a copy of the checkout, by make test-long"
    RESOLVED = "resolved by pip there, without what is compiled against CUDA; nothing is installed"
    SERVE = "run in the slow tests until it answers, then ended"
    ELSEWHERE = "not run here"


@dataclass(frozen=True)
class Rule:
    """Commands that ``pattern`` matches; for ELSEWHERE why, and the test that covers them."""

    pattern: str
    kind: Kind
    why: str = ""
    covered_by: str = ""  # path::test


# the first rule that matches counts
RULES = (
    Rule(
        r"make demo ",
        Kind.ELSEWHERE,
        "has a test of what it promises",
        "tests/e2e/test_demo_learns.py::test_make_demo_learns_with_r3_exact_at_every_step",
    ),
    Rule(
        r"make test(-all)? ",
        Kind.ELSEWHERE,
        "is what runs these tests",
        "tests/e2e/test_docs_commands.py::test_ci_runs_the_test_command",
    ),
    Rule(
        r"make gpu-smoke ",
        Kind.ELSEWHERE,
        "needs GPUs",
        "tests/unit/benchmarks/test_gpu_smoke.py::test_a_step_is_a_command_that_is_there",
    ),
    Rule(
        r"make lent ",
        Kind.ELSEWHERE,
        "fetches wheels for another machine",
        "tests/rehearsal/test_lent_machine.py::test_every_call_names_a_part_and_the_half_hour_holds_them",
    ),
    Rule(
        r"git clone .*sgl-project/sglang|python sglang/benchmark/|.*tuned/configs|export SGLANG_MOE_CONFIG_DIR=",
        Kind.ELSEWHERE,
        "tune kernels on a GPU",
        "tests/unit/doctor/test_tuned_experts.py::test_a_folder_of_the_users_own_counts_in_place_of_sglangs",
    ),
    Rule(
        r"docker |pip install .*-c requirements/gpu\.txt|packages=|export (CPATH|CUDNN_HOME)=",
        Kind.ELSEWHERE,
        "needs Docker and CUDA's compiler",
        "tests/contract/test_lock_files.py::test_the_image_is_sglangs_of_the_pinned_release_and_copies_what_is_there",
    ),
    Rule(
        r"sed .*requirements/gpu\.txt > gpu_b\.txt",
        Kind.ELSEWHERE,
        "writes a file into the checkout",
        "tests/contract/test_lock_files.py::test_plan_b_is_the_lock_with_another_transformer_engine",
    ),
    Rule(r"make ", Kind.LONG),
    Rule(
        r"r3train (make-tiny-model|train) .*runs/tools-|.*r3train train .*tools/laptop\.toml",
        Kind.ELSEWHERE,
        "have a test of the whole way",
        "tests/e2e/test_tools_laptop.py::test_the_laptops_model_calls_the_tool_and_boxes_what_it_has_read",
    ),
    Rule(
        r"r3train train .*tiny_sft",
        Kind.ELSEWHERE,
        "has a test with a checkpoint and conversations of its own",
        "tests/e2e/test_sft.py::test_a_model_learns_its_conversations_and_is_exported_as_ever",
    ),
    Rule(r"pip install (--no-build-isolation (-e )?'\.\[gpu\]'|torch==)", Kind.RESOLVED),
    Rule(r"torchrun --nnodes .*qwen3_30b_a3b", Kind.NODES),
    Rule(
        r"python examples/gsm8k/(generate|prepare\.py --train data/gsm8k-made)"
        r"|r3train make-tiny-model --output runs/gsm8k-tiny |.*r3train train .*gsm8k/laptop\.toml",
        Kind.ELSEWHERE,
        "have a test of the whole way",
        "tests/e2e/test_gsm8k_laptop.py::test_the_laptops_commands_train_with_r3_proved_and_evaluate",
    ),
    Rule(
        r"r3train make-tiny-model --output runs/agents-tiny |python examples/agents/prepare"
        r"|PYTHONPATH=examples/agents r3train train .*--agent with_openai",
        Kind.ELSEWHERE,
        "have a test of the whole way",
        "tests/e2e/test_agents_learn.py::test_the_agent_of_the_page_learns_through_updates_retractions_and_a_killed_server",
    ),
    Rule(
        r"python -m venv \.venv-agents|\.venv-agents/bin/pip |PYTHONPATH=examples/agents r3train .*--agent-command",
        Kind.ELSEWHERE,
        "fetch harnesses",
        "tests/e2e/test_agent_harnesses.py"
        "::test_a_job_trains_an_unmodified_harness_with_every_verdict_passed",
    ),
    Rule(
        r"python examples/gsm8k/prepare",
        Kind.ELSEWHERE,
        "needs the data set",
        "tests/unit/data/test_gsm8k_example.py::test_the_prepared_files_are_read_and_scored_as_the_recipe_says",
    ),
    Rule(
        r"hf download |python examples/math/prepare",
        Kind.ELSEWHERE,
        "needs the data sets",
        "tests/unit/data/test_math_example.py::test_the_prepared_files_are_those_that_the_recipes_read",
    ),
    Rule(
        r"r3train train .*olmoe_1b_7b_one_node",
        Kind.ELSEWHERE,
        "needs GPUs",
        "tests/contract/test_recipes.py::test_a_recipe_leaves_room_on_the_gpus_of_its_head",
    ),
    Rule(r"r3train (train|serve) .*qwen3_30b_a3b", Kind.PLAN),
    Rule(
        r"r3train train --config tiny_cpu --nnodes 2 ",
        Kind.ELSEWHERE,
        "needs two terminals",
        "tests/e2e/test_two_machines.py::test_two_machines_train_together_and_machine_0_speaks",
    ),
    Rule(
        r".*sbatch .*train_multi_node",
        Kind.ELSEWHERE,
        "needs sixteen nodes",
        "tests/unit/launch/test_slurm_scripts.py::test_16_nodes_are_12_of_torchrun_and_4_of_servers",
    ),
    Rule(
        r"sbatch .*train_single_node",
        Kind.ELSEWHERE,
        "needs Slurm, which .ci/run has",
        "tests/e2e/test_slurm.py::test_a_job_that_is_told_to_stop_saves_goes_back_and_resumes",
    ),
    Rule(
        r"CONTAINER=\S+ .*sbatch ",
        Kind.ELSEWHERE,
        "needs a container",
        "tests/unit/launch/test_slurm_scripts.py::test_a_container_holds_every_step_and_sees_its_directories",
    ),
    Rule(
        r"sbatch .*r3_regression|bash slurm/local_cluster|SLURM_CONF=\S+ sinfo",
        Kind.ELSEWHERE,
        "needs Slurm, which .ci/run has",
        "tests/e2e/test_slurm.py::test_the_regression_job_passes_and_its_exit_code_says_so",
    ),
    Rule(
        r"python -m sglang\.launch_server |r3train train .*--opd-teacher-url ",
        Kind.ELSEWHERE,
        "needs a teacher of the user's",
        "tests/e2e/test_distillation.py"
        "::test_the_actor_comes_nearer_to_a_served_teacher_and_a_replay_trains_the_same",
    ),
    Rule(
        r"OMP_NUM_THREADS=1 python -m benchmarks\.agent_harnesses ",
        Kind.ELSEWHERE,
        "fetches harnesses",
        "tests/unit/benchmarks/test_agent_harnesses.py"
        "::test_a_row_says_whether_a_harness_ran_its_calls_and_what_was_refused",
    ),
    Rule(r"r3train verify |python -m tests\.oracle\.verify_planted ", Kind.LONG),
    Rule(
        r"python benchmarks/house\.py --t(ree|race) ",
        Kind.ELSEWHERE,
        "reads another checkout, or what a traced job has left",
        "tests/unit/benchmarks/test_house.py::test_of_what_ran_the_lines_of_code_are_counted_once",
    ),
    Rule(r"(OMP_NUM_THREADS=1 )?(\.venv/bin/)?python (-m benchmarks\.|benchmarks/)", Kind.LONG),
    Rule(r"r3train serve ", Kind.SERVE),
    Rule(
        r"r3train eval ",
        Kind.ELSEWHERE,
        "needs a checkpoint that a run has exported",
        "tests/e2e/test_durability.py"
        "::test_a_synchronous_greedy_run_that_is_killed_resumes_exactly_with_the_server",
    ),
    Rule(
        r"r3train convert ",
        Kind.ELSEWHERE,
        "needs a checkpoint of a run",
        "tests/e2e/test_sft.py::test_a_short_job_has_transformers_loss_and_its_checkpoint_converts_to_its_export",
    ),
    Rule(r"r3train train .*--dry-run |r3train train --help", Kind.RUN),
    Rule(r"r3train train .*--run-dir ", Kind.JOB),
    Rule(r"(\w+=\S* )*(r3train train |torchrun .*train_async\.py )", Kind.DRY),
    Rule(
        r"(MASTER_PORT=\d+ )?r3train (make-tiny-model|explain|docs|doctor|estimate|check-evidence|report) ",
        Kind.RUN,
    ),
)


def rule_of(command: str) -> Rule:
    """The rule that a command falls under.  Raises ValueError where there is none."""
    for rule in RULES:
        if re.match(rule.pattern, command + " "):
            return rule
    raise ValueError(f"no rule says what to do with the command: {command}")


def commands(page: str) -> list[str]:
    """All commands of a page's code blocks, whitespace and comments taken out.

    A block marked sh holds nothing else.  In a block without a mark, and in an indented one, lines
    that begin with a known program are commands.
    """
    found = []
    for mark, lines in _blocks(page):
        joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
        for line in joined.splitlines():
            words = " ".join(shlex.quote(w) if _odd(w) else w for w in _words(line))
            if words and (mark == "sh" or (mark == "" and _COMMAND.match(words))):
                found.append(words)
    return found


def _blocks(page: str) -> list[tuple[str, list[str]]]:
    """(mark, lines) of every fenced block, and of every indented one under the mark ""."""
    blocks: list[tuple[str, list[str]]] = []
    fenced, indented = False, False
    for line in page.splitlines():
        if line.startswith("```"):
            fenced, indented = not fenced, False
            if fenced:
                blocks.append((line.strip("` "), []))
        elif fenced:
            blocks[-1][1].append(line)
        elif line.startswith("    "):
            if not indented:
                blocks.append(("", []))
            indented = True
            blocks[-1][1].append(line.strip())
        else:
            indented = False
    return blocks


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # text with an apostrophe
        return []


def _odd(word: str) -> bool:
    return "[" in word or " " in word


def spans(page: str) -> list[str]:
    """All code in backticks within the text, but for whole blocks."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", text)


def is_a_test(covered_by: str) -> bool:
    path, _, name = covered_by.partition("::")
    file = Path(ROOT / path)
    return file.is_file() and f"def {name}(" in file.read_text(encoding="utf-8")
