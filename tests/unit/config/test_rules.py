"""Rules between settings, as a table: each row breaks one rule, and ends in one line that says so."""

from __future__ import annotations

import tomllib
from typing import get_args

import pytest

from r3train.config import RunConfig
from r3train.config.checkpoint_settings import rollout_path
from r3train.config.cross_checks import broken, check_static, requirements_of
from r3train.config.replay_settings import RouteBug
from r3train.config.requirements import value_of
from r3train.config.sources import ConfigError, places
from tests.unit.config.test_config import config

R3 = "use_rollout_routing_replay=true"
TAUGHT = 'use_opd=true, opd_type="sglang", opd_teacher_url="h:1"'
AGENT = 'agent="m:f", apply_chat_template=true'
COMMAND = 'agent_command="x", apply_chat_template=true'
ADAPTER = 'lora_rank=4, lora_serving="adapter"'
EXTERNAL = 'rollout_external_engine_addrs=["h:1"]'
SFT = 'loss_type="sft", n_samples_per_prompt=1'
EVAL = 'eval_prompt_data=["a", "b"]'
DUMPS = 'replay_rollouts="."'
WEIGHTS = "--rollout-is token/sequence/geometric (it is none) or --use-tis or --policy-loss module:function"
NO_SERVER = "needs a server (--replay-rollouts and --loss-type sft have none)"
# settings as an inline table of TOML (ranks: their number, if not 1) | a part of the only complaint.  16 samples
# in a rollout of 4 prompts, responses of 8 tokens, 3 rollouts
REFUSED = f"""
    # topology
    ranks=3, tensor_model_parallel_size=2 | world size 3 is not a multiple of tensor_model_parallel_size 2 * pipeline
    ranks=1, context_parallel_size=2 | world size 1 is not a multiple of tensor_model
    ranks=6, tensor_model_parallel_size=2, context_parallel_size=2 | context_parallel_size 2 = 4
    ranks=2, expert_model_parallel_size=4 | expert_model_parallel_size 4 * pipeline_model_parallel_size 1 = 4
    expert_tensor_parallel_size=2 | world size 1 is not a multiple of expert_tensor_parallel_size 2
    expert_model_parallel_size=4, dry_run=true | = 4; a dry run counts 1 rank: --world-size 4
    ranks=3, expert_model_parallel_size=2, dry_run=true, world_size=3 | * pipeline_model_parallel_size 1 = 2
    sequence_parallel=true | --sequence-parallel needs --tensor-model-parallel-size above 1 (it is 1)
    virtual_pipeline_model_parallel_size=2 | --virtual-pipeline-model-parallel-size 2 needs --pipeline-model-parallel-size above 1
    decoder_first_pipeline_num_layers=2 | --decoder-first-pipeline-num-layers 2 needs --pipeline-model-parallel-size above 1
    decoder_last_pipeline_num_layers=2 | --decoder-last-pipeline-num-layers 2 needs --pipeline-model-parallel-size above 1
    overlap_param_gather=true | --overlap-param-gather needs --overlap-grad-reduce
    overlap_param_gather=true, overlap_grad_reduce=true, use_distributed_optimizer=false | needs --use-distributed-optimizer
    ranks=4, global_batch_size=2 | global_batch_size 2 is below the 4 data-parallel ranks
    # the batch and its lengths
    global_batch_size=5 | rollout_batch_size 4 * n_samples_per_prompt 4 = 16 is not a multiple of global_batch_size 5
    global_batch_size=32 | = 16 is not a multiple of global_batch_size 32
    rollout_batch_size=10000001, n_samples_per_prompt=1 | = 10000001 samples in a rollout, expected at most 10000000
    reuse_log_probs="on", global_batch_size=8 | --reuse-log-probs on needs one optimizer step per rollout (--global-batch-size) or
    reuse_log_probs="on", kl_coef=0.1 | --reuse-log-probs on cannot go with --kl-coef 0.1
    rollout_max_context_len=8 | rollout_max_response_len 8 leaves no room for a prompt in rollout_max_context_len 8
    rollout_max_context_len=10, rollout_max_prompt_len=3 | rollout_max_prompt_len 3 + rollout_max_response_len 8 = 11 exceeds rollout_max_context_len 10
    min_lr=1.0 | --min-lr 1 exceeds --lr 1e-06
    # the learning rule
    grpo_std_normalization=false, advantage_estimator="rloo" | --no-grpo-std-normalization has no effect without --advantage-estimator grpo/module:function (it is rloo)
    gamma=0.5 | --gamma 0.5 has no effect without --advantage-estimator reinforce_plus_plus/module:function
    normalize_advantages=true, advantage_estimator="reinforce_plus_plus_baseline" | whitens its advantages already
    overlong_penalty_factor=0.5 | --overlong-penalty-factor 0.5 has no effect without --overlong-buffer-len
    overlong_buffer_len=99 | --overlong-buffer-len 99 exceeds --rollout-max-response-len 8
    eps_clip=0.1, policy_loss="dppo_tv" | --eps-clip 0.1 cannot go with --policy-loss dppo_tv
    eps_clip_high=0.28, policy_loss="dppo_kl" | --eps-clip-high 0.28 cannot go with --policy-loss dppo_kl
    eps_clip_c=3.0, policy_loss="cispo" | --eps-clip-c 3 cannot go with --policy-loss cispo: it has no dual clip
    dppo_delta=0.1 | --dppo-delta 0.1 has no effect without --policy-loss dppo_tv/dppo_kl/module:function (it is ppo)
    ratio_anchor="rollout", policy_loss="dppo_tv" | --ratio-anchor rollout cannot go with --policy-loss dppo_tv
    ratio_anchor="rollout", rollout_is="token" | --ratio-anchor rollout cannot go with --rollout-is token
    ratio_anchor="rollout", use_tis=true | --ratio-anchor rollout cannot go with --use-tis: the ratio would be corrected twice
    policy_loss="dppo_tv", rollout_is="token" | --policy-loss dppo_tv cannot go with --rollout-is token
    policy_loss="dppo_kl", use_tis=true | --policy-loss dppo_kl cannot go with --use-tis
    use_tis=true, rollout_is="sequence" | --use-tis cannot go with --rollout-is sequence
    rollout_is_mode="mask" | --rollout-is-mode mask has no effect without {WEIGHTS}
    tis_clip=3.0 | --tis-clip 3 has no effect without {WEIGHTS}
    tis_clip_low=0.5 | --tis-clip-low 0.5 has no effect without {WEIGHTS}
    tis_clip_low=3.0, use_tis=true | --tis-clip-low 3 exceeds --tis-clip 2
    rollout_rs_threshold=["2"] | --rollout-rs-threshold 2 has no effect without --rollout-rs
    rollout_rs=["token_k1"] | rollout_rs_threshold has 0 entries for 1 of rollout_rs
    rollout_rs=["token_k1", "token_k1"] | --rollout-rs: token_k1 is named twice
    kl_coef=0.1, kl_loss_coef=0.2 | --kl-coef 0.1 cannot go with --kl-loss-coef 0.2: the KL would count twice
    kl_loss_type="k1" | --kl-loss-type k1 has no effect without --kl-loss-coef above 0 (it is 0)
    use_unbiased_kl=true, global_batch_size=8 | --use-unbiased-kl has no effect without --kl-loss-coef above 0
    use_unbiased_kl=true, kl_loss_coef=0.1 | --use-unbiased-kl has no effect without several optimizer steps per rollout
    opsm_delta=0.1 | --opsm-delta 0.1 has no effect without several optimizer steps per rollout
    ref_load="ref" | --ref-load ref has no effect without --kl-loss-coef above 0 (it is 0) or --kl-coef above 0
    ref_routing="native", {R3} | --ref-routing native has no effect without --kl-loss-coef above 0
    ref_routing="native", kl_loss_coef=0.1 | --ref-routing native has no effect without --use-rollout-routing-replay
    plant_fault="nan_once", kl_coef=0.1 | --plant-fault nan_once cannot go with --kl-coef 0.1
    # rewards
    advantage_estimator="gdpo" | --advantage-estimator gdpo needs --reward-keys: it compares each by itself
    advantage_estimator="gdpo", reward_keys=["a"], kl_coef=0.1 | --kl-coef 0.1 cannot go with --advantage-estimator gdpo
    advantage_estimator="gdpo", reward_keys=["a"], overlong_buffer_len=4 | --overlong-buffer-len 4 cannot go with --advantage-estimator gdpo
    advantage_estimator="gdpo", reward_keys=["a"], length_penalty_coef=0.1 | --length-penalty-coef 0.1 cannot go with --advantage-estimator gdpo
    reward_weights=[1.0] | --reward-weights 1 has no effect without --reward-keys
    reward_keys=["a", "b"], reward_weights=[1.0] | reward_weights has 1 entries for 2 reward_keys
    reward_keys=["a", "a"] | --reward-keys: a is named twice
    reward_keys=["b"], reward_key="a" | --reward-key a cannot go with --reward-keys b: the reward is one
    reward_keys=["a"], rm_type="math" | --reward-keys needs a reward that returns a table: --rm-type math returns a number
    apply_chat_template_kwargs={{a=1}} | needs --apply-chat-template: it is for the chat template
    tool_key="tools" | --tool-key tools needs --apply-chat-template
    # a teacher
    use_opd=true | --use-opd needs --opd-type: sglang or megatron
    opd_kl_coef=0.5 | --opd-kl-coef 0.5 has no effect without --use-opd
    opd_type="megatron", opd_teacher_load="x" | --opd-type megatron has no effect without --use-opd
    use_opd=true, opd_type="megatron" | --opd-type megatron needs --opd-teacher-load
    use_opd=true, opd_type="sglang" | --opd-type sglang needs --opd-teacher-url or --replay-rollouts
    {TAUGHT}, opd_teacher_load="other" | --opd-teacher-load other has no effect without --opd-type megatron (it is sglang)
    opd_teacher_url="h:1" | --opd-teacher-url h:1 has no effect without --opd-type sglang (it is unset)
    {TAUGHT}, rollout_temperature=0.7 | --opd-type sglang needs --rollout-temperature 1 (it is 0.7)
    {TAUGHT}, rollout_top_k=20 | --opd-type sglang cannot go with --rollout-top-k 20
    # conversations
    loss_type="sft" | --loss-type sft needs --n-samples-per-prompt 1 (it is 4) or --replay-rollouts
    {SFT}, {R3} | --use-rollout-routing-replay cannot go with --loss-type sft without --replay-rollouts
    {SFT}, environment="calculator" | --environment calculator cannot go with --loss-type sft without --replay-rollouts
    {SFT}, gamma=0.5 | --gamma 0.5 cannot go with --loss-type sft: it has no reward and no ratio
    {SFT}, rollout_top_k=20 | --rollout-top-k 20 cannot go with --loss-type sft: it samples no token
    {SFT}, check_weight_update_equal=true | --check-weight-update-equal {NO_SERVER}
    {SFT}, max_engine_restarts=1 | --max-engine-restarts 1 {NO_SERVER}
    # sampling
    rollout_top_k=0 | --rollout-top-k: expected -1 (no limit) or a number from 1 up, got 0
    rollout_top_k=4097 | rollout_top_k 4097 is above 4096, the most tokens of which SGLang says
    rollout_top_k=20, sglang={{sampling_mask_max_tokens=10}} | rollout_top_k 20 is above 10
    rollout_top_k=1, rollout_temperature=0.8 | --rollout-top-k 1 needs --rollout-temperature 1 (it is 0.8): it is greedy decoding
    rollout_top_p=0.9 | --rollout-top-p 0.9 needs --rollout-top-k above 1 (it is -1): SGLang says which
    rollout_top_p=0.9, rollout_top_k=1 | --rollout-top-p 0.9 needs --rollout-top-k above 1 (it is 1)
    rollout_temperature=1e-7 | rollout_temperature 1e-07 is greedy decoding for SGLang
    # buffer, filters, updates
    rollout_buffer_size=3 | --rollout-buffer-size 3 is below --rollout-batch-size 4: training would wait
    rollout_buffer_size=5, over_sampling_batch_size=6 | --rollout-buffer-size 5 is below --over-sampling-batch-size 6
    over_sampling_batch_size=3 | --over-sampling-batch-size 3 is below --rollout-batch-size 4
    stale_policy="regenerate" | --stale-policy regenerate needs --over-sampling-batch-size above --rollout-batch-size (it is unset)
    rollout_filter=["zero_variance"], rollout_top_k=1 | --rollout-filter zero_variance cannot go with --rollout-top-k 1
    rollout_filter=["aborted", "zero_variance"], n_samples_per_prompt=1 | needs --n-samples-per-prompt above 1 (it is 1)
    pause_generation_mode="retract", {R3} | --pause-generation-mode retract cannot go with --use-rollout-routing-replay: SGLang recomputes
    pause_generation_mode="in_place", max_weight_staleness=0 | --pause-generation-mode in_place needs --max-weight-staleness above 0
    pause_generation_mode="abort", sglang={{disable_overlap_schedule=false}} | cannot go with sglang.disable_overlap_schedule = False
    # servers
    colocate=true | --colocate needs --max-weight-staleness 0 (it is 1): nothing is generated while the ranks train
    colocate=true, max_weight_staleness=0, {EXTERNAL} | --colocate cannot go with --rollout-external-engine-addrs h:1
    colocate=true, max_weight_staleness=0, {ADAPTER} | --colocate cannot go with --lora-serving adapter
    colocate=true, max_weight_staleness=0, {DUMPS} | --colocate {NO_SERVER}: there are no turns to take
    colocate=true, max_weight_staleness=0, debug_rollout_only=true | --colocate cannot go with --debug-rollout-only
    sglang_server_concurrency=8, rollout_max_concurrency=8 | --sglang-server-concurrency 8 cannot go with --rollout-max-concurrency 8
    rollout_weights="fp8" | --rollout-weights fp8 needs --bf16: SGLang multiplies fp8 by bfloat16 activations alone
    bf16=true, rollout_weights="fp8", {DUMPS} | --rollout-weights fp8 {NO_SERVER}
    bf16=true, rollout_weights="fp8", {EXTERNAL} | --rollout-weights fp8 cannot go with --rollout-external-engine-addrs h:1
    bf16=true, rollout_weights="fp8", {ADAPTER} | --rollout-weights fp8 cannot go with --lora-serving adapter
    rollout_num_engines=2, {EXTERNAL} | --rollout-num-engines 2 cannot go with --rollout-external-engine-addrs h:1
    rollout_server_env=["TOKEN"], {EXTERNAL} | --rollout-server-env TOKEN cannot go with --rollout-external-engine-addrs
    max_engine_restarts=1, {EXTERNAL} | --max-engine-restarts 1 cannot go with --rollout-external-engine-addrs
    rollout_external_engine_addrs=["h:1", "h:1"] | --rollout-external-engine-addrs: h:1 is named twice
    environment_samples="turn" | --environment-samples turn needs --environment
    environment="calculator", environment_samples="turn", global_batch_size=8 | turn needs one optimizer step per rollout
    agent_max_calls=2 | --agent-max-calls 2 has no effect without --agent or --agent-command
    {AGENT}, agent_command="run it" | --agent m:f cannot go with --agent-command run it: one of them makes the rollouts
    {AGENT}, agent_exit_code_fails=true | --agent-exit-code-fails has no effect without --agent-command
    {AGENT}, agent_workers=2 | --agent-workers 2 has no effect without --agent-command
    {AGENT}, agent_host="0.0.0.0" | --agent-host 0.0.0.0 needs --agent-base-url: agents need an address to call
    {COMMAND}, agent_host="::" | --agent-host :: needs --agent-base-url
    {AGENT}, agent_base_url="tunnel" | --agent-base-url: expected http://HOST:PORT or https://HOST, got 'tunnel'
    {AGENT}, agent_env=["A"] | --agent-env A has no effect without --agent-command
    agent_command="run '", apply_chat_template=true | --agent-command: no closing quotation, got "run '"
    {COMMAND}, global_batch_size=8 | --agent-command x needs one optimizer step per rollout (--global-batch-size)
    agent_command="x" | --agent-command x needs --apply-chat-template: its requests are written by the chat template
    {COMMAND}, environment="calculator" | --agent-command x cannot go with --environment calculator
    {COMMAND}, group_rm=true, custom_rm_path="m:f" | --agent-command x cannot go with --group-rm
    {COMMAND}, rollout_ignore_eos=true | --agent-command x cannot go with --rollout-ignore-eos
    {COMMAND}, {SFT} | --agent-command x cannot go with --loss-type sft without --replay-rollouts
    agent="m:f" | --agent m:f needs --apply-chat-template: its requests are written by the chat template
    {AGENT}, global_batch_size=8 | --agent m:f needs one optimizer step per rollout (--global-batch-size)
    {AGENT}, environment="calculator" | --agent m:f cannot go with --environment calculator: both would make the turns
    {AGENT}, group_rm=true, custom_rm_path="m:f" | --agent m:f cannot go with --group-rm: a session has several samples
    {AGENT}, rollout_ignore_eos=true | --agent m:f cannot go with --rollout-ignore-eos: no answer would end
    {AGENT}, {SFT} | --agent m:f cannot go with --loss-type sft without --replay-rollouts: nothing is generated
    {AGENT}, agent_failure_reward=-1.0 | --agent-failure-reward -1 has no effect without --agent-on-failure train (it is drop)
    environment="calculator", group_rm=true | --group-rm cannot go with --environment calculator
    # replay
    {R3}, transformer_overrides={{moe_router_load_balancing_type=["aux_loss", "quantile"]}} | _type = ['aux_loss', 'quantile']
    {R3}, transformer_overrides={{dsa_kernel_backend="tilelang"}} | cannot go with transformer_overrides.dsa_kernel_backend
    use_routing_replay=true, {R3} | --use-routing-replay cannot go with --use-rollout-routing-replay: a router replays one
    use_routing_replay=true, {SFT} | --use-routing-replay cannot go with --loss-type sft without --replay-rollouts
    use_routing_replay=true, reuse_log_probs="on" | --use-routing-replay cannot go with --reuse-log-probs on: the routes
    sglang={{use_rollout_routing_replay=true}} | sglang.use_rollout_routing_replay: set --use-rollout-routing-replay
    {R3}, sglang={{moe_enable_routing_replay=true}} | sglang.moe_enable_routing_replay: set --use-rollout-routing-replay
    log_route_drift=true | --log-route-drift needs --use-rollout-routing-replay
    route_stores=true | --route-stores needs --use-rollout-routing-replay: there are no routes to keep
    route_stores=true, {R3}, {DUMPS} | --route-stores cannot go with --replay-rollouts .
    route_store_host="0.0.0.0" | --route-store-host 0.0.0.0 needs --route-stores
    plant_bug="weights_frozen" | --plant-bug weights_frozen needs --check-weight-update-equal or canaries (--r3-canaries with the R3 check): nothing would notice
    plant_bug="one_expert", ci_test=true | --plant-bug one_expert needs --use-rollout-routing-replay: there is no replay
    plant_bug="one_expert", {R3} | --plant-bug one_expert needs --enable-r3-correctness-check or --ci-test
    r3_canaries=31 | r3_canaries 31 is below 32: two texts of sixteen tokens; 0 is off
    plant_bug="answer_with_rows_of_another", {R3}, ci_test=true, r3_recheck_share=0.0 | needs --r3-recheck-share above 0
    plant_bug="answer_with_rows_of_another", {R3}, ci_test=true, route_stores=true | cannot go with --route-stores
    # LoRA
    lora_alpha=8.0 | --lora-alpha 8 has no effect without --lora-rank above 0 (it is 0)
    target_modules=["q_proj"] | --target-modules q_proj has no effect without --lora-rank
    target_modules=["qkv_proj"] | --target-modules: qkv_proj is unknown; known: all-linear, q_proj
    lora_rank=4, lora_save_hf="merged" | --lora-save-hf merged needs --save-hf
    lora_rank=4, freeze_moe_router=true | --freeze-moe-router cannot go with --lora-rank 4: only adapters are trained
    lora_rank=4, freeze_params=["norm"] | --freeze-params norm cannot go with --lora-rank 4
    lora_rank=4, transformer_overrides={{moe_router_bias_update_rate=0.01}} | --lora-rank 4 cannot go with transformer_overrides.moe_router_bias
    lora_rank=4, transformer_overrides={{moe_shared_expert_overlap=true}} | --lora-rank 4 cannot go with transformer_overrides.moe_shared
    {ADAPTER}, {DUMPS} | --lora-serving adapter {NO_SERVER}
    {ADAPTER}, {EXTERNAL} | --lora-serving adapter cannot go with --rollout-external-engine-addrs h:1
    {ADAPTER}, pause_generation_mode="abort" | --pause-generation-mode abort cannot go with --lora-serving adapter
    {ADAPTER}, flush_cache_on_update=false | --no-flush-cache-on-update cannot go with --lora-serving adapter
    {ADAPTER}, update_weight_transfer_mode="disk" | --update-weight-transfer-mode disk cannot go with --lora-serving adapter
    {ADAPTER}, update_weight_buffer_size=1024 | --update-weight-buffer-size 1024 cannot go with --lora-serving adapter
    {ADAPTER}, update_weight_master_address="eth0" | --update-weight-master-address eth0 cannot go with --lora-serving adapter
    # recomputation
    recompute_granularity="full", recompute_num_layers=1 | --recompute-granularity full needs --recompute-method
    recompute_granularity="full", recompute_method="uniform" | --recompute-granularity full needs --recompute-num-layers
    recompute_method="uniform" | --recompute-method uniform needs --recompute-granularity full (it is unset)
    recompute_num_layers=1 | --recompute-num-layers 1 needs --recompute-granularity full
    recompute_modules=["moe"] | --recompute-modules moe needs --recompute-granularity selective
    # evaluation
    eval_interval=5 | --eval-interval 5 has no effect without --eval-prompt-data or [[eval.datasets]]: there is no evaluation set
    skip_eval_before_train=true | --skip-eval-before-train has no effect without --eval-prompt-data
    {EVAL}, {DUMPS} | --eval-prompt-data a b {NO_SERVER}: no server could answer
    datasets=[{{name="a", path="b"}}], {DUMPS} | [[eval.datasets]] {NO_SERVER}: no server could answer
    eval_prompt_data=["a", "b", "a", "c"] | evaluation sets: two have the name a
    {EVAL}, eval_top_k=0 | --eval-top-k: expected -1 (no limit) or a number from 1 up, got 0
    {EVAL}, eval_temperature=0.0, n_samples_per_eval_prompt=2 | evaluation set a: n_samples_per_eval_prompt 2 with greedy decoding
    {EVAL}, eval_top_k=1, n_samples_per_eval_prompt=2 | evaluation set a: n_samples_per_eval_prompt 2 with greedy decoding
    {EVAL}, eval_max_concurrency=65 | eval_max_concurrency 65 exceeds the 64 requests in flight at once
    {EVAL}, rollout_max_context_len=64, eval_max_response_len=64 | max_response_len 64 leaves no room for a prompt in rollout_max_context_len 64
    # files, and runs that only generate
    save_interval=2 | --save-interval 2 needs --save or --save-hf {{rollout_id}} (it is unset)
    save_keep_last=2 | --save-keep-last 2 needs --save
    async_save=true | --async-save needs --save
    auto_resume=true | --auto-resume needs --save
    load_model_only=true | --load-model-only needs --load
    load="nowhere" | --load: nowhere: no such checkpoint directory
    replay_rollouts="nowhere" | --replay-rollouts: nowhere: no such directory of rollouts
    {DUMPS}, dump_rollouts=true | --dump-rollouts {NO_SERVER}
    ci_inject_rollout_data_path=".", {DUMPS} | --ci-inject-rollout-data-path . {NO_SERVER}
    ci_inject_rollout_data_path=".", route_stores=true, {R3} | --ci-inject-rollout-data-path . cannot go with --route-stores
    ci_inject_rollout_data_path="/nowhere" | /nowhere/rollout_0000000.safetensors: no such file
    ci_inject_rollout_data_path="/", ci_inject_rollout_data_start_rollout_id=3 | -id 3 is not below --num-rollout 3
    ci_inject_rollout_data_start_rollout_id=1 | has no effect without --ci-inject-rollout-data-path
    ci_inject_rollout_data_min_match_ratio=0.5 | has no effect without --ci-inject-rollout-data-path
    debug_rollout_only=true, {DUMPS} | --debug-rollout-only {NO_SERVER}
    debug_rollout_only=true, {EXTERNAL} | --debug-rollout-only cannot go with --rollout-external-engine-addrs h:1
    debug_rollout_only=true, {ADAPTER} | --debug-rollout-only cannot go with --lora-serving adapter
    # output
    estimate=true | --estimate has no effect without --dry-run
    dry_run=true, gpu_memory_gb=80.0 | --gpu-memory-gb 80 has no effect without --estimate
    use_pytorch_profiler=true, profile_step_start=3, profile_step_end=3 | profile_step_end 3 is not after profile_step_start 3
    use_pytorch_profiler=true | profile_step_start 10: the run ends after num_rollout 3
    profile_step_start=1 | --profile-step-start 1 has no effect without --use-pytorch-profiler or --record-memory-history
    profile_step_end=11 | --profile-step-end 11 has no effect without --use-pytorch-profiler
    ranks=2, profile_ranks=[1] | --profile-ranks 1 has no effect without --use-pytorch-profiler
    record_memory_history=true, profile_step_start=0, profile_ranks=[0, 9] | profile_ranks 9 is none of the 1 ranks
    wandb_project="p" | --wandb-project p has no effect without --use-wandb
    wandb_group="g\\nh" | --wandb-group g\\nh has no effect without --use-wandb
    wandb_team="t" | --wandb-team t has no effect without --use-wandb
    wandb_mode="offline" | --wandb-mode offline has no effect without --use-wandb
    mlflow_tracking_uri="u" | --mlflow-tracking-uri u has no effect without --use-mlflow
    mlflow_experiment_name="e" | --mlflow-experiment-name e has no effect without --use-mlflow
    tracker_tags=["t"] | --tracker-tags t has no effect without --use-wandb or --use-mlflow
    tracker_notes="n" | --tracker-notes n has no effect without --use-wandb
"""
OF_AN_ACTOR = f"""
    save="x" | --save x
    save_hf="x" | --save-hf x
    load="." | --load .
    lora_rank=4, lora_adapter_path="x" | --lora-adapter-path x
    ci_inject_rollout_data_path="." | --ci-inject-rollout-data-path .
    use_pytorch_profiler=true, profile_step_start=0 | --use-pytorch-profiler
    record_memory_history=true, profile_step_start=0 | --record-memory-history
    check_weight_update_equal=true | --check-weight-update-equal
    ci_test=true | --ci-test
    plant_fault="nan_once" | --plant-fault nan_once
    {EVAL} | --eval-prompt-data a b
    datasets=[{{name="a", path="b"}}] | [[eval.datasets]]
    max_engine_restarts=1 | --max-engine-restarts 1
    {R3}, route_stores=true | --route-stores
"""
# of Megatron, with a value that harms R3 and, if there is one, a value that does not
NOT_REPLAYED = """
    moe_router_fusion=true | moe_router_fusion=false
    moe_router_load_balancing_type="sinkhorn" | moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"]
    moe_expert_capacity_factor=1.5 | moe_expert_capacity_factor=-1.0
    moe_expert_capacity_factor=0 | moe_expert_capacity_factor=false
    moe_expert_capacity_factor=true | moe_expert_capacity_factor="none"
    moe_expert_capacity_factor="1.0" | moe_router_dtype="fp32"
    moe_expert_rank_capacity_factor=1.5 |
    moe_pad_expert_input_to_capacity=true |
    moe_router_force_load_balancing=true |
    enable_cuda_graph=true |
    external_cuda_graph=true |
    cuda_graph_impl="local" | cuda_graph_impl="none"
    cuda_graph_scope="moe_router" |
    cuda_graph_modules="moe_router" |
    overlap_moe_expert_parallel_comm=true |
"""
# settings that go together: the last ones that pass next to those that are refused, and user code, which may read
# every setting
PASSES = f"""
    eps_clip_high=0.2, policy_loss="dppo_kl"
    {R3}
    use_routing_replay=true, transformer_overrides={{moe_router_fusion=false}}
    {R3}, transformer_overrides={{dsa_kernel_backend="none"}}
    transformer_overrides={{dsa_kernel_backend="tilelang"}}
    ranks=2, expert_model_parallel_size=2, {R3}
    ranks=2, tensor_model_parallel_size=2, sequence_parallel=true
    ranks=4, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    ranks=4, context_parallel_size=2, expert_model_parallel_size=4
    ranks=3, pipeline_model_parallel_size=3, decoder_first_pipeline_num_layers=2
    ranks=8, tensor_model_parallel_size=2, sequence_parallel=true, pipeline_model_parallel_size=2, expert_tensor_parallel_size=2
    rollout_top_k=2, rollout_top_p=0.9, rollout_temperature=0.5
    rollout_top_k=1
    rollout_top_k=4096
    rollout_filter=["zero_variance", "aborted"], n_samples_per_prompt=2
    rollout_buffer_size=4
    rollout_num_engines=3
    over_sampling_batch_size=6, stale_policy="regenerate"
    max_weight_staleness=0
    pause_generation_mode="in_place", sglang={{disable_overlap_schedule=true}}, {R3}
    pause_generation_mode="abort", {R3}
    pause_generation_mode="retract"
    sglang={{disable_overlap_schedule=false}}
    apply_chat_template=true, tool_key="tools"
    environment="m:Class", environment_samples="turn"
    environment="m:Class", global_batch_size=4
    grpo_std_normalization=false
    gamma=0.5, advantage_estimator="reinforce_plus_plus"
    gamma=0.5, grpo_std_normalization=false, advantage_estimator="own:plug"
    normalize_advantages=true, advantage_estimator="reinforce_plus_plus_mine:plug"
    overlong_penalty_factor=0.5, overlong_buffer_len=4
    eps_clip=0.1, eps_clip_high=0.28, eps_clip_c=3.0, policy_loss="gspo"
    eps_clip_c=3.0, dppo_delta=0.1, tis_clip=3.0, policy_loss="own:plug"
    eps_clip=0.1, ratio_anchor="rollout", policy_loss="dppo_mine:plug"
    dppo_delta=0.1, policy_loss="dppo_kl"
    kl_loss_type="k1", kl_loss_coef=0.1
    kl_coef=0.1, ref_routing="native", {R3}
    use_unbiased_kl=true, kl_loss_coef=0.1, opsm_delta=0.1, global_batch_size=8
    rollout_is_mode="mask", tis_clip=3.0, tis_clip_low=0.5, rollout_is="token"
    advantage_estimator="gdpo", reward_keys=["a", "b"], reward_weights=[1, 0.5]
    reward_keys=["a"], rm_type="boxed_remote_rm"
    reward_keys=["a"], rm_type="own:plug"
    reward_keys=["a"], rm_type="math", custom_rm_path="own:plug"
    reward_keys=["a"], rm_type="math", {DUMPS}
    {TAUGHT}, opd_kl_coef=0.5
    use_opd=true, opd_type="megatron", opd_teacher_load="x", rollout_temperature=0.7, rollout_top_k=20
    {SFT}, kl_loss_coef=0.1, kl_loss_type="k1", global_batch_size=2
    loss_type="sft", {DUMPS}, {R3}
    reuse_log_probs="on", global_batch_size=16
    {ADAPTER}
    lora_rank=4, transformer_overrides={{moe_shared_expert_overlap=false}}
    save_interval=2, save_hf="hf/{{rollout_id}}"
    route_stores=true, route_store_host="lo", {R3}
    plant_bug="bypass", ci_test=true, {R3}
    plant_bug="weights_frozen", check_weight_update_equal=true
    plant_fault="disk_full", kl_coef=0.1
    {EVAL}, eval_interval=3, eval_temperature=0.0, eval_max_concurrency=64
    wandb_group="g", use_wandb=true, mlflow_experiment_name="e", use_mlflow=true
    use_mlflow=true, tracker_tags=["t"], tracker_notes="n", metrics_port=0
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
    *rows(REFUSED),
    *(
        [f"debug_rollout_only=true, {text}", f"--debug-rollout-only cannot go with {flag}"]
        for text, flag in rows(OF_AN_ACTOR)
    ),
    *(
        [
            f"{R3}, {place}={{{harm}}}",
            f"--use-rollout-routing-replay cannot go with {place}.{harm[:9]}",
        ]
        for harm, _ in rows(NOT_REPLAYED)
        for place in ("transformer_overrides", "sglang")
    ),
    *(
        [
            f"use_routing_replay=true, transformer_overrides={{{harm}}}",
            f"--use-routing-replay cannot go with transformer_overrides.{harm[:9]}",
        ]
        for harm, _ in rows(NOT_REPLAYED)
    ),
]


@pytest.mark.parametrize("text, complaint", BROKEN)
def test_a_broken_rule_is_one_line_that_names_its_settings(text, complaint):
    with pytest.raises(ConfigError) as refused:
        check_static(*made(text))
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


GOOD = [
    *(text for (text,) in rows(PASSES)),
    *(f"{R3}, transformer_overrides={{{fine}}}" for _, fine in rows(NOT_REPLAYED)),
    *(f"transformer_overrides={{{harm}}}" for harm, _ in rows(NOT_REPLAYED)),  # without R3
]


@pytest.mark.parametrize("text", GOOD)
def test_settings_that_go_together_pass(text):
    check_static(*made(text))


def test_every_declared_requirement_has_a_row_that_breaks_it():
    """And so does each thing that a setting cannot go with, and each section's method that checks."""
    seen = set()
    for text, _ in BROKEN:
        try:
            found = list(broken(made(text)[0]))
        except ConfigError:  # of one setting by itself
            continue
        seen |= {(rule.name, rule.asked, rule.condition) for rule in found}
        seen |= {(rule.section, rule.asked, rule.condition) for rule in found}
    for section, info in RunConfig.model_fields.items():
        every = info.annotation.every_field
        asks = [(section, asked) for asked in every]
        for name in info.annotation.model_fields:
            asks += [(name, asked) for asked in requirements_of(name) if asked not in every]
        for name, asked in asks:
            each = asked.conditions if asked.verb == "cannot go with" else asked.conditions[:1]
            for condition in each:
                assert (name, asked, condition) in seen, f"no row: {name}: {asked.words()}"
        if any(getattr(method, "is_check", False) for method in vars(info.annotation).values()):
            assert (section, None, None) in seen, section


def test_every_name_that_a_requirement_asks_of_is_known():
    for name in places(RunConfig):
        for asked in requirements_of(name):
            for condition in asked.conditions:
                value_of(config(), condition.name)
                assert "unset" not in asked.words() and asked.words()[-1] == "."


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
