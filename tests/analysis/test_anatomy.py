from __future__ import annotations

from pathlib import Path

import pytest

from analysis.anatomy import EXPERIMENT, IDLE, anatomy_table, short_name, steps
from analysis.load import newest_run


def test_a_step_is_what_the_longer_walk_has_more(results: Path) -> None:
    step = steps(newest_run(results, EXPERIMENT))["sglang_folded"]
    assert [(part.kernel, part.launches) for part in step.parts] == [
        ("GEMM", 1),
        ("_race_in_tile", 1),
        ("add", 1),
        ("small", 2),
        (IDLE, 0),
    ]
    assert step.parts[0].time_us.value == pytest.approx(1.01 * 33), "the median of three processes, each 1 % slower"
    assert (step.parts[0].time_us.low, step.parts[0].time_us.high) == pytest.approx((33, 1.02 * 33))
    assert step.parts[3].time_us.value == pytest.approx(1.01 * 0.8), "without what the whole walk has once"
    assert step.launches == 5
    assert step.busy_us == pytest.approx(1.01 * 40.3)
    assert step.floor_us == pytest.approx(127_139_840 / 4.8e6)


def test_the_table(results: Path) -> None:
    assert anatomy_table(newest_run(results, EXPERIMENT)).splitlines()[2] == "| `sglang_folded` | 5 | 40.7 | 5.6 | 127.1 | 26.5 |"
    assert anatomy_table(None) == "Not measured yet."


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>(cublasGemvParams<float>)", "gemv2T_kernel_val"),
        ("_race_of_tiles", "_race_of_tiles"),
        ("void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>()", "exponential noise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::native::ArgMaxOps<float>>>", "argmax"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("nvjet_sm90_tst_512x8_64x3_2x1_v_bz_TNT", "GEMM"),
        (IDLE, IDLE),
    ],
)
def test_names_without_their_types(kernel: str, name: str) -> None:
    assert short_name(kernel) == name
