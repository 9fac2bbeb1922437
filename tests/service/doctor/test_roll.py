"""The reported configuration's conditions are named, each with its line; nothing is named on the consistent one."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

import pytest

from foreshock_service.doctor import roll
from foreshock_service.doctor.document import parse, read
from foreshock_service.doctor.finding import Finding, wrong
from foreshock_service.doctor.roll_version import UNKNOWN_VERSION, RollVersion, by_date, by_source, by_tag

HERE = Path(__file__).parent
REPORTED = HERE / "onpolicy.yaml"
NOVEMBER = by_date(dt.date(2025, 11, 28), "2025-11-28")
V020 = by_tag("v0.2.0")
CONDITIONS = {
    "on_policy_by_construction", "two_partitions", "truncated_sampling", "no_is_correction", "mixed_groups",
    "micro_batch_normalisation", "offload_cached_shards", "no_dual_clip", "logprobs_ignored", "old_log_prob_source",
}  # fmt: skip


def found(path: Path, version: RollVersion) -> dict[str, Finding]:
    return {f.id: f for f in roll.examine(read(path), version)}


def changed(*edits: tuple[str, str], version: RollVersion = V020, base: Path = REPORTED) -> dict[str, Finding]:
    text = base.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return {f.id: f for f in roll.examine(parse(text), version)}


def test_every_condition_of_the_reported_run_is_named() -> None:
    assert found(REPORTED, NOVEMBER).keys() >= CONDITIONS


def test_each_finding_quotes_its_line_and_says_why_and_what_to_change() -> None:
    lines = REPORTED.read_text().splitlines()
    for finding in found(REPORTED, NOVEMBER).values():
        assert finding.why
        assert finding.remedy
        if finding.line is not None:
            assert finding.path.rsplit(".", 1)[-1] in lines[finding.line - 1]
            assert f"line {finding.line}" in finding.evidence


def test_the_on_policy_product_is_told_in_numbers() -> None:
    evidence = found(REPORTED, NOVEMBER)["on_policy_by_construction"].evidence
    assert "512 sequences = 8 ranks × 1 × 64" in evidence


def test_mixed_groups_are_critical_between_2025_10_29_and_2026_02_04_and_nowhere_else() -> None:
    days = {"2025-10-28": False, "2025-10-29": True, "2026-02-03": True, "2026-02-04": False}
    for day, expected in days.items():
        seen = found(REPORTED, by_date(dt.date.fromisoformat(day), day))
        assert ("mixed_groups" in seen) is expected, day
    assert found(REPORTED, NOVEMBER)["mixed_groups"].severity == "critical"


def test_without_a_version_a_finding_says_for_which_it_holds() -> None:
    seen = found(REPORTED, UNKNOWN_VERSION)
    for name in ("mixed_groups", "micro_batch_normalisation", "offload_cached_shards", "logprobs_ignored"):
        assert "2026-02-04" in seen[name].versions
    assert found(REPORTED, NOVEMBER)["mixed_groups"].versions == ""


def test_mixed_groups_need_dynamic_batching_a_group_estimator_and_a_group() -> None:
    off = ("use_dynamic_batching_in_infer: true", "use_dynamic_batching_in_infer: false")
    assert "mixed_groups" not in changed(off, version=NOVEMBER)
    assert "mixed_groups" not in changed(('"grpo"', "reinforce"), version=NOVEMBER)
    grouped = ('"grpo"', "reinforce\nnorm_mean_type: group")
    assert "mixed_groups" in changed(grouped, version=NOVEMBER)
    one = ("num_return_sequences_in_group: 8", "num_return_sequences_in_group: 1")
    assert "mixed_groups" not in changed(one, version=NOVEMBER)


@pytest.mark.parametrize("version", [V020, by_tag("0.3.0")], ids=lambda v: v.name)
def test_nothing_wrong_is_named_on_the_consistent_configuration(version: RollVersion) -> None:
    findings = roll.examine(read(HERE / "consistent.yaml"), version)
    assert [f for f in findings if f.severity != "info"] == []
    assert not wrong(findings)


def test_each_repair_removes_its_own_finding_only() -> None:
    before = set(changed())
    repairs = {
        "two_partitions": ("43008", "30732"), "truncated_sampling": ("top_k: 100", "top_k: -1"),
        "no_dual_clip": ("ppo_epochs: 1", "ppo_epochs: 1\ndual_clip_loss: true"),
    }  # fmt: skip
    for name, repair in repairs.items():
        assert before - set(changed(repair)) == {name}


def test_left_out_sampling_keys_are_read_with_rolls_own_defaults() -> None:
    seen = changed(("    top_k: 100\n", ""), ("    top_p: 1\n", ""), ("    temperature: 1\n", ""))
    assert "default: actor_infer.generating_args.top_p: 0.7" in seen["truncated_sampling"].evidence
    assert seen["truncated_sampling"].line is None
    assert "0.95" in seen["temperature_one_sided"].evidence


def test_the_old_log_prob_is_recomputed_by_the_default_of_init_kl_coef_and_reused_without_it() -> None:
    assert "recomputed by a scoring pass" in changed()["old_log_prob_source"].title
    zero = ("ppo_epochs: 1", "ppo_epochs: 1\ninit_kl_coef: 0")
    reused = changed(zero)
    assert "detached" in reused["old_log_prob_source"].title
    assert "two_partitions" not in reused
    assert "recomputed" in changed(zero, version=NOVEMBER)["old_log_prob_source"].title
    assert "by version" in changed(zero, version=UNKNOWN_VERSION)["old_log_prob_source"].title


def test_a_reporters_own_key_that_roll_drops_is_named() -> None:
    seen = changed(("ppo_epochs: 1", "ppo_epochs: 1\ninfer_correction: true"))
    assert seen["unknown_key"].path == "infer_correction"


def test_several_updates_per_rollout_are_counted() -> None:
    seen = changed(("gradient_accumulation_steps: 64", "gradient_accumulation_steps: 16"))
    assert seen["several_optimizer_steps"].title.startswith("4 optimizer steps")


def test_what_an_interpolation_hides_is_not_judged() -> None:
    seen = changed(("top_k: 100", "top_k: ${oc.env:TOP_K}"), ("rollout_batch_size: 64", "rollout_batch_size: ${x.y}"))
    assert "truncated_sampling" not in seen
    assert "on_policy_by_construction" not in seen


def test_the_version_is_read_from_a_source_tree_by_what_its_code_says(tmp_path: Path) -> None:
    pipeline = tmp_path / "roll/pipeline/rlvr"
    pipeline.mkdir(parents=True)
    (pipeline / "rlvr_pipeline.py").write_text('dynamic_batching_shard(\nbatch.batch["prompt_id"] = torch.arange(1)')
    assert by_source(tmp_path).mixes_groups is True
    (pipeline / "rlvr_pipeline.py").write_text('batch.batch["prompt_id"] = torch.arange(1)\ndynamic_batching_shard(')
    assert by_source(tmp_path).mixes_groups is False
    with pytest.raises(ValueError, match="no ROLL checkout"):
        by_source(tmp_path / "elsewhere")


@pytest.mark.real_source
@pytest.mark.parametrize(("variable", "expected"), [("ROLL_HOME", V020), ("ROLL_HOME_BEFORE", NOVEMBER)])
def test_the_real_source_says_what_its_date_says(variable: str, expected: RollVersion) -> None:
    home = os.environ.get(variable)
    if not home:
        pytest.skip(f"{variable} is not set: ROLL's source is not here")
    read_off = by_source(Path(home))
    for name in ("mixes_groups", "micro_batch_mean", "reuses_old", "clears_shards", "logprobs_setting", "correction"):
        assert getattr(read_off, name) == getattr(expected, name), name


def test_the_seeds_own_file_is_read_where_it_is_at_hand() -> None:
    seed = Path(os.environ.get("FORESHOCK_SEED", HERE.parents[2] / "../shared/seed/config.yaml"))
    if not seed.exists():
        pytest.skip("the seed's configuration is not here")
    assert found(seed, NOVEMBER).keys() >= CONDITIONS
