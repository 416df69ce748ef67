"""Every claim of the paper beside our records: `python -m analysis.claims [--json | --verify | --write]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.answer import Answer, Records, all_records, answer_all, cited
from analysis.claim import CLAIMS, Book, InvalidClaim, load_claims
from analysis.document import DOCUMENTS, cells, complaints, render
from analysis.fits import clock_checks, fit_run
from analysis.load import RESULTS, InvalidRun


def report(book: Book, answers: Sequence[Answer], records: Records) -> str:
    """The table for a terminal: claim, paper, ours with its 95 % interval, ratio, goal, verdict; both hardware names."""
    rows = [["claim", "paper", "on", "ours [95 % interval]", "on", "ratio", "goal", "verdict"]]
    for answer in answers:
        name, paper, ours, ratio, goal, verdict = cells(answer)
        rows.append([name, paper, answer.claim.hardware, ours, answer.hardware, ratio, goal, verdict])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", *_second_estimates(records)[0], *(f"record: {run.path}" for run in cited(answers))]
    if not records:
        lines.append(f"No record of device={book.device} answers any claim; `make bench` measures them.")
    return "\n".join(lines)


def _second_estimates(records: Records) -> tuple[list[str], list[str]]:
    """One sentence for every slope that has a second estimate; then those again whose estimates contradict each other."""
    lines, contradictions = [], []
    for run in (runs[0] for runs in records.values() if "step_clocks" in runs[0].tables):
        fits = fit_run(run)
        for variant, check in clock_checks(run, fits).items():
            estimates = f"{fits[variant].slope_us:.2f} µs/step fitted over lengths, {check.step_us:.2f} by the clocks in the kernel"
            apart, allowed = f"{100 * abs(check.difference):.0f} %", f"{100 * check.bound:.0f} %"
            verdict = (
                f"they agree: they differ by {apart}, and {allowed} is allowed"
                if check.agrees
                else f"they differ by {apart}, more than the {allowed} allowed"
            )
            lines.append(f"{variant}: {estimates}: {verdict}")
            if not check.agrees:
                contradictions.append(f"{run.path}: {lines[-1]}; no slope can be quoted from this run, measure it again.")
    return lines, contradictions


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.claims", description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    mode.add_argument(
        "--verify",
        action="store_true",
        help="also exit non-zero if a document quotes what the records do not support, or a record contradicts itself",
    )
    mode.add_argument("--write", action="store_true", help="also render the claims blocks of the documents anew")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the published runs lie")
    parser.add_argument("--claims", type=Path, default=CLAIMS, help="the claims file")
    parser.add_argument("--documents", type=Path, nargs="*", default=DOCUMENTS, help="the documents that quote numbers")
    arguments = parser.parse_args(argv)
    try:
        os.listdir(arguments.results)  # a folder that is not there must not look like one without records
        book = load_claims(arguments.claims)
        records = all_records(book, arguments.results)
        answers = answer_all(book, records)
        documents = [path for path in arguments.documents if path.exists()]
        if arguments.json:
            print(json.dumps([answer.as_json() for answer in answers], indent=2, ensure_ascii=False))
            return 0
        print(report(book, answers, records))
        if arguments.write:
            for path in documents:
                path.write_text(render(path.read_text(), answers, records))
        unsupported = (
            [line for path in documents for line in complaints(path, answers, records)] + _second_estimates(records)[1]
            if arguments.verify
            else []
        )
    except (InvalidRun, KeyError) as error:
        print(error.args[0], file=sys.stderr)
        return 1
    except InvalidClaim as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"{reason}; give --results, --claims and --documents that are there and may be read.", file=sys.stderr)
        return 2
    for line in unsupported:
        print(line, file=sys.stderr)
    return 1 if unsupported else 0


if __name__ == "__main__":
    sys.exit(main())
