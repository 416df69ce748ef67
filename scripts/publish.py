"""Copy a finished run from `runs/` into `results/`, where it is committed and read by analysis and figures.

    python -m scripts.publish runs/step_slope/RUN_ID

Only a run that loads, is ok and comes from a clean commit is published; there is no way round that.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
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
        OSError: the copy can not be made.
    """
    place = admit(folder, results)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".partial-{os.getpid()}-") as scratch:
        copy = Path(scratch) / place.name
        copy.mkdir()
        for name in ["run.json", *(f"{table}.parquet" for table in load(folder).meta["tables"])]:
            shutil.copyfile(folder / name, copy / name)
        load(copy)
        copy.rename(place)
    return place


def admit(folder: Path, results: Path = RESULTS) -> Path:
    """Where the run in `folder` would be published; raises as :func:`publish`."""
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
    return place


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish the runs named on the command line; exit code 2, one sentence and no copy at all where one is refused."""
    parser = argparse.ArgumentParser(prog="python -m scripts.publish", description="Copy finished runs into results/.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    try:
        admitted = {admit(folder, args.results): folder for folder in args.runs}  # a run named twice is one run
        for folder in admitted.values():
            print(publish(folder, args.results))
    except (RecordError, Refused) as error:
        print(f"publish: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"publish: {error.filename2 or error.filename or args.results} can not be read or written ({error.strerror})", file=sys.stderr
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
