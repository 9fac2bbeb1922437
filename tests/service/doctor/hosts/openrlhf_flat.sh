python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen3-4B --vllm_num_engines 2 \
   --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 1024 \
   --micro_train_batch_size 8 --micro_rollout_batch_size 16 --init_kl_coef 0
