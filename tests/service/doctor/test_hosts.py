"""verl, slime, TRL, OpenRLHF: a faulty file's conditions are named with their lines, a consistent one has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreshock_service.cli import main
from foreshock_service.doctor import hosts
from foreshock_service.doctor.document import UnreadableError
from foreshock_service.doctor.finding import Finding
from foreshock_service.doctor.roll_version import UNKNOWN_VERSION

HERE = Path(__file__).parent / "hosts"
NEWEST = {"verl": "0.9.1", "slime": None, "trl": "1.16.0", "openrlhf": None}
CONSISTENT = {
    "verl": "verl_consistent.sh", "slime": "slime_consistent.sh", "trl": "trl_consistent.py",
    "openrlhf": "openrlhf_consistent.sh",
}  # fmt: skip
FAULTY = {
    "verl_faulty.yaml": {
        "several_optimizer_steps", "old_log_prob_source", "two_partitions", "truncated_sampling",
        "temperature_one_sided",
        "logprobs_not_collected", "sequence_weights_long", "adapter_never_synchronised", "quantised_rollout",
        "clip_ratio_ignored", "kl_k1_loss", "kl_twice", "context_parallel_token_loss",
    },
    "slime_faulty.sh": {
        "several_optimizer_steps", "asynchronous", "truncated_sampling", "correction_not_called", "dropout_in_training",
        "quantised_rollout", "clip_off", "no_dual_clip", "kl_k1_loss",
    },
    "trl_faulty.yaml": {
        "several_optimizer_steps", "old_log_prob_source", "truncated_sampling", "penalised_sampling",
        "sequence_weights_long", "weights_reloaded_from_disk", "dropout_in_training", "clip_off", "no_dual_clip",
        "no_reference",
    },
    "openrlhf_faulty.json": {
        "several_optimizer_steps", "asynchronous", "two_partitions", "truncated_sampling", "is_weight_unbounded",
        "stale_cache", "dropout_in_training", "clip_off", "no_dual_clip", "kl_k1_loss",
    },
}  # fmt: skip


def examined(path: Path, version: str | None = None) -> tuple[str, dict[str, Finding]]:
    document = hosts.read(path)
    host = hosts.find(document, path, None)
    return host.name, {f.id: f for f in hosts.examine(host, document, version, UNKNOWN_VERSION)}


def changed(tmp_path: Path, name: str, *edits: tuple[str, str], version: str | None = None) -> dict[str, Finding]:
    text = (HERE / name).read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / name
    path.write_text(text)
    return examined(path, version)[1]


@pytest.mark.parametrize("name", CONSISTENT)
def test_nothing_wrong_is_named_on_a_consistent_file(name: str) -> None:
    for version in (None, NEWEST[name]):
        recognised, found = examined(HERE / CONSISTENT[name], version)
        assert recognised == name
        assert [f.id for f in found.values() if f.severity != "info"] == []
        assert "on_policy_by_construction" in found


@pytest.mark.parametrize("file", FAULTY)
def test_every_condition_of_a_faulty_file_is_named_and_nothing_else(file: str) -> None:
    assert set(examined(HERE / file)[1]) == FAULTY[file]


@pytest.mark.parametrize("file", [*FAULTY, *CONSISTENT.values()])
def test_a_finding_quotes_a_line_that_holds_its_key(file: str) -> None:
    lines = (HERE / file).read_text().replace("-", "_").splitlines()
    for finding in examined(HERE / file)[1].values():
        assert finding.why
        assert finding.remedy
        if finding.line is not None:
            assert f"line {finding.line}:" in finding.evidence
            assert finding.path.rsplit(".", 1)[-1].split("[")[0] in lines[finding.line - 1]


def test_each_repair_removes_its_own_finding_only(tmp_path: Path) -> None:
    repairs = [
        ("verl_faulty.yaml", "two_partitions", ("batch_size_per_gpu: 4", "batch_size_per_gpu: 2")),
        ("verl_faulty.yaml", "truncated_sampling", ("top_k: 50", "top_k: -1")),
        ("verl_faulty.yaml", "temperature_one_sided", ("raw_logprobs", "processed_logprobs")),
        ("verl_faulty.yaml", "sequence_weights_long", ("rollout_is: sequence", "rollout_is: token")),
        ("verl_faulty.yaml", "adapter_never_synchronised", ("backend: nccl", "backend: naive")),
        ("verl_faulty.yaml", "clip_ratio_ignored", ("clip_ratio: 0.1", "clip_ratio_low: 0.1")),
        ("verl_faulty.yaml", "kl_twice", ("use_kl_in_reward: true", "use_kl_in_reward: false")),
        ("slime_faulty.sh", "truncated_sampling", ("--rollout-top-k 20", "--rollout-top-k -1")),
        ("slime_faulty.sh", "quantised_rollout", ("Qwen3-4B-FP8", "Qwen3-4B")),
        ("slime_faulty.sh", "dropout_in_training", ("python3", "--attention-dropout 0 --hidden-dropout=0 python3")),
        ("trl_faulty.yaml", "weights_reloaded_from_disk", ("vllm_mode: colocate", "vllm_mode: server")),
        ("trl_faulty.yaml", "sequence_weights_long", ("max_completion_length: 4096", "max_completion_length: 256")),
        ("trl_faulty.yaml", "dropout_in_training", ("use_peft: true", "use_peft: true\nlora_dropout: 0.0")),
        ("openrlhf_faulty.json", "stale_cache", ('"enable_prefix_caching": true', '"enable_prefix_caching": false')),
        ("openrlhf_faulty.json", "is_weight_unbounded", ("seq-mask-tis", "tis")),
        ("openrlhf_faulty.json", "kl_k1_loss", ('"estimator": "k1"', '"estimator": "k3"')),
    ]  # fmt: skip
    for file, name, edit in repairs:
        assert FAULTY[file] - set(changed(tmp_path, file, edit)) == {name}


def test_without_correction_the_engine_is_named(tmp_path: Path) -> None:
    assert "no_is_correction" in changed(tmp_path, "verl_consistent.sh", ("rollout_is=token", "rollout_is=null"))
    assert "no_is_correction" in changed(tmp_path, "slime_consistent.sh", ("   --use-tis\n", ""))
    off = ("use_vllm=True,", "use_vllm=True, vllm_importance_sampling_correction=False,")
    assert "no_is_correction" in changed(tmp_path, "trl_consistent.py", off)
    bare = changed(tmp_path, "openrlhf_consistent.sh", ("--algo.advantage.is_correction_enable ", ""))
    assert {"no_is_correction", "logprobs_not_collected"} <= set(bare)


def test_a_bypass_or_one_detached_step_says_where_old_comes_from(tmp_path: Path) -> None:
    bypass = ("rollout_is=token", "bypass_mode=true")
    assert "rollout engine's" in changed(tmp_path, "verl_consistent.sh", bypass)["old_log_prob_source"].title
    detached = changed(tmp_path, "slime_consistent.sh")["old_log_prob_source"]
    assert "detached" in detached.title
    engine = changed(tmp_path, "slime_consistent.sh", ("--use-tis", "--use-rollout-logprobs"))
    assert "rollout engine's" in engine["old_log_prob_source"].title
    off = ("use_vllm=True", "use_vllm=False")
    assert "detached" in changed(tmp_path, "trl_consistent.py", off)["old_log_prob_source"].title
    uneven = changed(tmp_path, "trl_consistent.py", off, ("use_vllm", "steps_per_generation=3, use_vllm"))
    assert "recomputed" in uneven["old_log_prob_source"].title


def test_what_a_version_repaired_is_said_only_before_it() -> None:
    verl, trl = HERE / "verl_faulty.yaml", HERE / "trl_faulty.yaml"
    assert "verl before 0.9" in examined(verl)[1]["context_parallel_token_loss"].versions
    assert "context_parallel_token_loss" in examined(verl, "0.8.0")[1]
    assert "context_parallel_token_loss" not in examined(verl, "0.9.1")[1]
    assert examined(trl)[1]["weights_reloaded_from_disk"].severity == "critical"
    for version, stale, raw in (("0.23.0", False, True), ("1.9.0", True, False), ("1.16.0", False, False)):
        found = examined(trl, version)[1]
        assert ("weights_reloaded_from_disk" in found, "temperature_one_sided" in found) == (stale, raw)


def test_openrlhfs_flat_options_of_before_2026_04_are_read() -> None:
    name, found = examined(HERE / "openrlhf_flat.sh")
    assert name == "openrlhf"
    assert {"on_policy_by_construction", "two_partitions", "no_is_correction", "no_reference"} <= set(found)
    assert "micro_train_batch_size: 8" in found["two_partitions"].evidence


def test_what_the_environment_decides_is_not_judged(tmp_path: Path) -> None:
    unknown = changed(
        tmp_path, "verl_consistent.sh", ("rollout_is=token", "rollout_is=${IS:-null}"),
        ("ppo_max_token_len_per_gpu=${TOKENS}", "ppo_max_token_len_per_gpu=$BUDGET"),
        ("prob_max_token_len_per_gpu=${TOKENS}", "prob_max_token_len_per_gpu=1"),
        ("train_batch_size=128", "train_batch_size=$((N * 8))"),
    )  # fmt: skip
    assert [f.id for f in unknown.values() if f.severity != "info"] == []
    assert "on_policy_by_construction" not in unknown


def test_the_command_recognises_the_host_or_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(HERE / "verl_consistent.sh")) == 0
    assert "(verl)" in capsys.readouterr().out
    assert run(str(HERE / "openrlhf_faulty.json"), "--json") == 1
    for finding in json.loads(capsys.readouterr().out)["findings"]:
        assert finding.keys() >= {"id", "severity", "title", "path", "line", "evidence", "remedy"}
    assert run(str(HERE / "trl_faulty.yaml"), "--host", "trl", "--host-version", "1.16.0") == 1
    assert "(trl 1.16.0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("trl_faulty.yaml", ["--host", "areal"], "is not known"),
        ("trl_faulty.yaml", ["--host-version", "newest"], "must be as 1.16.0"),
        ("trl_faulty.yaml", ["--roll-version", "v0.2.0"], "is for ROLL"),
        ("../onpolicy.yaml", ["--host-version", "1.0"], "not for ROLL"),
    ],
)  # fmt: skip
def test_an_option_that_does_not_fit_ends_with_2(
    file: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(HERE / file), *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "echo hello\n", "passes no options"), ("a.py", "x = 1\n", "0 calls of GRPOConfig"),
        ("a.py", "GRPOConfig(**kwargs)\n", "what \\*\\* holds"), ("a.py", "x = (\n", "no valid Python, line 1"),
    ],
)  # fmt: skip
def test_a_file_without_a_configuration_says_so(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UnreadableError, match=message):
        hosts.read(path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0)
