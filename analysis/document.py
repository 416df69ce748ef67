"""Numbers in README and report, rendered from the records and checked against them.

A document holds blocks: `<!-- claims:NAME -->...<!-- /claims -->` in Markdown, `/* claims:NAME */.../* /claims */` in Typst.
NAME is `summary` (the answered claims that have a title), `slopes` (the fitted lines), `latency` (the grid of walk_latency), `rivals` (all arms),
`ratios` (published speed-ups and ours), `errors` and `flips` (what 8-bit formats lose of a head, and the tokens they change), `acceptance` (acceptance
lengths), `certified` and `proved` (times of the certified walk, and the steps that few rows prove), `anatomy` (what a
step is made of), `other_gpu` (what of a published time is its GPU's), `record` (which runs answer), or a claim id (our value, in a sentence).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from analysis.acceptance import EXPERIMENT as ACCEPTANCE
from analysis.acceptance import acceptance_table, comparisons
from analysis.anatomy import EXPERIMENT as ANATOMY
from analysis.anatomy import MAIN_WALK, anatomy_table, run_of
from analysis.answer import Answer, Records, cited
from analysis.certified import EXPERIMENT as CERTIFIED
from analysis.certified import certified_table, measured, share_table, shares
from analysis.fits import slopes_table
from analysis.latency import EXPERIMENT, latencies, latency_table
from analysis.other_gpu import elsewhere, other_gpu_table
from analysis.quantization import EXPERIMENT as QUANTIZATION
from analysis.quantization import error_table, flip_table
from analysis.quantization import run_of as quantization_of
from analysis.rivals import EXPERIMENT as RIVALS
from analysis.rivals import ratio_table, ratios, rivals_table

ROOT = Path(__file__).resolve().parent.parent
# CONTRIBUTING.md is left out: it holds working notes, with numbers of trials that no published record keeps.
DOCUMENTS = (ROOT / "README.md", ROOT / "paper" / "report.typ")
UNITS = {"us": "µs", "us/step": "µs/step"}
_DIGITS = {"us/step": ".2f", "%": ".2f", "prompts of 605": ".0f", "of steps": ".4f"}
_BLOCK = re.compile(
    r"(?P<open>(?:<!--|/\*) claims:(?P<name>[\w.]+) (?:-->|\*/))(?P<body>.*?)(?P<close>(?:<!--|/\*) /claims (?:-->|\*/))", re.DOTALL
)
_QUOTED = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?:\s*(?:µs|μs|us)\b|×)")


def render(text: str, answers: Sequence[Answer], records: Records) -> str:
    """`text` with every block rendered anew.

    Raises:
        KeyError: a block whose name is neither a claim nor a table.
    """
    return _BLOCK.sub(lambda match: match["open"] + _body(match["name"], answers, records) + match["close"], text)


def complaints(path: Path, answers: Sequence[Answer], records: Records) -> list[str]:
    """What in the document at `path` the records do not support: stale blocks, and times or ratios quoted outside any block.

    A number that a source states may stand anywhere: it is a quotation, not a measurement of ours.
    """
    text = path.read_text()
    found = []
    for old, new in zip(_BLOCK.finditer(text), _BLOCK.finditer(render(text, answers, records)), strict=True):
        if old["body"] != new["body"]:
            found.append(
                f"{path}: block {old['name']} says {_short(old['body'])} but the records say {_short(new['body'])}; run `python -m analysis.claims --write`."
            )
    stated = {number for answer in answers for number in re.findall(r"\d+(?:\.\d+)?", f"{answer.claim.paper} {answer.claim.goal or ''}")}
    for match in _QUOTED.finditer(_BLOCK.sub("", text)):
        if match[1] not in stated:
            found.append(
                f"{path}: {match[0]!r} stands outside a claims block and no source states it; quote it as <!-- claims:ID --><!-- /claims -->."
            )
    return found


def summary_table(answers: Sequence[Answer]) -> str:
    """A Markdown table of the claims that have a title and an answer."""
    answered = [answer for answer in answers if answer.ours and answer.claim.title]
    if not answered:
        return "Not measured yet."
    paper, ours = answered[0].claim.hardware, answered[0].hardware
    rows = [f"| claim | paper ({paper}) | here ({ours}), 95 % interval | ratio | goal | verdict |", "|---|---|---|---|---|---|"]
    rows += [f"| {' | '.join([answer.claim.title, *cells(answer)[1:]])} |" for answer in answered]
    return "\n".join(rows)


def cells(answer: Answer) -> list[str]:
    """One table row: id, paper, ours with interval, ratio, goal, verdict."""
    claim, ours = answer.claim, answer.ours
    goal = ""
    if claim.goal is not None:
        sign = "≤" if claim.better == "lower" else "≥"
        reached = "" if ours is None else ", met" if claim.goal_met(ours.value) else ", missed"
        goal = f"{sign} {claim.goal:g}{reached}"
    value = with_unit(f"{ours:{_digits(claim.unit)}}", claim.unit) if ours else ""
    ratio = f"{answer.ratio:.2f}" if answer.ratio else ""
    paper = with_unit(claim.paper, claim.unit) if claim.value is not None else claim.paper
    return [claim.id, paper, value, ratio, goal, str(answer.verdict)]


def with_unit(number: str, unit: str) -> str:
    """A printed number with its unit: `33.0 µs`, `8.9×`."""
    return f"{number}×" if unit == "x" else f"{number} {UNITS.get(unit, unit)}"


def _body(name: str, answers: Sequence[Answer], records: Records) -> str:
    if name == "summary":
        return f"\n{summary_table(answers)}\n"
    if name == "slopes":
        return f"\n{slopes_table(records['step_slope'][0]) if 'step_slope' in records else 'Not measured yet.'}\n"
    if name == "latency":
        return f"\n{latency_table(latencies(records.get(EXPERIMENT, ())))}\n"
    if name == "rivals":
        return f"\n{rivals_table(latencies(records.get(RIVALS, ())))}\n"
    if name == "anatomy":
        return f"\n{anatomy_table(run_of(records.get(ANATOMY, ()), *MAIN_WALK))}\n"
    if name in ("errors", "flips"):
        table = error_table if name == "errors" else flip_table
        return f"\n{table(quantization_of(records.get(QUANTIZATION, ())))}\n"
    if name == "acceptance":
        return f"\n{acceptance_table(comparisons(records.get(ACCEPTANCE, ())))}\n"
    if name == "certified":
        return f"\n{certified_table(measured(records.get(CERTIFIED, ())))}\n"
    if name == "proved":
        return f"\n{share_table(shares(records.get(CERTIFIED, ())))}\n"
    if name == "ratios":
        claims = [answer.claim for answer in answers]
        return f"\n{ratio_table(ratios(claims, latencies(records.get(RIVALS, ()))))}\n"
    if name == "other_gpu":
        claims = [answer.claim for answer in answers]
        return f"\n{other_gpu_table(elsewhere(claims, latencies(records.get(RIVALS, ())), records.get(ANATOMY, ())))}\n"
    if name == "record":
        return ", ".join(f"{run.experiment}/{run.run_id} ({run.hardware})" for run in cited(answers)) or "not measured yet"
    for answer in answers:
        if answer.claim.id == name:
            claim, ours = answer.claim, answer.ours
            return with_unit(f"{ours.value:{_digits(claim.unit)}}", claim.unit) if ours else "not measured yet"
    raise KeyError(
        f"no claim and no table is called {name!r}; tables are summary, slopes, latency, rivals, ratios, errors, flips, acceptance, certified, proved, anatomy, other_gpu and record, claims stand in paper/claims.yaml."
    )


def _digits(unit: str) -> str:
    return _DIGITS.get(unit, ".1f")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:57]}...")
