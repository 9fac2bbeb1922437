from trl.trainer.grpo_config import GRPOConfig

LENGTH = 4096
args = GRPOConfig(
    output_dir="out",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_completion_length=LENGTH,
    temperature=0.7,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_importance_sampling_mode="token_truncate",
    beta=0.001,
)
