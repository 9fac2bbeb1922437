"""The same run is read alike from every format that people have, through noise, cuts and odd spellings."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tests.service.check import logs

BREAK = 40
ILL = list(logs.steps(break_at=BREAK))
WELL = list(logs.steps())


def jsonl(folder: Path, rows: list[dict[str, float]]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(json.dumps(logs.trl(r)) for r in rows))
    return path


def trainer_state(folder: Path, rows: list[dict[str, float]]) -> Path:
    path = folder / "trainer_state.json"
    history = [logs.trl(r) for r in rows] + [{"step": len(rows), "train_runtime": 12.0, "train_loss": 0.1}]
    path.write_text(json.dumps({"best_metric": None, "global_step": len(rows), "log_history": history}, indent=2))
    return path


def json_array(folder: Path, rows: list[dict[str, float]]) -> Path:
    path = folder / "history.json"
    path.write_text(json.dumps([logs.trl(r) for r in rows]))
    return path


def columns(folder: Path, rows: list[dict[str, float]]) -> Path:
    path = folder / "columns.json"
    path.write_text(json.dumps({name: [logs.trl(r)[name] for r in rows] for name in logs.trl(rows[0])}, indent=1))
    return path


def csv_file(folder: Path, rows: list[dict[str, float]]) -> Path:
    path = folder / "metrics.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(logs.trl(rows[0])))
        writer.writeheader()
        writer.writerows(logs.trl(r) for r in rows)
    return path


def wandb_csv(folder: Path, rows: list[dict[str, float]]) -> Path:
    """W&B's export of a chart: one run's columns with extremes, and another run's."""
    path = folder / "wandb_export.csv"
    names = list(logs.verl(rows[0]))
    titles = ["Step"]
    for name in names:
        titles += [f"brisk-river-7 - {name}", f"brisk-river-7 - {name}__MIN", f"brisk-river-7 - {name}__MAX"]
    titles.append("calm-sea-8 - actor/entropy")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(titles)
        for r in rows:
            cells: list[object] = [r["step"]]
            for value in logs.verl(r).values():
                cells += [value, -1e9, 1e9]
            writer.writerow([*cells, 99.0])
    return path


def trackio_jsonl(folder: Path, rows: list[dict[str, float]]) -> Path:
    path = folder / "trackio.jsonl"
    told = ({"timestamp": "2026-01-01T00:00:00", "step": r["step"], "metrics": logs.trl(r)} for r in rows)
    path.write_text("\n".join(map(json.dumps, told)) + "\n")
    return path


def hf_console(folder: Path, rows: list[dict[str, float]]) -> Path:
    """Python literals without step numbers, between carriage returns of a progress bar."""
    path = folder / "train.log"
    lines = ["Loading checkpoint shards: 100%|██████████| 2/2 [00:01<00:00]", "{'learning_rate': 1e-06, 'seed': 3}"]
    for i, r in enumerate(rows):
        line = {k: v for k, v in logs.trl(r).items() if k != "step"}
        lines.append(f"\r  {i}%|▏  | {i}/60 [00:0{i % 10}<00:30, 1.2it/s]\r{{**line}}".replace("{**line}", str(line)))
    path.write_text("\n".join(lines))
    return path


def hf5_console(folder: Path, rows: list[dict[str, float]]) -> Path:
    """Newer releases print every number as a text."""
    path = folder / "train5.log"
    told = ({k: f"{v:.5g}" for k, v in logs.trl(r).items() if k != "step"} for r in rows)
    path.write_text("\n".join(map(str, told)))
    return path


def verl_console(folder: Path, rows: list[dict[str, float]]) -> Path:
    """Ray's prefix in colour, Chinese text, a configuration dump."""
    path = folder / "verl.log"
    lines = ["{'actor': {'optim': {'lr': 1e-06, 'loss': 3}}, 'trainer': {'logger': ['console']}}", "训练开始：共六十步"]
    for r in rows:
        told = " - ".join(f"{name}:{value}" for name, value in logs.verl(r).items())
        lines.append(f"\x1b[36m(TaskRunner pid=411)\x1b[0m step:{r['step']} - timing_s/gen:np.float64(1.5) - {told}")
        lines.append("\x1b[33mWARNING\x1b[0m 显存不足，正在清理缓存 - retry:3")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def slime_console(folder: Path, rows: list[dict[str, float]]) -> Path:
    """Rollouts and optimizer steps on lines of their own."""
    path = folder / "slime.log"
    lines = []
    for r in rows:
        rollout = {"rollout/raw_reward": r["reward"], "rollout/response_len/mean": r["length"]}
        lines.append(f"(RolloutManager pid=9) [2026-01-01 00:00:00] rollout.py:99 - rollout {r['step'] - 1}: {rollout}")
        train = {"train/loss": r["loss"], "train/entropy_loss": r["entropy"], "train/grad_norm": r["grad_norm"]}
        lines.append(f"(Train pid=8) [2026-01-01 00:00:01] model.py:917 - step {r['step'] - 1}: {train}")
        lines.append(f"(Train pid=8) perf {r['step'] - 1}: {{'perf/step_time': 12.1}}")
    path.write_text("\n".join(lines))
    return path


def nemo_console(folder: Path, rows: list[dict[str, float]]) -> Path:
    path = folder / "nemo.log"
    lines = []
    for r in rows:
        lines += [
            f"========================= Step {r['step']}/60 =========================",
            "▶ Preparing batch...",
            "📊 Training Results:",
            f"  • Loss: {r['loss']:.4f}",
            f"  • Avg Reward: {r['reward']:.4f}",
            f"  • Approx Entropy: {r['entropy']:.4f}",
            "  • Generation KL Error: 0.0005",
            f"  • Mean Generation Length: {r['length']:.4f}",
        ]
    path.write_text("\n".join(lines))
    return path


def openrlhf_console(folder: Path, rows: list[dict[str, float]]) -> Path:
    path = folder / "openrlhf.log"
    lines = []
    for r in rows:
        told = {
            "policy_loss": r["loss"],
            "reward": r["reward"],
            "entropy_loss": r["entropy"],
            "actor_grad_norm": r["grad_norm"],
            "response_length": r["length"],
        }
        lines.append("Train epoch [1/1]:  50%|█████     | 1/2 [00:02<00:02, policy_loss=9.9, reward=9]")
        lines.append(f"(PPOTrainer pid=3) ✨ Global step {r['step']}: {told}")
    path.write_text("\n".join(lines))
    return path


def prime_console(folder: Path, rows: list[dict[str, float]]) -> Path:
    """A line a micro-step before each step's own."""
    path = folder / "prime.log"
    lines = []
    for r in rows:
        lines.append("12:00:00 DEBUG Micro Step 1/8 | Loss: 9.9 | Entropy: 9.9")
        lines.append(
            f"12:00:01 SUCCESS Step {r['step']} | Time: 6.2s | Reward: {r['reward']:.4f} | Loss: {r['loss']:.4f} | "
            f"Entropy: {r['entropy']:.4f} | Grad. Norm: {r['grad_norm']:.4f}"
        )
    path.write_text("\n".join(lines))
    return path


def bar_console(folder: Path, rows: list[dict[str, float]]) -> Path:
    path = folder / "bar.log"
    path.write_text(
        "\r".join(
            f"GRPO:  1%|▏| {r['step']}/60 [00:10<10:00, 1.0s/it, loss={r['loss']:.4f}, reward={r['reward']:.4f}, "
            f"entropy={r['entropy']:.4f}]"
            for r in rows
        )
    )
    return path


def tensorboard(folder: Path, rows: list[dict[str, float]]) -> Path:
    """A folder with one event file, written by TensorBoard's own writer, one event a scalar."""
    writer = EventFileWriter(str(folder / "tb"))
    for i, r in enumerate(rows):
        for name, value in logs.trl(r).items():
            if name != "step":
                said = Summary(value=[Summary.Value(tag=f"train/{name}", simple_value=value)])
                writer.add_event(Event(wall_time=1e9 + i, step=int(r["step"]), summary=said))
    writer.close()
    return folder / "tb"


FORMATS = [
    (jsonl, "jsonl"), (trainer_state, "trainer_state"), (json_array, "json"), (columns, "json"), (csv_file, "csv"),
    (wandb_csv, "csv"), (trackio_jsonl, "jsonl"), (hf_console, "dict_console"), (hf5_console, "dict_console"),
    (verl_console, "verl_console"), (slime_console, "dict_console"), (nemo_console, "nemo_rl_console"),
    (openrlhf_console, "dict_console"), (prime_console, "console"), (bar_console, "progress_bar_console"),
    (tensorboard, "tensorboard"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "name"), FORMATS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_collapse_is_found_in_every_format(write, name, tmp_path):
    report = logs.judged(write(tmp_path, ILL))
    assert (report.format, report.steps) == (name, 60), report.notes
    assert report.verdict == "critical"
    assert "reward_collapse" in logs.rules(report)
    entropy = next(i for i in report.incidents if i.rule == "entropy_blowup")
    reward = next(i for i in report.incidents if i.rule == "reward_collapse")
    assert BREAK - 1 <= entropy.onset_step <= BREAK + 3
    assert entropy.opened_step < reward.opened_step
    assert reward.precursor is entropy


@pytest.mark.parametrize(("write", "name"), FORMATS, ids=lambda v: getattr(v, "__name__", ""))
def test_its_healthy_twin_is_healthy_in_every_format(write, name, tmp_path):
    report = logs.judged(write(tmp_path, WELL))
    assert (report.format, report.steps, report.verdict, report.incidents) == (name, 60, "healthy", [])


def test_a_wandb_offline_file_is_read_as_wandb_wrote_it(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    program = """
import json, sys, wandb
run = wandb.init(mode="offline", project="p", dir=sys.argv[1], settings=wandb.Settings(silent=True))
for line in sys.stdin:
    row = json.loads(line)
    run.log({f"train/{k}": v for k, v in row.items() if k != "step"} | {"train/global_step": row["step"]})
run.finish()
"""
    rows = "\n".join(json.dumps(logs.trl(r)) for r in ILL)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], input=rows, text=True, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    report = logs.judged(path)
    assert (report.format, report.steps, report.last_step, report.verdict) == ("wandb", 60, 60, "critical")
    cut = tmp_path / "cut.wandb"
    cut.write_bytes(path.read_bytes()[:-2000])
    report = logs.judged(cut)
    assert 10 < report.steps < 60
    assert any("cut" in note for note in report.notes)


def test_a_truncated_event_file_is_read_as_far_as_it_goes(tmp_path):
    (path,) = tensorboard(tmp_path, ILL).iterdir()
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
    report = logs.judged(cut)
    assert 30 <= report.steps < 60
    assert any("cut" in note for note in report.notes)


def test_a_damaged_event_is_skipped_and_told(tmp_path):
    (path,) = tensorboard(tmp_path, WELL).iterdir()
    data = bytearray(path.read_bytes())
    at = data.index(b"train/reward", len(data) // 2)
    data[at + 2] ^= 0xFF
    path.write_bytes(data)
    report = logs.judged(path)
    assert report.steps == 60
    assert any("checksum" in note for note in report.notes)


def test_segments_of_a_restarted_run_are_merged_by_time(tmp_path):
    folder = tensorboard(tmp_path, ILL[:30])
    again = EventFileWriter(str(folder))
    for i, r in enumerate(WELL[20:]):
        for name in ("reward", "loss", "entropy"):
            said = Summary(value=[Summary.Value(tag=f"train/{name}", simple_value=r[name])])
            again.add_event(Event(wall_time=2e9 + i, step=int(r["step"]), summary=said))
    again.close()
    report = logs.judged(folder)
    assert (report.attempts, report.steps, report.verdict) == (2, 70, "healthy")


def test_gzip_is_read_and_a_cut_one_as_far_as_it_goes(tmp_path):
    plain = jsonl(tmp_path, ILL)
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert logs.judged(packed).steps == 60
    packed.write_bytes(packed.read_bytes()[:-200])
    report = logs.judged(packed)
    assert 0 < report.steps < 60
    assert any("cut" in note for note in report.notes)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_no_part_of_the_log(encoding, tmp_path):
    for write in (jsonl, csv_file, verl_console):
        path = write(tmp_path, ILL)
        path.write_text(path.read_text(encoding="utf-8"), encoding=encoding)
        assert logs.judged(path).steps == 60


@pytest.mark.parametrize("spelling", ["NaN", "Infinity", "-Infinity", '"nan"', '"inf"', "1e999"])
def test_every_spelling_of_not_finite_is_an_incident_at_once(spelling, tmp_path):
    path = tmp_path / "x.jsonl"
    lines = [json.dumps(logs.trl(r)) for r in WELL]
    lines[29] = lines[29].replace('"kl": ' + str(WELL[29]["kl"]), f'"kl": {spelling}')
    assert spelling in lines[29]
    path.write_text("\n".join(lines))
    report = logs.judged(path)
    (incident,) = report.incidents
    assert (incident.rule, incident.severity, incident.opened_step) == ("non_finite", "critical", 30)
    assert incident.resolved_step is not None, "one NaN must not poison what comes after"


def test_a_nan_that_only_an_export_can_have_written_is_missing(tmp_path):
    """pandas writes NaN where a row did not log a column: evaluation rows, and evaluation columns elsewhere."""
    rows = []
    for r in WELL:
        row = logs.trl(r) | {"learning_rate": 1e-6, "eval_reward": float("nan")}
        rows.append(row)
        if r["step"] % 10 == 0:
            rows.append(dict.fromkeys(row, float("nan")) | {"step": r["step"], "eval_reward": 0.5})
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    report = logs.judged(path)
    assert (report.steps, report.verdict, report.signals["reward.validation"]) == (60, "healthy", 6)
    assert any("NaN stands for missing" in note for note in report.notes)


def test_a_reward_function_that_does_not_apply_is_no_illness(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(logs.trl(r) | {"rewards/format/mean": float("nan")}) for r in WELL))
    assert logs.judged(path).verdict == "healthy"


def test_a_header_that_comes_again_is_no_record(tmp_path):
    path = csv_file(tmp_path, WELL)
    text = path.read_text()
    path.write_text(text + text)
    report = logs.judged(path)
    assert (report.steps, report.attempts, report.verdict) == (120, 2, "healthy")


def test_a_torn_last_line_costs_one_step(tmp_path):
    path = jsonl(tmp_path, WELL)
    path.write_text(path.read_text()[:-30])
    report = logs.judged(path)
    assert report.steps == 59
    assert any("not JSON" in note for note in report.notes)


def test_a_cut_trainer_state_is_read_as_far_as_it_goes(tmp_path):
    path = trainer_state(tmp_path, WELL)
    path.write_text(path.read_text()[:-3000])
    report = logs.judged(path)
    assert 30 < report.steps < 60
    assert any("cut" in note for note in report.notes)


def test_a_checkpoint_folder_stands_for_its_newest_state(tmp_path):
    for at in (9, 40, 100):
        (tmp_path / f"checkpoint-{at}").mkdir()
        trainer_state(tmp_path / f"checkpoint-{at}", WELL[: at // 2])
    assert logs.judged(tmp_path).steps == 50
