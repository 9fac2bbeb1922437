python3 train.py \
   --hf-checkpoint /models/Qwen3-4B-FP8 \
   --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 4 \
   --rollout-top-k 20 \
   --custom-tis-function-path mis.compute_mis_weights_with_cp \
   --use-kl-loss --kl-loss-coef 0.01 \
   --eps-clip 1.0 \
   --update-weights-interval 2
