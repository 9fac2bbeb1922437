"""What a baseline learns, what it never learns, and how it finds drift that never jumps."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock_service.rules.baseline import (
    FRESH,
    BaselineConfig,
    Reading,
    Track,
    band_log,
    drifted,
    early,
    fold_linear,
    fold_log,
    large,
    out_of_range,
)
from tests.service.rules.streams import noise, view

CONFIG = BaselineConfig()


def folded(
    values: list[float], track: Track = FRESH, first: int = 0, learn: bool = True, **where: int
) -> tuple[Track, list[Reading | None]]:
    readings = []
    for i, value in enumerate(values):
        track, reading = fold_log(track, value, view(first + i, {}, **where), CONFIG, floor=1e-9, learn=learn)
        readings.append(reading)
    return track, readings


def calm(steps: int, level: float = 1e-4, sigma: float = 0.2, seed: int = 0) -> list[float]:
    return [level * factor for factor in itertools.islice(noise(seed, sigma), steps)]


def test_it_is_trusted_after_its_calibration_steps_and_not_before() -> None:
    _, readings = folded(calm(12))
    assert [r.calibrated for r in readings if r] == [False] * CONFIG.calibration_steps + [True] * 4


def test_centre_and_spread_are_those_of_the_noise() -> None:
    track, _ = folded(calm(400))
    assert math.exp(track.centre) == pytest.approx(1e-4, rel=0.1)
    assert track.spread == pytest.approx(0.2, rel=0.5)


@pytest.mark.parametrize("seed", range(30))
def test_calm_noise_is_never_out_of_range(seed: int) -> None:
    _, readings = folded(calm(300, sigma=(0.05, 0.3, 0.8)[seed % 3], seed=seed))
    assert not any(out_of_range(r, CONFIG) for r in readings if r)


def test_nan_and_infinity_leave_the_track_as_it_was() -> None:
    track, _ = folded(calm(20))
    for value in (math.nan, math.inf, -math.inf):
        after, reading = fold_log(track, value, view(20, {}), CONFIG, floor=1e-9)
        assert reading is None
        assert after is track


def test_one_jump_of_two_orders_is_large_at_once_and_is_not_learned() -> None:
    track, _ = folded(calm(30))
    after, (reading,) = folded([1e-2], track, first=30)
    assert reading is not None
    assert large(reading, CONFIG)
    assert after.centre == pytest.approx(track.centre, abs=0.1)


def test_exponential_drift_that_never_jumps_is_found_within_ten_steps() -> None:
    track, _ = folded(calm(60))
    ramp = [value * math.exp(0.2 * i) for i, value in enumerate(calm(20, seed=5))]
    _, readings = folded(ramp, track, first=60)
    found = next(i for i, r in enumerate(readings) if r and out_of_range(r, CONFIG))
    assert found <= 10
    reading = readings[found]
    assert reading is not None
    assert drifted(reading, CONFIG)
    assert reading.onset is not None
    assert 60 <= reading.onset <= 60 + found


def test_while_ill_the_baseline_is_frozen_and_it_recovers_with_the_run() -> None:
    track, _ = folded(calm(60))
    ill, _ = folded(calm(200, level=1e-2), track, first=60, learn=False)
    assert ill.recent == track.recent
    well, readings = folded(calm(30, seed=9), ill, first=260)
    assert not any(out_of_range(r, CONFIG) for r in readings[15:] if r)
    assert well.drift < CONFIG.drift_limit / 2


def test_a_burst_beyond_the_gate_moves_nothing_and_a_lasting_change_is_followed_slowly() -> None:
    track, _ = folded(calm(60))
    burst, _ = folded([1e-2] * (CONFIG.calibration_steps - 1), track, first=60)
    assert burst.recent == track.recent
    lasting, _ = folded(calm(300, level=1e-3, seed=2), burst, first=70)
    assert math.exp(lasting.centre) == pytest.approx(1e-3, rel=0.3)


def test_a_few_first_values_that_were_the_exception_do_not_blind_it() -> None:
    """Zeros before the first update must not make all that follows unlearnable."""
    track, readings = folded([0.0] * 4 + calm(40))
    assert readings[-1] is not None
    assert readings[-1].calibrated
    assert math.exp(track.centre) == pytest.approx(1e-4, rel=0.3)


def test_before_calibration_only_a_step_far_beyond_all_known_values_counts() -> None:
    _, readings = folded([*calm(5), 1e-2])
    assert readings[-1] is not None
    assert early(readings[-1], CONFIG)
    assert not large(readings[-1], CONFIG)
    _, readings = folded([*calm(5), 3e-4])
    assert readings[-1] is not None
    assert not out_of_range(readings[-1], CONFIG)


def test_slow_healthy_change_is_followed() -> None:
    values = [v * math.exp(0.002 * i) for i, v in enumerate(calm(1000))]
    track, readings = folded(values)
    assert not any(out_of_range(r, CONFIG) for r in readings if r)
    assert math.exp(track.centre) == pytest.approx(values[-1], rel=0.5)


def test_zeros_are_measurements_and_a_constant_has_a_range() -> None:
    track, readings = folded([0.0] * 30)
    assert track.centre == pytest.approx(math.log(1e-9))
    assert not any(out_of_range(r, CONFIG) for r in readings if r)
    _, (reading,) = folded([1e-3], track, first=30)
    assert reading is not None
    assert large(reading, CONFIG)


def test_a_baseline_survives_a_new_attempt_whose_steps_begin_again() -> None:
    track, _ = folded(calm(40))
    again, readings = folded([1e-4, 1e-2], track, first=3, attempt=2, segment=1)
    assert readings[0] is not None
    assert readings[0].calibrated
    assert readings[1] is not None
    assert large(readings[1], CONFIG)
    assert again.attempt == 2


def test_a_signal_that_moves_with_training_begins_anew_in_a_new_attempt() -> None:
    track = FRESH
    for i, value in enumerate(calm(40)):
        track, _ = fold_log(track, value, view(i, {}), CONFIG, floor=1e-9, survives=False)
    track, reading = fold_log(track, 1e-2, view(0, {}, attempt=2), CONFIG, floor=1e-9, survives=False)
    assert reading is not None
    assert not reading.calibrated
    assert track.learned == 1


def test_a_change_of_settings_may_move_the_level_but_what_was_known_still_serves_meanwhile() -> None:
    track, _ = folded(calm(40))
    moved, readings = folded(calm(30, level=2.5e-4, seed=3), track, first=40, segment=1)
    assert not any(out_of_range(r, CONFIG) for r in readings if r)
    assert math.exp(moved.centre) == pytest.approx(2.5e-4, rel=0.2)
    _, readings = folded([1e-1], track, first=40, segment=1)
    assert readings[0] is not None
    assert large(readings[0], CONFIG)


def test_linear_tracks_watch_falls_with_their_sign_turned() -> None:
    config = BaselineConfig(min_spread=0.01)
    track = FRESH
    for i in range(30):
        track, _ = fold_linear(track, 0.5 + 0.01 * (i % 3), view(i, {}), config, sign=-1.0)
    track, reading = fold_linear(track, 0.2, view(30, {}), config, sign=-1.0)
    assert reading is not None
    assert reading.excess == pytest.approx(0.31, abs=0.02)
    assert reading.centre == pytest.approx(0.51, abs=0.01)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=120), st.integers(0, 2))
def test_whatever_comes_the_track_stays_finite_and_bounded(values: list[float], attempt: int) -> None:
    track, _ = folded(values, attempt=attempt)
    assert all(math.isfinite(v) for v in (*track.recent, track.centre, track.spread, track.drift, track.smooth))
    assert len(track.recent) <= CONFIG.window_values
    band = band_log(track, CONFIG)
    assert band is None or band[0] <= band[1] <= band[2]
