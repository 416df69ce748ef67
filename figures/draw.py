"""Draw figures from the published results: `python -m figures.draw [NUMBER ...] [--results DIR] [--output DIR] [--device NAME]`."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

import figures
from analysis.load import RESULTS, InvalidRun, MissingResults
from figures.style import styled

OUTPUT = RESULTS.parent / "paper" / "figures"
DEVICE = "h200"
DEVICES = RESULTS.parent / "configs" / "device"


def known_figures() -> dict[int, str]:
    """Module name of every figure by its number in the paper; dropping a file `figNN_name.py` in adds one.

    Such a file has `draw(results: Path, device: str) -> Figure`, which may raise MissingResults.
    """
    names = (module.name for module in pkgutil.iter_modules(figures.__path__))
    return {int(match[1]): match[0] for match in map(re.compile(r"fig(\d+)_\w+").fullmatch, sorted(names)) if match}


def known_devices() -> list[str]:
    """The names that `--device` may have: the device specs of this suite."""
    return sorted(path.stem for path in DEVICES.glob("*.yaml"))


def draw(name: str, results: Path, output: Path, device: str = DEVICE) -> list[Path]:
    """Draw the figure module `name` as PDF and PNG into `output`; the same records give the same bytes.

    Raises:
        MissingResults, InvalidRun: no record to draw, or one that must not be believed.
        OSError: a record cannot be read, or `output` not be written.
    """
    with styled():
        figure = importlib.import_module(f"figures.{name}").draw(results, device)
        output.mkdir(parents=True, exist_ok=True)
        paths = [output / f"{name}.pdf", output / f"{name}.png"]
        # Without its date and versions a redrawn file differs only if the drawing does.
        figure.savefig(paths[0], metadata={"CreationDate": None, "Creator": None, "Producer": None})
        figure.savefig(paths[1], metadata={"Software": None})
        plt.close(figure)
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    known = known_figures()
    parser = argparse.ArgumentParser(prog="python -m figures.draw", description=__doc__)
    parser.add_argument(
        "numbers", type=int, nargs="*", metavar="NUMBER", help=f"which figures; all of {', '.join(map(str, known))} if none is named"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the published runs lie")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the drawings go")
    parser.add_argument("--device", default=DEVICE, help="whose measurements to draw")
    arguments = parser.parse_args(argv)
    unknown = [number for number in arguments.numbers if number not in known]
    if unknown:
        parser.error(f"no figure {unknown[0]}; there are {', '.join(map(str, known))}")
    if arguments.device not in known_devices():
        parser.error(f"no device {arguments.device}; there are {', '.join(known_devices())}")
    failures = []
    try:
        os.listdir(arguments.results)  # a folder that is not there must not look like one without records
        for number in arguments.numbers or known:
            try:
                for path in draw(known[number], arguments.results, arguments.output, arguments.device):
                    print(path)
            except (MissingResults, InvalidRun, KeyError) as error:
                failures.append(f"figure {number}: {error.args[0]}")
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"{reason}; give --results that may be read and an --output folder that may be written.", file=sys.stderr)
        return 2
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
