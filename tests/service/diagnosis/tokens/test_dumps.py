"""What only tokens can tell, on made-up faults beside their healthy twin; and files that are no dumps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from foreshock.dumps.schema import METADATA_KEY, VERSION, About
from foreshock.monitor import Monitor
from foreshock_service.cli import table
from foreshock_service.diagnosis.tokens import readers
from foreshock_service.diagnosis.tokens.batches import DumpError
from foreshock_service.diagnosis.tokens.report import DumpDiagnosis, diagnose_dump
from tests.service.diagnosis.tokens.dumps import Rows, dumped, lab_dump

Spoil = Callable[[dict[str, Any]], None]
STEPS, ONSET = 8, 4


def made(folder: Path, spoil: Spoil, rows: Rows | None = None, pair: str = "mismatch", **arguments: Any) -> Path:
    """A dump of STEPS steps whose observations are spoilt from step ONSET on."""
    rows = rows or Rows()

    def play(monitor: Monitor) -> None:
        for step in range(STEPS):
            given: dict[str, Any] = rows.observed()
            if step >= ONSET:
                spoil(given)
            monitor.observe(pair, **given)
            monitor.end_step(step)

    dumped(folder, play, **arguments)
    return folder


def names(found: DumpDiagnosis) -> list[str]:
    return [cause.name for cause in found.diagnosis.causes]


def test_rows_that_are_fine_have_nothing_wrong(tmp_path: Path) -> None:
    found = diagnose_dump([str(made(tmp_path, lambda given: None))])
    assert (found.verdict, found.onset) == ("healthy", None)
    assert found.tokens == STEPS * 32 * 40


def test_permuted_rows_are_proven_by_the_row_that_fits_better(tmp_path: Path) -> None:
    def roll(given: dict[str, Any]) -> None:
        given["a"] = given["a"].roll(1, 0)

    found = diagnose_dump([str(made(tmp_path, roll))])
    assert (found.verdict, found.onset) == ("ill", ONSET)
    assert names(found)[0] == "misaligned_rows"
    assert found.evidence is not None
    assert found.evidence.moved_share == 1.0
    assert found.evidence.earlier_share == 0.0


def test_an_array_that_slid_by_one_place_is_told_from_permuted_rows(tmp_path: Path) -> None:
    def slide(given: dict[str, Any]) -> None:
        given["a"] = given["a"].roll(1, 1)

    found = diagnose_dump([str(made(tmp_path, slide))])
    assert found.evidence is not None
    assert found.evidence.shifted_share == pytest.approx(1.0, abs=0.05)
    assert found.evidence.moved_share == 0.0


def test_one_token_id_that_is_scored_differently_is_named(tmp_path: Path) -> None:
    def spoil(given: dict[str, Any]) -> None:
        given["token_ids"][:, 17] = 2
        given["a"][:, 17] -= 3.0

    found = diagnose_dump([str(made(tmp_path, spoil))])
    assert names(found)[0] == "special_tokens"
    assert found.evidence is not None
    assert found.evidence.worst_token == 2
    assert found.token_ids[0].what == "token 2"


def test_chunk_boundaries_are_found_with_their_size(tmp_path: Path) -> None:
    def spoil(given: dict[str, Any]) -> None:
        given["a"][:, 64::64] -= 2.0

    found = diagnose_dump([str(made(tmp_path, spoil, Rows(rows=16, width=400)))])
    assert "chunk_boundaries" in names(found)
    assert found.evidence is not None
    assert found.evidence.chunk == 64


def test_one_rank_alone_is_named(tmp_path: Path) -> None:
    for rank in range(3):

        def spoil(given: dict[str, Any], rank: int = rank) -> None:
            if rank == 2:
                given["a"] += 0.3 * torch.randn(given["a"].shape, generator=torch.Generator().manual_seed(1))

        made(tmp_path, spoil, Rows(seed=rank), rank=rank, world=3, launch="one")
    found = diagnose_dump([str(tmp_path)])
    assert "one_rank" in names(found)
    assert found.evidence is not None
    assert found.evidence.worst_rank == "trainer 2"
    assert [place.what for place in found.ranks] == ["trainer 0", "trainer 1", "trainer 2"]


@pytest.mark.parametrize("mixed", [False, True])
def test_groups_that_hold_two_prompts_are_seen_though_no_log_prob_is_off(mixed: bool, tmp_path: Path) -> None:
    prompts = torch.arange(32) // 8
    groups = torch.roll(prompts, 4) if mixed else prompts

    def play(monitor: Monitor) -> None:
        for step in range(3):
            advantages = torch.tensor([1.0, -1.0] * 16)
            given = Rows(seed=step).observed()
            monitor.observe("mismatch", **given, group_ids=groups, prompt_ids=prompts, advantages=advantages)
            monitor.end_step(step)

    dumped(tmp_path, play)
    found = diagnose_dump([str(tmp_path)])
    assert found.verdict == ("ill" if mixed else "healthy")
    assert ("mixed_groups" in names(found)) == mixed
    assert found.evidence is not None
    assert found.evidence.mixed_groups == (1.0 if mixed else 0.0)


def test_lag_and_lengths_and_positions_are_shown(tmp_path: Path) -> None:
    def spoil(given: dict[str, Any]) -> None:
        lag = torch.arange(32) % 2
        given["versions"] = lag
        given["a"] += 0.5 * lag[:, None] * torch.randn(32, 40, generator=torch.Generator().manual_seed(1))

    found = diagnose_dump([str(made(tmp_path, spoil))])
    assert found.evidence is not None
    assert found.evidence.lag_growth is not None
    assert found.evidence.lag_growth > 100
    assert [place.what for place in found.lags] == ["lag 0", "lag 1"]
    assert [place.what for place in found.positions][:4] == ["position 0", "position 1", "position 2–3", "position 4–7"]
    assert [place.what for place in found.lengths] == ["length 32–63"]
    assert found.values[0]["staleness.mean"] == 0.5


def test_non_finite_log_probs_are_ill_whatever_else(tmp_path: Path) -> None:
    def spoil(given: dict[str, Any]) -> None:
        given["a"][3, 5] = float("nan")
        given["b"][4, 5] = -9999.0

    found = diagnose_dump([str(made(tmp_path, spoil))], since=ONSET)
    assert found.verdict == "ill"
    assert found.nonfinite == {"mismatch.nonfinite": 4.0, "mismatch.sentinels": 4.0}


def test_a_healthy_dump_serves_as_baseline_for_one_that_is_ill_throughout(tmp_path: Path) -> None:
    healthy, ill = tmp_path / "healthy", tmp_path / "ill"
    made(healthy, lambda given: None)

    def play(monitor: Monitor) -> None:
        for step in range(STEPS):
            given = Rows(seed=10 + step).observed()
            given["a"] += 0.05 * torch.randn(32, 40, generator=torch.Generator().manual_seed(step))
            monitor.observe("mismatch", **given)
            monitor.observe("policy", **Rows(seed=50 + step).observed())
            monitor.end_step(step)

    dumped(ill, play)
    assert diagnose_dump([str(ill)]).verdict == "healthy", "alone it has nothing to be held against"
    found = diagnose_dump([str(ill)], healthy=[str(healthy)])
    assert (found.verdict, found.onset) == ("ill", 0)


# --- formats ---------------------------------------------------------------------------------------------------------


def prime_rl_dump(folder: Path, steps: int = STEPS, onset: int = ONSET) -> Path:
    """As prime-rl's exporter writes: a prompt that is masked out, null for what is not finite."""
    generator = np.random.default_rng(0)
    for step in range(steps):
        target = folder / "token_exports" / f"step_{step}"
        target.mkdir(parents=True)
        lines = []
        for index in range(24):
            b = -2 * generator.random(30)
            a = b * (1.3 if step >= onset else 1.0) + 1e-4 * generator.standard_normal(30)
            record: dict[str, Any] = {
                "schema_version": 1, "step": step, "rank": 0, "micro_step": index // 8, "micro_sequence_idx": index % 8,
                "export_sequence_idx": index, "env_name": "math", "token_ids": list(range(30)),
                "position_ids": list(range(30)), "loss_mask": [False] * 5 + [True] * 25, "advantages": [0.5] * 30,
                "inference_logprobs": [0.0] * 5 + b[5:].tolist(), "trainer_logprobs": a.tolist(),
                "entropy": [0.1] * 30, "mismatch_kl": [None] * 30, "is_masked": [None] * 30,
            }  # fmt: skip
            if step == onset and index == 0:
                record["trainer_logprobs"][9] = None
            lines.append(json.dumps(record))
        (target / "rank_0.jsonl").write_text("\n".join(lines) + "\n")
        (target / "STABLE").touch()
    return folder


def test_prime_rl_s_token_export_is_read_as_it_is_written(tmp_path: Path) -> None:
    found = diagnose_dump([str(prime_rl_dump(tmp_path))])
    assert (found.verdict, found.onset, found.pair) == ("ill", ONSET, "mismatch_current")
    assert found.tokens == STEPS * 24 * 25
    assert found.nonfinite == {"mismatch_current.nonfinite": 1.0}
    assert found.diagnosis.names("temperature")
    assert found.values[0]["mismatch_current.tokens"] == 24 * 25 - 1


def test_a_line_that_is_still_being_written_is_passed_over(tmp_path: Path) -> None:
    folder = prime_rl_dump(tmp_path, steps=1, onset=9)
    file = folder / "token_exports" / "step_0" / "rank_0.jsonl"
    file.write_text(file.read_text() + '{"schema_version": 1, "st')
    assert diagnose_dump([str(file)]).tokens == 24 * 25


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("rank_0.jsonl", b'{"a": 1}\n', "no line of prime-rl"),
        ("log.jsonl", b"{}\n", "no token export of prime-rl"),
        ("x.parquet", b"PAR1garbage", "x.parquet"),
        ("x.txt", b"", "neither a Parquet file"),
    ],
)
def test_what_is_no_dump_is_refused_by_name(name: str, content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DumpError, match=why):
        diagnose_dump([str(tmp_path / name)])


def test_an_empty_folder_a_foreign_table_and_a_newer_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no dump there"):
        diagnose_dump([str(tmp_path)])
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"step": [1]}), foreign)
    with pytest.raises(DumpError, match="no column rank"):
        diagnose_dump([str(foreign)])
    table = pq.read_table(next(lab_dump("none")[0].rglob("*.parquet")))
    words = table.set_column(table.schema.get_field_index("rank"), "rank", pa.array(["a"] * len(table)))
    pq.write_table(words, tmp_path / "words.parquet")
    with pytest.raises(DumpError, match="column rank is string"):
        diagnose_dump([str(tmp_path / "words.parquet")])
    holes = table.set_column(table.schema.get_field_index("row"), "row", pa.nulls(len(table), pa.int32()))
    pq.write_table(holes, tmp_path / "holes.parquet")
    with pytest.raises(DumpError, match="row is null"):
        diagnose_dump([str(tmp_path / "holes.parquet")])
    newer = msgspec.json.encode(About(version=VERSION + 1))
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: newer}), tmp_path / "new.parquet")
    with pytest.raises(DumpError, match="dump version 2"):
        diagnose_dump([str(tmp_path / "new.parquet")])


def test_a_dump_whose_tokens_were_sorted_by_another_tool_is_refused(tmp_path: Path) -> None:
    table = pq.read_table(next(lab_dump("none")[0].rglob("*.parquet")))
    pq.write_table(table.sort_by("token"), tmp_path / "sorted.parquet")
    with pytest.raises(DumpError, match="do not stand together"):
        diagnose_dump([str(tmp_path / "sorted.parquet")])


def test_a_file_in_many_row_groups_gives_the_same_as_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = diagnose_dump([str(made(tmp_path / "one", lambda given: given["a"].mul_(1.2)))])
    monkeypatch.setattr("foreshock.dumps.files.GROUP_ROWS", 100)
    monkeypatch.setattr("foreshock_service.diagnosis.tokens.readers.parquet.UNIT_ROWS", 300)
    many_folder = made(tmp_path / "many", lambda given: given["a"].mul_(1.2))
    assert len(readers.units(readers.sources([str(many_folder)]))) > 3 * STEPS
    many = diagnose_dump([str(many_folder)])
    assert names(many) == names(whole)
    for one, other in zip(whole.values, many.values, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


# --- the command -----------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> tuple[int, str]:
    entry = next(e for e in table.COMMANDS if e.name == "diagnose")
    import typer

    from foreshock_service.cli.diagnose import diagnose

    assert entry.attribute == "diagnose"
    app = typer.Typer()
    app.command()(diagnose)
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_the_command_says_0_healthy_1_ill_2_unreadable(tmp_path: Path) -> None:
    assert invoke(str(lab_dump("none")[0]))[0] == 0
    code, text = invoke(f"{lab_dump('stale_parameters')[0]}/**/*.parquet")
    assert code == 1
    assert "ILL: " in text
    assert "stale_trainer_parameters" in text
    assert "what decides" in text
    assert "mean |δ| by position" in text
    code, text = invoke(str(tmp_path))
    assert code == 2
    assert "no dump there" in text


def test_the_command_s_json_holds_causes_and_numbers() -> None:
    code, text = invoke("--json", str(lab_dump("stale_parameters")[0]))
    told = json.loads(text)
    assert code == 1
    assert told["verdict"] == "ill"
    assert told["diagnosis"]["causes"][0]["speaks_for"]
    assert told["evidence"]["moved_share"] is not None
