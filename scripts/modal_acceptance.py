"""Acceptance of released drafters on a rented GPU: download target and drafter once, then run plans as `modal_bench` does.

    modal run scripts/modal_acceptance.py --gpu H100 --pairs qwen3_4b_block7 qwen3_8b_block7
    modal run scripts/modal_acceptance.py --gpu B200 --pairs qwen3_4b_b16 --overrides "experiment=acceptance experiment.steps=[7,16]" --dry-run

Every pair (`configs/pair/`) is a plan of its own; no more steps can be asked than its blocks have. The checkpoints stay in a Modal Volume, so that another run downloads nothing.
*Not run on this hardware*: it has been tried without an account only, and never with a released checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import modal

from scripts import modal_bench

TIMEOUT_S = 4 * 3600
CHECKPOINTS = "/checkpoints"
FILES = ("*.json", "*.safetensors")  # of a repository; the vocabulary is tokenizer.json

app = modal.App("weights-that-stay-acceptance")
volume = modal.Volume.from_name("weights-that-stay-checkpoints", create_if_missing=True)
image = modal_bench.image.add_local_dir(modal_bench.HERE / "scripts", f"{modal_bench.THERE}/scripts", ignore=["**/__pycache__"])


@app.function(image=image, volumes={CHECKPOINTS: volume}, timeout=TIMEOUT_S)
def download(repositories: list[str]) -> None:
    """In a container without a GPU: put the repositories into the volume."""
    fetch(repositories, Path(CHECKPOINTS))
    volume.commit()


@app.function(image=image, volumes={CHECKPOINTS: volume}, retries=0, timeout=TIMEOUT_S, single_use_containers=True)
def measure(plan: str) -> dict[str, bytes]:
    """In the container: see `modal_bench.execute`."""
    return modal_bench.execute(plan, WTS_PAIR_CACHE=CHECKPOINTS)


def fetch(repositories: Sequence[str], folder: Path) -> None:
    """Download what is not there yet, each repository into the folder where `experiments.drafter.released` looks for it."""
    from huggingface_hub import snapshot_download

    for repository in repositories:
        snapshot_download(repository, local_dir=folder / repository, allow_patterns=list(FILES))


def compose(gpu: str, pairs: Sequence[str], overrides: str) -> list[str]:
    """A plan for each pair, as `modal_bench.compose` makes it.

    Raises:
        SystemExit: a pair or an override is wrong; the message says which.
    """
    return modal_bench.compose(gpu, "; ".join(f"{overrides} pair={pair}" for pair in pairs))


def repositories(plans: Sequence[str]) -> list[str]:
    """Of the targets and drafters of all plans, each once.

    Raises:
        SystemExit: a plan's pair is not a released one.
    """
    from experiments import convert
    from experiments.drafter.pair import ReleasedConfig

    found: list[str] = []
    for plan in plans:
        pair = convert.config(json.loads(plan)["config"]).pair
        if not isinstance(pair, ReleasedConfig):
            sys.exit(f"modal_acceptance: pair {pair and pair.name} is not a released one; take for example --pairs qwen3_4b_block7.")
        found += [pair.target, pair.drafter]
    return list(dict.fromkeys(found))


def _order(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="modal run scripts/modal_acceptance.py", description="Acceptance of released drafters on a rented GPU.", allow_abbrev=False
    )
    parser.add_argument("--gpu", required=True, choices=sorted(modal_bench.GPUS))
    parser.add_argument("--pairs", nargs="+", default=["qwen3_4b_block7"], help="of configs/pair (default: qwen3_4b_block7)")
    parser.add_argument(
        "--overrides", default="experiment=acceptance experiment.steps=[7]", help='"key=value ..." for every pair (default: %(default)s)'
    )
    parser.add_argument("--output", type=Path, default=Path("runs"), help="where the run folders go (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print repositories, plans and image, and rent nothing; needs no account")
    return parser.parse_args(arguments)


@app.local_entrypoint()
def main(*arguments: str) -> None:
    """Compose, download, send, fetch, validate. Exits with 1 if any plan brought back no run, or one that is not ok."""
    order = _order(arguments)
    plans = compose(order.gpu, order.pairs, order.overrides)
    download.remote(repositories(plans))
    rented = measure.with_options(gpu=modal_bench.GPUS[order.gpu])
    results = rented.starmap([(plan,) for plan in plans], order_outputs=False, return_exceptions=True)
    ended_well = [modal_bench.receive(result, order.output) for result in results]
    if not all(ended_well):
        sys.exit(1)


def _dry_run(arguments: Sequence[str]) -> NoReturn:
    order = _order(arguments)
    plans = compose(order.gpu, order.pairs, order.overrides)
    print(f"download: {', '.join(repositories(plans))} ({', '.join(FILES)}) to {CHECKPOINTS}")
    modal_bench.show(order.gpu, plans)
    sys.exit()


if (asked := modal_bench.dry_run_asked("modal_acceptance")) is not None:
    _dry_run(asked)
