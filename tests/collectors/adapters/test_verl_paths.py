"""A rollback's path comes by the network, and a checkpoint is unpickled: only the job's own folder counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreshock.adapters.verl.actions import within


def test_below_the_jobs_own_folder_and_nowhere_else(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    (root / "global_step_40").mkdir(parents=True)
    (tmp_path / "evil" / "global_step_40").mkdir(parents=True)
    (root / "link_to_evil").symlink_to(tmp_path / "evil")
    assert within(str(root / "global_step_40"), str(root))
    assert within(f"{root}/./global_step_40/", str(root))
    for path in (
        tmp_path / "evil" / "global_step_40", root, f"{root}/../evil/global_step_40", f"{root}_other/global_step_40",
        root / "link_to_evil" / "global_step_40", "/", "",
    ):  # fmt: skip
        assert not within(str(path), str(root))


def test_a_relative_root_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert within(str(tmp_path / "ckpt" / "global_step_1"), "ckpt")
