"""The command line: flags made from the sections."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import pytest
from click.testing import CliRunner

from r3train.config import RunConfig
from r3train.config.help_text import PASSTHROUGH_HELP
from r3train.config.options import train_options, usage_errors
from r3train.config.peers import ANSWERS, FRAMEWORKS, PEERS
from r3train.config.sources import flag_name, places
from r3train.trainer.megatron.overrides import override_conflicts
from tests.unit.config.test_config import config

REQUIRED = (
    "--hf-checkpoint m --prompt-data p.jsonl --num-rollout 2 --rollout-batch-size 4"
    " --rollout-max-response-len 8"
).split()


def run(*args: str, required: bool = True, **environ: str):
    seen = []

    @train_options
    def train(config: RunConfig) -> None:
        """Train."""
        seen.append(config)

    words = [*(REQUIRED if required else []), *args]
    result = CliRunner(env={"R3_MISMATCH_THRESHOLD": None, **environ}).invoke(train, words)
    return result, (seen[0] if seen else None)


def parsed(*args: str, **environ: str) -> RunConfig:
    result, config = run(*args, **environ)
    assert result.exit_code == 0, result.output
    return config


def refused(*args: str, required: bool = True, **environ: str) -> str:
    result, config = run(*args, required=required, **environ)
    assert result.exit_code == 2 and config is None
    assert "Traceback" not in result.output
    return result.output


def test_help_shows_every_field_under_its_section():
    result, _ = run("--help-all", required=False)
    assert result.exit_code == 0
    position = -1
    for section in RunConfig.model_fields:
        heading = result.output.index(f"[{section}] in the file:")
        assert heading > position
        position = heading
    for place in places(RunConfig).values():
        if place.name not in PASSTHROUGH_HELP:
            assert place.flag in result.output or f"--[no-]{place.flag[2:]}" in result.output
    for usage, _ in PASSTHROUGH_HELP.values():
        assert usage in result.output


# values of fields that take no other text
PATTERNED = {
    "agent": "m:f",
    "agent_base_url": "http://h",
    "agent_other_base_url": "http://h/v1",
    "custom_rm_path": "m:f",
    "target_modules": "q_proj",
    "rm_url": "http://h",
    "judge_url": "http://h/v1",
    "judge_template": "{response}",
    "judge_pattern": "(1)",
    "apply_chat_template_kwargs": '{"a": 1}',
}


def test_every_field_is_a_flag():
    for place in places(RunConfig).values():
        if place.name in PASSTHROUGH_HELP:
            continue
        words = [place.flag]
        kind = str(place.info.annotation)
        if "bool" not in kind:
            choice = kind.partition("Literal['")[2].partition("'")[0]
            words.append(choice or PATTERNED.get(place.name, "1"))
            if place.name == "eval_prompt_data":
                words += ["data.jsonl"]
            if place.name == "rollout_max_context_len":
                words[-1] = "2"
            if place.name == "virtual_pipeline_model_parallel_size":
                words[-1] = "2"
            if place.name in ("eps_clip", "adam_beta1", "adam_beta2"):
                words[-1] = "0.5"
        config = parsed(*words)
        value = getattr(getattr(config, place.section), place.name)
        assert value not in (None, False, []), place.name


def test_flags_take_typed_values():
    config = parsed("--lr", "3e-3", "--rollout-top-k", "-1", "--save", "ck", "--optimizer", "sgd")
    assert config.trainer.lr == 3e-3
    assert config.rollout.rollout_top_k == -1
    assert str(config.checkpoint.save) == "ck"
    assert config.trainer.optimizer == "sgd"


def test_underscores_in_a_flag_are_dashes():
    config = parsed("--num_rollout", "7", "--rm_type=boxed_math")
    assert config.rollout.num_rollout == 7 and config.data.rm_type == "boxed_math"
    assert parsed("--sglang-tp_size", "2").rollout.sglang == {"tp_size": 2}


def test_a_further_name_of_a_setting_is_a_flag_too():
    assert parsed("--r3-audit-share", "0.5").replay.r3_recheck_share == 0.5
    assert parsed("--use-tensorboard").run.tensorboard
    assert not parsed("--tensorboard", "--no-use-tensorboard").run.tensorboard


def test_booleans_have_an_on_and_an_off_flag(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("[run]\nplot = false\n[trainer]\nci_test = true\n")
    config = parsed("--config", str(path), "--plot", "--no-ci-test", "--bf16")
    assert config.run.plot and config.model.bf16 and not config.trainer.ci_test
    config = parsed("--config", str(path))
    assert not config.run.plot and config.trainer.ci_test


@pytest.mark.parametrize(
    "words",
    [
        "--recompute-modules moe core_attn mla",
        "--recompute-modules moe,core_attn,mla",
        "--recompute-modules moe --recompute-modules core_attn,mla",
        "--recompute-modules=moe,core_attn,mla --bf16",
    ],
)
def test_lists_are_repeated_or_separated_by_spaces_or_commas(words):
    assert parsed(*words.split()).model.recompute_modules == ("moe", "core_attn", "mla")


def test_prompt_data_takes_several_files_and_its_last_mention_counts():
    words = "--prompt-data x.jsonl --prompt-data a,b.jsonl*1 c@[0:5]*0.5 --bf16"
    assert parsed(*words.split()).data.prompt_data == ("a,b.jsonl*1", "c@[0:5]*0.5")


def test_none_unsets_what_the_file_sets(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[checkpoint]\nsave = "ck"\n[trainer]\nglobal_batch_size = 4\n')
    config = parsed("--config", str(path), "--save", "none", "--global-batch-size", "none")
    assert config.checkpoint.save is None and config.trainer.global_batch_size is None


def test_server_flags_pass_through_with_and_without_values():
    config = parsed(
        *"--sglang-mem-fraction-static 0.3 --sglang-sleep-on-idle --bf16".split(),
        *"--sglang-chunked-prefill-size -1 --sglang-attention-backend=torch_native".split(),
        *"--sglang-cuda-graph-bs 1 2 4 --lr 1".split(),
    )
    assert config.rollout.sglang == {
        "mem_fraction_static": 0.3,
        "sleep_on_idle": True,
        "chunked_prefill_size": -1,
        "attention_backend": "torch_native",
        "cuda_graph_bs": [1, 2, 4],
    }
    assert config.model.bf16 and config.trainer.lr == 1


def test_requests_in_flight_are_counted_a_server_or_in_all():
    external = ("--rollout-external-engine-addrs", "a:1", "b:2", "c:3")
    for words, expected in (
        ((), 64),
        (("--rollout-num-engines", "2"), 128),
        (("--sglang-server-concurrency", "16", "--rollout-num-engines", "2"), 32),
        (("--sglang-server-concurrency=16", *external), 48),
        (("--rollout-max-concurrency", "5", *external), 5),
    ):
        rollout = parsed(*words).rollout
        assert rollout.max_concurrency == expected and not rollout.sglang


def test_optimizer_overrides_take_names_and_typed_values():
    config = parsed(
        *"--optimizer-override optimizer_cpu_offload=true optimizer_offload_fraction=0.5".split(),
        *"--optimizer-override main_grads_dtype=bf16".split(),
    )
    assert config.trainer.optimizer_overrides == {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "main_grads_dtype": "bf16",
    }


def test_transformer_overrides_take_names_and_typed_values():
    config = parsed(
        *"--transformer-override moe_z_loss_coeff=1e-3 moe_layer_freq=[0,1]".split(),
        *"--transformer-override moe_router_dtype=fp32 --transformer-override a=True".split(),
    )
    assert config.model.transformer_overrides == {
        "moe_z_loss_coeff": 1e-3,
        "moe_layer_freq": [0, 1],
        "moe_router_dtype": "fp32",
        "a": True,
    }


@pytest.mark.parametrize(
    "name, here", [pair for names in FRAMEWORKS.values() for pair in names.items()]
)
def test_a_setting_of_another_framework_is_answered_with_its_name_here(name, here):
    known = places(RunConfig)
    fields = re.findall(r"\w+_\w+", here.replace("WANDB_API_KEY", ""))
    assert all(word in known or word.startswith("sglang_") for word in fields)
    if "." not in name:
        assert name not in known
        assert f"Here it is {here}." in " ".join(refused(flag_name(name)).split())
    else:
        answer = f": {flag_name(here)} 3" if here in known else f"Here it is {here}."
        assert answer in " ".join(refused(f"{name}=3").split())


def test_a_name_without_its_tables_is_ours_first_and_theirs_if_it_has_one_meaning():
    assert ": --tensor-model-parallel-size 3" in refused("a.tensor_model_parallel_size=3")
    assert "Here it is" not in refused("a.path=3")  # a model's, or a reward function's
    assert "Here it is prompt_data" in refused("--train-files")


SLIME = """
--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --disable-bias-linear --qk-layernorm
--group-query-attention --num-attention-heads 32 --num-query-groups 4 --kv-channels 128 --num-layers 48
--hidden-size 2048 --ffn-hidden-size 6144 --normalization RMSNorm --position-embedding-type rope
--norm-epsilon 1e-6 --rotary-percent 1.0 --swiglu --untie-embeddings-and-output-weights
--vocab-size 151936 --rotary-base 1000000 --moe-ffn-hidden-size 768 --moe-router-score-function softmax
--moe-token-dispatcher-type alltoall --moe-router-topk 8 --moe-layer-freq [1]*48 --num-experts 128
--moe-grouped-gemm --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-permute-fusion
--moe-aux-loss-coeff 0 --ref-load m_dist --apply-chat-template --rollout-shuffle --rm-type deepscaler
--n-samples-per-prompt 4 --balance-data --optimizer adam --optimizer-cpu-offload
--overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer --use-kl-loss --kl-loss-coef 0.00
--kl-loss-type low_var_kl --eps-clip-high 0.28 --use-tis --tis-level geometric --use-wandb
--wandb-group g --wandb-run-id x --wandb-key k --sequence-parallel --use-dynamic-batch-size
--eval-prompt-data aime a.jsonl --rollout-num-gpus-per-engine 8 --sglang-cuda-graph-bs 1 2 4 8
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
--attention-softmax-in-fp32 --attention-backend flash
"""


def test_all_flags_of_a_script_of_slime_are_answered_at_once_with_its_wrong_values():
    words, said = SLIME.split(), refused(*SLIME.split())
    lines = [line.removeprefix("Error: ") for line in said.splitlines() if "No such option" in line]
    assert "Did you mean" not in said and "without a flag" not in said
    unknown = [flag for line in lines for flag in re.findall(r"'(--[\w-]+)'", line)]
    known = {f"--{name.replace('_', '-')}" for name in places(RunConfig)}
    flags = [word for word in words if word.startswith("--") and not word.startswith("--sglang")]
    assert sorted(unknown) == sorted(set(flags) - known) and len(unknown) == 42
    assert all(re.search(r"'\. [HIL]\w+ .*\.$", line) for line in lines), lines
    of_checkpoint = next(line for line in lines if "'--qk-layernorm'" in line)
    assert "'--norm-epsilon'" in of_checkpoint and "config.json (--hf-checkpoint)" in of_checkpoint
    assert "--transformer-override moe_router_dtype=VALUE" in said
    assert "--optimizer-override optimizer_cpu_offload=VALUE" in said
    assert "'--kl-loss-type': 'low_var_kl' is not one of k1, k2, k3, k3+. Here it is k3." in said


def test_every_field_of_megatron_is_answered_as_an_override_of_it_is():
    from r3train.cpu.device import prepare_device

    prepare_device()
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    records = {"transformer": TransformerConfig, "optimizer": OptimizerConfig}
    names = {kind: {field.name for field in dataclasses.fields(records[kind])} for kind in records}
    for kind, fields in names.items():
        for name in fields - set(places(RunConfig)) - set(PEERS):
            if name.startswith("_") or all(name in each for each in names.values()):
                continue
            said = override_conflicts(config(**{f"{kind}_overrides": {name: "fp32"}}))
            refusals = [line for line in said if "cannot be set" in line]
            is_override = f"--{kind}-override {name}=VALUE" in ANSWERS[name]
            assert is_override == (not refusals), (name, refusals)


@pytest.mark.parametrize(
    "words, absent",
    [
        ("--norm-epsilonn 1", "plot"),
        ("--vocab 1", "world-size"),
        ("--kv-chan 1", "canaries"),
        ("--total-stops 9", "route-stores"),
        ("--zzz 1 --yyy", "Did you mean"),
    ],
)
def test_a_name_that_is_unlike_all_gets_no_hint(words, absent):
    assert absent not in refused(*words.split()).partition("Error")[2]


def test_unknown_flags_are_found_behind_values_that_look_like_flags():
    said = refused(
        "--judge-template",
        "--lr-x {response}",
        "--rollout-stop",
        "-x",
        "--foo",
        "-bar",
        "--hf-chekpoint",
        "m",
    )
    assert "'--foo'" in said and "Did you mean '--hf-checkpoint'?" in said
    assert "--lr-x" not in said and "two dashes" not in said


@pytest.mark.parametrize(
    "text, answers",
    [
        (
            "max_steps = 5\nseq_len = 8",
            ["max_steps. Here it is num_rollout", "rollout_max_context_len"],
        ),
        ("[model]\nname = 'm'", ["unknown key model.name. Here it is hf_checkpoint."]),
        (
            "[orchestrator]\nbatch_size = 5\nmax_off_policy_steps = 1\n[orchestrator.sampling]\nmax_tokens = 9",
            [
                "unknown key orchestrator.batch_size. Here it is rollout_batch_size, which",
                "unknown key orchestrator.max_off_policy_steps. Here it is max_weight_staleness.",
                "unknown key orchestrator.sampling.max_tokens. Here it is rollout_max_response_len.",
            ],
        ),
        ("[trainer.optim]\nlr = 1e-6", ["unknown key trainer.optim.lr. Here it is lr."]),
        (
            "[actor_rollout_ref.rollout]\nn = 8",
            ["actor_rollout_ref.rollout.n. Here it is n_samples_per_pro"],
        ),
        ("[trainer]\nmax_grad_norm = 1", ["unknown key max_grad_norm. Here it is clip_grad."]),
        ("[model]\nnum_layers_x = 1", ["unknown key num_layers_x."]),
    ],
)
def test_keys_of_other_frameworks_files_are_answered_each_by_its_tables(text, answers, tmp_path):
    (tmp_path / "c.toml").write_text(text)
    said = " ".join(refused("--config", str(tmp_path / "c.toml")).split())
    assert all(answer in said for answer in answers), said


def test_missing_required_fields_are_all_named():
    output = refused(required=False)
    for flag in REQUIRED[::2]:
        assert f"{flag} is required" in output


def test_the_environment_gives_the_threshold():
    assert parsed(R3_MISMATCH_THRESHOLD="0.25").replay.r3_mismatch_threshold == 0.25
    assert "R3_MISMATCH_THRESHOLD" in refused(R3_MISMATCH_THRESHOLD="x")


@pytest.mark.parametrize("usage, exit_code", [(False, 1), (True, 2)])
def test_an_error_of_the_command_is_one_of_usage_only_inside_usage_errors(usage, exit_code):
    @train_options
    def train(config: RunConfig) -> None:
        with usage_errors() if usage else contextlib.nullcontext():
            raise ValueError("world size 3 does not divide")

    result = CliRunner().invoke(train, REQUIRED)
    assert result.exit_code == exit_code and usage == ("does not divide" in result.output)
