# The servers of one example environment, one rollout, then their end.  uv must be on PATH.
site=$(python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
out=$PWD
cd "$site"
head -1 resources_servers/example_single_tool_call/data/example.jsonl > "$out/in.jsonl"
nemo_gym_run "+config_paths=[resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml,responses_api_models/vllm_model/configs/vllm_model.yaml]" \
    +policy_base_url=$OPENAI_BASE_URL +policy_api_key=$OPENAI_API_KEY +policy_model_name=$OPENAI_MODEL > "$out/servers" 2>&1 &
servers=$!
for _ in $(seq 100); do
    grep -q "All .* servers ready" "$out/servers" && break
    kill -0 $servers || { tail -20 "$out/servers"; exit 1; }
    sleep 4
done
nemo_gym_collect_rollouts +agent_name=example_single_tool_call_simple_agent "+input_jsonl_fpath=$out/in.jsonl" "+output_jsonl_fpath=$out/rollouts.jsonl" +limit=1 2>&1 | tail -5
kill -INT $servers
grep -q '"reward": *1' "$out/rollouts.jsonl" && echo 1 > "$R3TRAIN_REWARD_FILE" || { tail -c 600 "$out/rollouts.jsonl"; echo 0 > "$R3TRAIN_REWARD_FILE"; }
