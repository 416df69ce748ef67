"""Floors: the time that moving a walk's bytes takes at the device's peak rate, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.load import InvalidRun, Run
from analysis.slope import Fit


def floor_us(moved_bytes: int, rate_gb_s: float) -> float:
    """The least time in us to move `moved_bytes` at `rate_gb_s` (1e9 bytes a second)."""
    return moved_bytes / (rate_gb_s * 1e3)


def roofline(run: Run, fits: Mapping[str, Fit]) -> pd.DataFrame:
    """One row a fitted variant that states its bytes: entry and step floors from HBM beside the fitted entry cost and slope.

    A step floor holds only for weights that L2 does not keep between steps; `fits_l2` says where it may be undercut.
    Variants that state no bytes (library arms) have no row.
    """
    device = run.manifest["config"]["device"]
    rate = device.get("hbm_gb_s")
    if not rate:
        raise InvalidRun(
            f"{run.path / 'run.json'} states no memory rate (config.device.hbm_gb_s = {rate}); add it to configs/device and measure again."
        )
    rows = []
    for variant, fitted in fits.items():
        resources = run.manifest["resources"].get(variant, {})
        entry, streamed = resources.get("entry_bytes", 0), resources.get("streamed_bytes", 0)
        if entry or streamed:
            rows.append(
                {
                    "variant": variant,
                    "entry_bytes": entry,
                    "streamed_bytes": streamed,
                    "entry_floor_us": floor_us(entry, rate),
                    "entry_us": fitted.entry_us.value,
                    "step_floor_us": floor_us(streamed, rate),
                    "step_us": fitted.slope_us.value,
                    "fits_l2": streamed <= device.get("l2_bytes", 0),
                }
            )
    return pd.DataFrame(rows)
