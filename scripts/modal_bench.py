"""Send plans to a rented GPU and bring the run folders home. It measures nothing itself. Needs `modal setup` once, but for --dry-run.

    modal run scripts/modal_bench.py --gpu B200 --overrides "experiment=step_slope"
    modal run scripts/modal_bench.py --gpu H200 --overrides "experiment=step_slope; experiment=smoke backend=resident_sm90 head=markov_v152k"
    modal run scripts/modal_bench.py --gpu B200 --dry-run

Overrides are those of `python -m experiments.run`; a semicolon starts the next plan. Every plan is composed here, with the source
revision in it, and runs in a container of its own. This file has been tried without an account only, never on rented hardware.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import modal

# A plan's device (configs/device) and Modal's word for it. Modal may answer "H100" with an H200, and "B200+" with a B300: these it may not.
GPUS = {"H100": "H100!", "H200": "H200", "B200": "B200"}
PYTHON = "3.12"
APT = "build-essential"  # Triton compiles its launcher with the host's compiler
SOURCES = ("kernels", "experiments", "configs")  # the rooms that decide a number; `revision.digest` covers them
TIMEOUT_S = 3600
HERE = Path(__file__).resolve().parent.parent  # the repository, where the file is imported on this side
THERE = "/opt/weights-that-stay"  # the same rooms in the container

app = modal.App("weights-that-stay")
image = (
    modal.Image.debian_slim(python_version=PYTHON)
    .apt_install(APT)
    .pip_install_from_requirements(str(HERE / "requirements" / "dev.txt"))
    .env({"PYTHONPATH": THERE})
    .add_local_file(HERE / "results" / "schema.json", f"{THERE}/results/schema.json")
)
for room in SOURCES:
    image = image.add_local_dir(HERE / room, f"{THERE}/{room}", ignore=["**/__pycache__"])


@app.function(image=image, retries=0, timeout=TIMEOUT_S, single_use_containers=True)
def measure(plan: str) -> dict[str, bytes]:
    """In the container: see `execute`."""
    return execute(plan)


def execute(plan: str, **variables: str) -> dict[str, bytes]:
    """Check that the GPU is the plan's, execute the plan (JSON text), and return the files of `runs/` by relative path.

    variables: of the environment that the run sees

    Raises:
        RuntimeError: another GPU than the plan's, or the run ended without a record.
    """
    from kernels import device
    from kernels.walk import Unsupported

    try:
        device.check_live(device.load(json.loads(plan)["config"]["device"]["name"]))
    except Unsupported as error:
        raise RuntimeError(str(error)) from None  # an exception of ours could not be unpacked on the other side
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "plan.json"
        path.write_text(plan)
        environment = {**os.environ, **variables, "PYTHONPATH": str(HERE) if modal.is_local() else THERE}
        ended = subprocess.run([sys.executable, "-m", "experiments.run", "--plan", str(path)], cwd=scratch, env=environment, check=False)
        runs = Path(scratch) / json.loads(plan)["config"]["output"]
        files = {file.relative_to(runs).as_posix(): file.read_bytes() for file in runs.glob("*/[!.]*/*")}
    if not files:
        raise RuntimeError(f"the run ended with exit code {ended.returncode} and left no record; its own words are in the log above")
    return files


def compose(gpu: str, overrides: str) -> list[str]:
    """The plans that `overrides` ask for, each as JSON text, for device `gpu`.

    Raises:
        SystemExit: the overrides name a device, a wrong key or nothing; the message says which.
    """
    from experiments.compose import compose as composed
    from experiments.convert import ConfigError
    from experiments.plan import Plan
    from experiments.provenance import NoRevision, revision

    plans = []
    for each in filter(str.strip, overrides.split(";")):
        keys = [*shlex.split(each), f"device={gpu.lower()}"]
        if any(key.startswith("device=") for key in keys[:-1]):
            sys.exit(f"modal_bench: {each.strip()!r} names a device; --gpu {gpu} decides it, so leave device= out.")
        try:
            plan = Plan(composed(keys), tuple(keys), revision())
        except (ConfigError, NoRevision) as error:
            sys.exit(f"modal_bench: {error}")
        with tempfile.TemporaryDirectory() as scratch:
            plan.write(Path(scratch) / "plan.json")
            plans.append((Path(scratch) / "plan.json").read_text())
    if not plans:
        sys.exit("modal_bench: --overrides asks for no plan; write for example --overrides experiment=step_slope, or leave it out.")
    return plans


def bring_home(files: Mapping[str, bytes], output: Path) -> list[Path]:
    """Write the files of run folders under `output`, and return the folders. Folders that do not load are not kept.

    Raises:
        experiments.record.RecordError: a folder is no valid record.
        FileExistsError: a run of that name is here already.
    """
    from experiments import record

    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".partial-") as scratch:
        for name, content in files.items():
            path = Path(scratch) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        folders = sorted({Path(name).parent for name in files})
        for folder in folders:
            record.load(Path(scratch) / folder)
            if (output / folder).exists():
                raise FileExistsError(f"{output / folder} exists already; a run is never overwritten.")
        for folder in folders:
            (output / folder).parent.mkdir(exist_ok=True)
            os.rename(Path(scratch) / folder, output / folder)
    return [output / folder for folder in folders]


def _order(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="modal run scripts/modal_bench.py", description="Run plans on a rented GPU.", allow_abbrev=False)
    parser.add_argument("--gpu", required=True, choices=sorted(GPUS))
    parser.add_argument("--overrides", default="experiment=step_slope", help='"key=value ...; key=value ..." (default: %(default)s)')
    parser.add_argument("--output", type=Path, default=Path("runs"), help="where the run folders go (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the plans and the image, and rent nothing; needs no account")
    return parser.parse_args(arguments)


def show(gpu: str, plans: Sequence[str]) -> None:
    """What would be rented and run."""
    print(f"gpu: {GPUS[gpu]}, {len(plans)} container(s) of one plan each, timeout {TIMEOUT_S} s, no retries")
    print(f"image: Debian slim, Python {PYTHON}, {APT}, requirements/dev.txt; {', '.join(SOURCES)}, results/schema.json at {THERE}")
    for number, plan in enumerate(plans, 1):
        print(f"plan {number}: {plan}", end="")


@app.local_entrypoint()
def main(*arguments: str) -> None:
    """Compose, send, fetch, validate. Exits with 1 if any plan brought back no run, or one that is not ok."""
    order = _order(arguments)
    plans = compose(order.gpu, order.overrides)
    rented = measure.with_options(gpu=GPUS[order.gpu])
    results = rented.starmap([(plan,) for plan in plans], order_outputs=False, return_exceptions=True)
    ended_well = [receive(result, order.output) for result in results]  # all of them, whatever becomes of one
    if not all(ended_well):
        sys.exit(1)


def receive(result: dict[str, bytes] | BaseException, output: Path) -> bool:
    """Bring one container's result home and say how it went; whether all of its runs are ok."""
    from experiments.record import RecordError

    try:
        if isinstance(result, BaseException):
            raise result
        folders = bring_home(result, output)
    except (RecordError, FileExistsError) as error:
        print(f"the run that came back is refused: {error}", file=sys.stderr)
        return False
    except Exception as error:
        print(f"no run came back: {error}", file=sys.stderr)
        return False
    runs = [json.loads((folder / "run.json").read_text()) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        print(f"{folder}: {run['status']} on {run['device']['name']} {run['reason']}".rstrip())
    return all(run["status"] == "ok" for run in runs)


def dry_run_asked(script: str) -> list[str] | None:
    """The arguments of `modal run scripts/SCRIPT.py ... --dry-run`, or None where this process is none: `modal run` asks for an account before
    it calls any entry point, so a dry run is answered while the file is being imported."""
    own = [place for place, word in enumerate(sys.argv) if script in word]
    return sys.argv[own[0] + 1 :] if own and "--dry-run" in sys.argv and modal.is_local() else None


def _dry_run(arguments: Sequence[str]) -> NoReturn:
    order = _order(arguments)
    show(order.gpu, compose(order.gpu, order.overrides))
    sys.exit()


if (asked := dry_run_asked("modal_bench")) is not None:
    _dry_run(asked)
