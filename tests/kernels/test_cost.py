"""The cost model gives back what it was calibrated on, follows from its rates by hand, and never beats the memory."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cost import CONFIGS, Cost, Rates, predict, rates
from kernels.device import load
from kernels.placement import Placement, plan
from kernels.unsupported import Unsupported

H200 = load("h200")
RATES = rates("h200")


def at_152k(rf_tiles: int) -> Cost:
    return predict(plan(151_936, 256, H200, rf_tiles=rf_tiles), RATES)


def test_the_record_it_was_calibrated_on() -> None:
    """step_slope 20261129T185906Z, cold complete calls: 13.77 us to enter, 2.042 us a step; the streaming arms read W2 at every step."""
    cost = at_152k(6)
    assert cost.entry_us == pytest.approx(13.77, abs=0.02)
    assert cost.step_us == pytest.approx(2.042, rel=0.02)
    assert cost.at(16) == pytest.approx(13.77 + 16 * 2.042, rel=0.02)
    assert RATES.stream_us(151_936 * 256) == pytest.approx(4.308, rel=0.002)
    assert RATES.stream_us(151_936 * 512) == pytest.approx(12.401, rel=0.002)


def test_by_hand() -> None:
    """Round rates: a cycle is a nanosecond."""
    of = Rates(
        device="x", start_us=5, hbm_gb_s=1000, l2_gb_s=2000, l2_kept_bytes=1e9, clock_ghz=1, mma_bytes_per_cycle=256,
        shared_bytes_per_cycle=128, settle_cycles_per_row=50, score_start_cycles=100, agree_cycles=1000,
    )  # fmt: skip
    held = Placement(vocab=100_000, steps=8, ctas=100, register_tiles=5, smem_tiles=3, base_slots=8)
    # 8 tiles of 8 warps: 262,144 B of MMA operands are 1,024 cycles, 98,304 B of shared memory 768; 4 rows a lane
    assert predict(held, of).step_us == pytest.approx(0.1 + 1.024 + 0.2 + 1.0 + 0.2)
    assert predict(held, of).entry_us == pytest.approx(5 + 100 * (8 * 8 * 4096 + 4 * 8 * 8 * 16) / 1e6)
    assert predict(replace(held, base_slots=4), of).step_us == pytest.approx(predict(held, of).step_us - 0.1)
    shared = replace(held, register_tiles=1, smem_tiles=7)  # 229,376 B from shared memory: 1,792 cycles
    assert predict(shared, of).step_us == pytest.approx(predict(held, of).step_us + 0.768)
    streaming = replace(held, smem_tiles=0, streamed_tiles=3, stages=2)
    # 9.83 MB a step: 4.915 us, of which 1 us is hidden while the CTAs agree (the ring holds 6.55 MB); 9.83 us from HBM in step 0
    assert predict(streaming, of).step_us == pytest.approx(0.1 + 3.9152 + 0.2 + 1.0 + 0.2)
    assert predict(streaming, of).entry_us == pytest.approx(5 + 100 * (8 * 5 * 4096 + 4 * 8 * 8 * 16) / 1e6 + 9.8304 - 3.9152)
    # with an L2 that delays nothing, 196,608 B written to shared memory and read from it: 1,536 cycles
    assert predict(streaming, replace(of, l2_gb_s=1e6)).step_us == pytest.approx(0.1 + 1.536 + 0.2 + 1.0 + 0.2)


def test_what_was_tried_on_the_hardware() -> None:
    """ "Measured facts": five and four register tiles cost 0.12 us a step and more; scoring takes 1,560 cycles with six."""
    assert at_152k(5).step_us - at_152k(6).step_us == pytest.approx(0.12, abs=0.02)
    assert at_152k(4).step_us > at_152k(5).step_us
    base_us = RATES.hbm_us(2 * 151_936)
    assert (at_152k(6).step_us - base_us) * RATES.clock_ghz * 1e3 - RATES.agree_cycles == pytest.approx(1560, abs=10)


@given(st.integers(1, 600_000), st.integers(1, 32), st.integers(1, 4), st.sampled_from(["int8", "bf16"]), st.integers(0, 9))
def test_no_prediction_beats_the_memory(vocab: int, steps: int, batch: int, weights: str, rf_tiles: int) -> None:
    try:
        placed = plan(vocab, 256, H200, steps=steps, batch=batch, weights=weights, rf_tiles=rf_tiles)
    except Unsupported:
        return
    cost = predict(placed, RATES)
    weight_bytes = vocab * (256 if weights == "int8" else 512)
    assert cost.at(1) > RATES.hbm_us(weight_bytes) + RATES.start_us
    assert cost.step_us > RATES.cycles_us(RATES.agree_cycles)
    assert cost.at(steps) > (weight_bytes + 2 * batch * steps * vocab) / (H200.hbm_gb_s * 1e3), "the datasheet's peak"


@given(st.integers(1, 8), st.integers(0, 6), st.integers(1, 6))
def test_streaming_a_tile_never_makes_a_step_shorter_nor_the_entry_longer_than_a_load(near: int, shared: int, streamed: int) -> None:
    whole = Placement(100_000, 16, 132, near, shared + streamed)
    parts = Placement(100_000, 16, 132, near, shared, streamed, stages=2)
    assert predict(parts, RATES).step_us >= predict(whole, RATES).step_us
    assert predict(parts, RATES).entry_us <= predict(whole, RATES).entry_us + 1e-9


@pytest.mark.parametrize(
    ("asked", "words"),
    [({"batch": 64}, "walks of 64 requests"), ({"batch": 64, "sampling": True}, "sampled walks"), ({"sampling": True}, "sampled walks")],
)
def test_what_the_model_does_not_cover_is_refused(asked: dict, words: str) -> None:
    with pytest.raises(Unsupported, match=f"knows nothing of {words}"):
        predict(plan(151_936, 256, H200, **asked), RATES)


def test_an_unmeasured_device_has_no_rates() -> None:
    with pytest.raises(Unsupported, match=r"no rates of device=h100 were measured; configs/cost has: .*h200"):
        rates("h100")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_rate_has_a_source(path: Path) -> None:
    of = rates(path.stem)
    assert of.device == path.stem
    assert load(of.device).hbm_gb_s >= of.hbm_gb_s
    lines = {line.split(":")[0]: line for line in path.read_text().splitlines() if not line.startswith("#")}
    for name in (field.name for field in fields(Rates) if field.name != "device"):
        assert getattr(of, name) > 0
        assert any(f"{source}: " in lines[name].partition("#")[2] for source in ("record", "facts", "probe")), lines[name]
