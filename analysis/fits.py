"""The fitted lines of a step_slope run, one a variant, and the table that shows them."""

from __future__ import annotations

from analysis.load import Run
from analysis.roofline import roofline
from analysis.slope import ClockCheck, Fit, check_clocks, fit, flagged, medians


def fit_run(run: Run, *, l2: str = "cold", scope: str = "call") -> dict[str, Fit]:
    """Every variant of `run` that has at least two lengths, fitted; in the order of the run's cells."""
    samples = run.table("samples")
    fits = {}
    for variant in run.table("cells")["variant"].unique():
        points = medians(samples, variant=variant, l2=l2, scope=scope)
        if len(points.columns) > 1:
            fits[variant] = fit(points)
    return fits


def clock_checks(run: Run, fits: dict[str, Fit]) -> dict[str, ClockCheck]:
    """The in-kernel second estimate of every fitted variant that stamped its steps."""
    if "step_clocks" not in run.tables:
        return {}
    clocks = run.table("step_clocks")
    return {variant: check_clocks(fitted, clocks, variant) for variant, fitted in fits.items() if (clocks["variant"] == variant).any()}


def slopes_table(run: Run) -> str:
    """A Markdown table of the complete calls with cold L2: slope, entry cost, adequacy of the line, and the in-kernel clocks."""
    fits = fit_run(run)
    clocks = clock_checks(run, fits)
    floors = roofline(run, fits)
    entry_floor = dict(zip(floors["variant"], floors["entry_floor_us"], strict=True)) if len(floors) else {}
    rows = [
        "| variant | slope, µs/step | entry, µs | entry floor, µs | largest residual, µs | in-kernel clocks, µs/step | flagged samples |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant, fitted in fits.items():
        floor = f"{entry_floor[variant]:.1f}" if entry_floor.get(variant) else ""
        out = flagged(run.table("samples"), variant=variant, l2="cold", scope="call")
        rows.append(
            f"| {variant} | {fitted.slope_us:.2f} | {fitted.entry_us:.1f} | {floor} | {fitted.residual_us:.2f} | {_clock_cell(clocks.get(variant))} | {out} |"
        )
    return "\n".join(rows)


def _clock_cell(check: ClockCheck | None) -> str:
    if check is None:
        return ""
    verdict = "agrees" if check.agrees else "DISAGREES"
    return f"{check.step_us:.2f}: {verdict} ({check.difference:+.1%}, bound {check.bound:.0%})"
