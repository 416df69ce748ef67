"""Copy a finished run from `runs/` into `results/`, where it is committed and read by analysis and figures.

    python -m scripts.publish runs/step_slope/RUN_ID

Only a run that loads, is ok and comes from a clean commit is published; there is no way round that.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.record import RecordError, load

RESULTS = Path(__file__).resolve().parent.parent / "results"


class Refused(ValueError):
    """A run that must not be published."""


def publish(folder: Path, results: Path = RESULTS) -> Path:
    """Copy the run in `folder` to `results/EXPERIMENT/RUN_ID`, whole or not at all, and return that path.

    Raises:
        RecordError: the folder is no valid record.
        Refused: it is not ok, comes from a dirty tree, or is published already.
    """
    meta = load(folder).meta
    revision = meta["revision"]
    if meta["status"] != "ok":
        raise Refused(f"{folder} ended as {meta['status']} ({meta['reason']}); only runs that are ok are published")
    if revision["dirty"]:
        planned = f", planned from digest {revision['plan_digest'][:12]}" if "plan_digest" in revision else ""
        raise Refused(
            f"{folder} was measured from a tree that differs from commit {revision['sha'][:12]} (digest {revision['digest'][:12]}{planned}); "
            "commit the sources and run it again"
        )
    place = results / meta["experiment"] / meta["run_id"]
    if place.exists():
        raise Refused(f"{place} is published already")
    partial = place.with_name(f".partial-{place.name}")
    try:
        partial.mkdir(parents=True)
        for name in ["run.json", *(f"{table}.parquet" for table in meta["tables"])]:
            shutil.copyfile(folder / name, partial / name)
        partial.rename(place)
        load(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return place


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish each run named on the command line; exit code 2 and one sentence where one is refused."""
    parser = argparse.ArgumentParser(prog="python -m scripts.publish", description="Copy finished runs into results/.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    try:
        for folder in args.runs:
            print(publish(folder, args.results))
    except (RecordError, Refused) as error:
        print(f"publish: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
