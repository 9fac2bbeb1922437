#!/bin/bash
MODE=${MODE:-colocate}
CKPT_ARGS=(
   --hf-checkpoint /models/Qwen3-4B
   #--hf-checkpoint /models/Qwen3-4B-FP8
   --ref-load /models/Qwen3-4B_torch_dist
)
ROLLOUT_ARGS=(
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --rollout-top-p 0.95
   --global-batch-size 256
)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-tis
)
# default dropout in megatron is 0.1
MISC_ARGS=( --attention-dropout 0.0 --hidden-dropout 0.0 )
if [ "$MODE" = debug ]; then
   DEBUG_ARGS=( --rollout-top-k 20 )
fi
ray job submit --runtime-env-json="{ \"env_vars\": {} }" \
   -- python3 train.py \
   --colocate \
   ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]} ${GRPO_ARGS[@]} ${MISC_ARGS[@]} ${DEBUG_ARGS[@]}
