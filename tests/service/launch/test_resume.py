"""Each host is told to go on by its own option; what the command already says of it is replaced."""

from __future__ import annotations

import pytest

from foreshock_service.launch.resume import HOSTS, recognise, resuming, template_of


@pytest.mark.parametrize(
    ("command", "host"),
    [
        (["trl", "grpo", "--config", "a.yaml"], "trl"),
        (["python", "-m", "verl.trainer.main_ppo", "data.train_batch_size=8"], "verl"),
        (["torchrun", "pretrain_gpt.py", "--lr", "1e-4"], "megatron"),
        (["python", "train.py", "--rollout-batch-size", "8"], "slime"),
        (["python", "examples/start_rlvr_pipeline.py", "--config_name", "x"], "roll"),
        (["python", "train.py", "--lr", "1e-4"], None),
    ],
)
def test_a_host_is_recognised_only_beyond_doubt(command: list[str], host: str | None) -> None:
    found = recognise(command)
    assert (found.name if found else None) == host


def test_options_are_appended_and_those_given_are_replaced() -> None:
    trl = resuming(["trl", "--resume_from_checkpoint", "old", "--x", "1"], HOSTS["trl"].template, "/c/5", 5)
    assert trl == ["trl", "--x", "1", "--resume_from_checkpoint", "/c/5"]
    assert resuming(["m", "--load=/old", "--ckpt-step", "3"], HOSTS["megatron"].template, "/c/iter_0000010", 10) == [
        "m", "--load", "/c", "--ckpt-step", "10",
    ]  # fmt: skip
    verl = resuming(["m", "+trainer.resume_mode=auto", "a=b"], HOSTS["verl"].template, "/c/global_step_4", 4)
    assert verl == ["m", "a=b", "trainer.resume_mode=resume_path", "trainer.resume_from_path=/c/global_step_4"]


def test_a_template_must_name_the_checkpoint_and_only_known_fields() -> None:
    assert template_of("--from '{checkpoint}'") == ("--from", "{checkpoint}")
    with pytest.raises(ValueError, match="unknown field"):
        template_of("--from {ckpt}")
    with pytest.raises(ValueError, match="needs"):
        template_of("--resume")
    with pytest.raises(ValueError, match="not known"):
        resuming(["m"], HOSTS["megatron"].template, "/c", None)
