set -x
ROLLOUT_ARGS=(
   --rollout.batch_size 128
   --rollout.n_samples_per_prompt 8
   --rollout.temperature 0.9
   --train.batch_size 1024
   --train.dynamic_batch_enable
   --train.max_tokens_per_gpu 16192
   --rollout.max_tokens_per_gpu 16192
   --train.micro_batch_size 1
   --rollout.micro_batch_size 8
)
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path Qwen/Qwen3-4B \
   --vllm.num_engines 2 --vllm.enable_prefix_caching \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.init_coef 1e-5 --algo.kl.use_loss --algo.kl.estimator k2 \
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop \
   ${ROLLOUT_ARGS[@]}
