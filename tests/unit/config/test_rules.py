"""Rules between settings, as a table: each row breaks one rule, and ends in one line that says so."""

from __future__ import annotations

import contextlib
import tomllib
from typing import get_args

import pytest

from r3train.config import RunConfig
from r3train.config.checkpoint_settings import rollout_path
from r3train.config.cross_checks import broken, check_static, requirements_of
from r3train.config.replay_settings import RouteBug
from r3train.config.sources import ConfigError
from tests.unit.config.test_config import config

R3 = "use_rollout_routing_replay=true"
AGENT = 'agent="m:f", apply_chat_template=true'
SFT = 'loss_type="sft", n_samples_per_prompt=1'
EVAL = 'eval_prompt_data=["a", "b"]'
DUMPS = 'replay_rollouts="."'
# settings as an inline table of TOML (ranks: their number, if not 1) | a part of the only complaint.  16 samples
# in a rollout of 4 prompts, responses of 8 tokens, 3 rollouts
CHECKED = f"""
    # topology
    ranks=3, tensor_model_parallel_size=2 | world size 3 is not a multiple of tensor_model_parallel_size 2 * pipeline
    ranks=1, context_parallel_size=2 | world size 1 is not a multiple of tensor_model
    ranks=6, tensor_model_parallel_size=2, context_parallel_size=2 | context_parallel_size 2 = 4
    ranks=2, expert_model_parallel_size=4 | expert_model_parallel_size 4 * pipeline_model_parallel_size 1 = 4
    expert_tensor_parallel_size=2 | world size 1 is not a multiple of expert_tensor_parallel_size 2
    expert_model_parallel_size=4, dry_run=true | = 4; a dry run counts 1 rank: --world-size 4
    ranks=3, expert_model_parallel_size=2, dry_run=true, world_size=3 | * pipeline_model_parallel_size 1 = 2
    ranks=4, global_batch_size=2 | global_batch_size 2 is below the 4 data-parallel ranks
    # the batch and its lengths
    global_batch_size=5 | rollout_batch_size 4 * n_samples_per_prompt 4 = 16 is not a multiple of global_batch_size 5
    global_batch_size=32 | = 16 is not a multiple of global_batch_size 32
    rollout_batch_size=10000001, n_samples_per_prompt=1 | = 10000001 samples in a rollout, expected at most 10000000
    rollout_max_context_len=8 | rollout_max_response_len 8 leaves no room for a prompt in rollout_max_context_len 8
    rollout_max_context_len=10, rollout_max_prompt_len=3 | rollout_max_prompt_len 3 + rollout_max_response_len 8 = 11 exceeds rollout_max_context_len 10
    # the learning rule
    eps_clip_high=0.28, policy_loss="dppo_kl" | --eps-clip-high 0.28 cannot go with --policy-loss dppo_kl
    rollout_rs=["token_k1"] | rollout_rs_threshold has 0 entries for 1 of rollout_rs
    rollout_rs=["token_k1", "token_k1"] | --rollout-rs: token_k1 is named twice
    reward_keys=["a", "b"], reward_weights=[1.0] | reward_weights has 1 entries for 2 reward_keys
    reward_keys=["a", "a"] | --reward-keys: a is named twice
    reward_keys=["a"], rm_type="math" | --reward-keys needs a reward that returns a table: --rm-type math returns a number
    # sampling
    rollout_top_k=0 | --rollout-top-k: expected -1 (no limit) or a number from 1 up, got 0
    rollout_top_k=4097 | rollout_top_k 4097 is above 4096, the most tokens of which SGLang says
    rollout_top_k=20, sglang={{sampling_mask_max_tokens=10}} | rollout_top_k 20 is above 10
    rollout_temperature=1e-7 | rollout_temperature 1e-07 is greedy decoding for SGLang
    prompt_sampling="difficulty", prompt_data=["a*0.5"] | --prompt-sampling difficulty draws from all files alike
    # servers
    rollout_external_engine_addrs=["h:1", "h:1"] | --rollout-external-engine-addrs: h:1 is named twice
    {AGENT}, agent_base_url="tunnel" | --agent-base-url: expected http://HOST:PORT or https://HOST, got 'tunnel'
    agent_command="run '", apply_chat_template=true | --agent-command: no closing quotation, got "run '"
    sglang={{use_rollout_routing_replay=true}} | sglang.use_rollout_routing_replay: set --use-rollout-routing-replay
    {R3}, sglang={{moe_enable_routing_replay=true}} | sglang.moe_enable_routing_replay: set --use-rollout-routing-replay
    r3_canaries=31 | r3_canaries 31 is below 32: two texts of sixteen tokens; 0 is off
    target_modules=["qkv_proj"] | --target-modules: qkv_proj is unknown; known: all-linear, q_proj
    # evaluation
    eval_prompt_data=["a", "b", "a", "c"] | evaluation sets: two have the name a
    {EVAL}, eval_top_k=0 | --eval-top-k: expected -1 (no limit) or a number from 1 up, got 0
    {EVAL}, eval_temperature=0.0, n_samples_per_eval_prompt=2 | evaluation set a: n_samples_per_eval_prompt 2 with greedy decoding
    {EVAL}, eval_top_k=1, n_samples_per_eval_prompt=2 | evaluation set a: n_samples_per_eval_prompt 2 with greedy decoding
    {EVAL}, eval_max_concurrency=65 | eval_max_concurrency 65 exceeds the 64 requests in flight at once
    {EVAL}, rollout_max_context_len=64, eval_max_response_len=64 | max_response_len 64 leaves no room for a prompt in rollout_max_context_len 64
    # files, and runs that only generate
    load="nowhere" | --load: nowhere: no such checkpoint directory
    replay_rollouts="nowhere" | --replay-rollouts: nowhere: no such directory of rollouts
    ci_inject_rollout_data_path="/nowhere" | /nowhere/rollout_0000000.safetensors: no such file
    # output
    use_pytorch_profiler=true, profile_step_start=3, profile_step_end=3 | profile_step_end 3 is not after profile_step_start 3
    use_pytorch_profiler=true | profile_step_start 10: the run ends after num_rollout 3
    record_memory_history=true, profile_step_start=0, profile_ranks=[0, 9] | profile_ranks 9 is none of the 1 ranks
"""
# requirements, in words: one row of each form; that each is broken and met is test_requirements.py
SAID = f"""
    sequence_parallel=true | --sequence-parallel needs --tensor-model-parallel-size above 1 (it is 1)
    reuse_log_probs="on", global_batch_size=8 | --reuse-log-probs on needs one optimizer step per rollout (--global-batch-size) or
    min_lr=1.0 | --min-lr 1 exceeds --lr 1e-06
    ci_inject_rollout_data_path="/", ci_inject_rollout_data_start_rollout_id=3 | -id 3 is not below --num-rollout 3
    grpo_std_normalization=false, advantage_estimator="rloo" | --no-grpo-std-normalization has no effect without --advantage-estimator grpo/module:function (it is rloo)
    use_tis=true, rollout_is="sequence" | --use-tis cannot go with --rollout-is sequence
    opd_teacher_url="h:1" | --opd-teacher-url h:1 has no effect without --opd-type sglang (it is unset)
    loss_type="sft", n_samples_per_prompt=1, {R3} | --use-rollout-routing-replay cannot go with --loss-type sft without --replay-rollouts
    replay_rollouts=".", check_weight_update_equal=true | --check-weight-update-equal needs a server (--replay-rollouts and --loss-type sft have none)
    rollout_buffer_size=3 | --rollout-buffer-size 3 is below --rollout-batch-size 4: training would wait
    rollout_filter=["aborted", "zero_variance"], n_samples_per_prompt=1 | needs --n-samples-per-prompt above 1 (it is 1)
    pause_generation_mode="abort", sglang={{disable_overlap_schedule=false}} | cannot go with sglang.disable_overlap_schedule = False
    agent_max_calls=2 | --agent-max-calls 2 has no effect without --agent or --agent-command
    {R3}, transformer_overrides={{moe_router_load_balancing_type=["aux_loss", "quantile"]}} | _type = ['aux_loss', 'quantile']
    plant_bug="answer_with_rows_of_another", {R3}, ci_test=true, r3_recheck_share=0.0 | needs --r3-recheck-share above 0
    save_interval=2 | --save-interval 2 needs --save or --save-hf {{rollout_id}} (it is unset)
    wandb_group="g\\nh" | --wandb-group g\\nh has no effect without --use-wandb
    datasets=[{{name="a", path="b"}}], replay_rollouts="." | [[eval.datasets]] needs a server (--replay
"""
# a setting of Megatron that harms R3, at a value that is on and at one that is off
VALUES = """
    moe_router_fusion=true | moe_router_fusion=false
    moe_router_load_balancing_type="sinkhorn" | moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"]
    moe_expert_capacity_factor=1.5 | moe_expert_capacity_factor=-1.0
    moe_expert_capacity_factor=0 | moe_expert_capacity_factor=false
    moe_expert_capacity_factor=true | moe_expert_capacity_factor="none"
    moe_expert_capacity_factor="1.0" | moe_router_dtype="fp32"
    cuda_graph_impl="local" | cuda_graph_impl="none"
    dsa_kernel_backend="tilelang" | dsa_kernel_backend="none"
"""
# settings that pass all rules: the last ones next to those that arithmetic refuses, and user code, which may read
# every setting
PASSES = f"""
    eps_clip_high=0.2, policy_loss="dppo_kl"
    {R3}
    ranks=2, expert_model_parallel_size=2, {R3}
    ranks=2, tensor_model_parallel_size=2, sequence_parallel=true
    ranks=4, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    ranks=4, context_parallel_size=2, expert_model_parallel_size=4
    ranks=3, pipeline_model_parallel_size=3, decoder_first_pipeline_num_layers=2
    ranks=8, tensor_model_parallel_size=2, sequence_parallel=true, pipeline_model_parallel_size=2, expert_tensor_parallel_size=2
    rollout_top_k=2, rollout_top_p=0.9, rollout_temperature=0.5
    rollout_top_k=4096
    rollout_buffer_size=4
    pause_generation_mode="in_place", sglang={{disable_overlap_schedule=true}}, {R3}
    environment="m:Class", global_batch_size=4
    gamma=0.5, grpo_std_normalization=false, advantage_estimator="own:plug"
    normalize_advantages=true, advantage_estimator="reinforce_plus_plus_mine:plug"
    eps_clip=0.1, eps_clip_high=0.28, eps_clip_c=3.0, policy_loss="gspo"
    eps_clip_c=3.0, dppo_delta=0.1, tis_clip=3.0, policy_loss="own:plug"
    eps_clip=0.1, ratio_anchor="rollout", policy_loss="dppo_mine:plug"
    use_unbiased_kl=true, kl_loss_coef=0.1, opsm_delta=0.1, global_batch_size=8
    rollout_is_mode="mask", tis_clip=3.0, tis_clip_low=0.5, rollout_is="token"
    advantage_estimator="gdpo", reward_keys=["a", "b"], reward_weights=[1, 0.5]
    reward_keys=["a"], rm_type="boxed_remote_rm"
    reward_keys=["a"], rm_type="own:plug"
    reward_keys=["a"], rm_type="math", custom_rm_path="own:plug"
    reward_keys=["a"], rm_type="math", {DUMPS}
    use_opd=true, opd_type="megatron", opd_teacher_load="x", rollout_temperature=0.7, rollout_top_k=20
    {SFT}, kl_loss_coef=0.1, kl_loss_type="k1", global_batch_size=2
    loss_type="sft", {DUMPS}, {R3}
    {EVAL}, eval_interval=3, eval_temperature=0.0, eval_max_concurrency=64
"""


@pytest.fixture(autouse=True)
def dumped(tmp_path, monkeypatch):
    """The directory "." holds three dumped rollouts."""
    for rollout_id in range(3):
        rollout_path(tmp_path, rollout_id).touch()
    monkeypatch.chdir(tmp_path)


def rows(table: str, parts: int = 2) -> list[list[str]]:
    """The rows of a table, each of so many parts at most."""
    lines = [line.strip() for line in table.splitlines()]
    kept = (line for line in lines if line and line[0] != "#")
    return [[part.strip() for part in line.split("|", parts - 1)] for line in kept]


def made(text: str) -> tuple[RunConfig, int]:
    """The configuration of a row, and its number of ranks."""
    fields = tomllib.loads(f"x = {{{text}}}")["x"]
    ranks = fields.pop("ranks", 1)
    return config(**fields), ranks


BROKEN = [
    *rows(CHECKED),
    *rows(SAID),
    *(
        [
            f"{R3}, transformer_overrides={{{on}}}",
            f"--use-rollout-routing-replay cannot go with transformer_overrides.{on[:9]}",
        ]
        for on, _ in rows(VALUES)
    ),
]


@pytest.mark.parametrize("text, complaint", BROKEN)
def test_a_broken_rule_is_one_line_that_names_its_settings(text, complaint):
    with pytest.raises(ConfigError) as refused:
        check_static(*made(text))
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


GOOD = [
    *(text for (text,) in rows(PASSES)),
    *(f"{R3}, transformer_overrides={{{off}}}" for _, off in rows(VALUES)),
]


@pytest.mark.parametrize("text", GOOD)
def test_settings_that_go_together_pass(text):
    check_static(*made(text))


def test_every_method_that_checks_has_a_row_that_it_refuses():
    seen = set()
    for text, _ in BROKEN:
        with contextlib.suppress(ConfigError):  # of one setting by itself
            seen |= {rule.section for rule in broken(made(text)[0]) if rule.asked is None}
    for section, info in RunConfig.model_fields.items():
        methods = vars(info.annotation).values()
        assert section in seen or not any(getattr(m, "is_check", False) for m in methods), section


# these choose a rule of learning, or act on their own
ALWAYS_IN_EFFECT = """
    reward_keys mask_truncated loss_aggregation kl_loss_coef entropy_coef rollout_is rollout_rs min_ess""".split()
CHECKED_BY_A_METHOD = {"eps_clip_high"}  # with dppo only --eps-clip's own value


def test_every_setting_of_the_learning_rule_asks_something_or_is_always_in_effect():
    section = RunConfig.model_fields["algorithm"].annotation
    learning_settings = {
        name
        for name in section.model_fields
        if set(requirements_of(name)) - set(section.every_field)
    }
    learning_settings |= CHECKED_BY_A_METHOD
    assert learning_settings | set(ALWAYS_IN_EFFECT) == section.model_fields.keys()
    assert not learning_settings & set(ALWAYS_IN_EFFECT)


def test_a_setting_of_reinforcement_is_refused_with_sft():
    section = RunConfig.model_fields["algorithm"].annotation
    asked = {
        name
        for name in section.model_fields
        if set(requirements_of(name)) & set(section.every_field)
    }
    sft_settings = (
        "loss_type mask_truncated loss_aggregation kl_loss_coef kl_loss_type entropy_coef".split()
    )
    assert asked == section.model_fields.keys() - set(sft_settings)
    message = "--tis-clip 3 cannot go with --loss-type sft: it has no reward and no ratio$"
    with pytest.raises(ConfigError, match=message):  # and is asked for nothing else
        check_static(*made(f"{SFT}, tis_clip=3.0"))


def test_every_broken_rule_is_named_at_once():
    text = (
        'global_batch_size=5, save_interval=2, sequence_parallel=true, recompute_granularity="full"'
    )
    with pytest.raises(ConfigError) as caught:
        check_static(*made(text))
    assert len(str(caught.value).splitlines()) == 5


def test_every_bug_of_the_replay_needs_replay():
    for bug in get_args(RouteBug):
        with pytest.raises(
            ConfigError, match=f"--plant-bug {bug} needs --use-rollout-routing-replay"
        ):
            check_static(config(plant_bug=bug, ci_test=True), 1)
