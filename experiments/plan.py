"""A run, composed here and executed anywhere: the resolved config, the overrides it came from, and the source revision.

python -m experiments.plan -o plan.json device=h200 experiment=step_slope
python -m experiments.run --plan plan.json          # on the GPU machine: no Hydra, no Git, no network
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import convert
from experiments.provenance import NoRevision, Revision, revision
from experiments.schema import Config

_KEYS = ("config", "argv", "revision")


@dataclass(frozen=True)
class Plan:
    """Everything a run needs to know before it starts."""

    config: Config
    argv: tuple[str, ...]
    revision: Revision

    def write(self, path: Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        data = {"config": self.config.as_dict(), "argv": list(self.argv), "revision": self.revision.as_dict()}
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(data, indent=1) + "\n")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def read(path: Path) -> Plan:
    """The plan in `path`, with its revision as this tree executes it (dirty where the sources differ).

    Raises:
        convert.ConfigError: the file is missing, is no plan, or its config is not valid for this source.
    """
    try:
        data = json.loads(path.read_text())
        config, argv, planned = (data[key] for key in _KEYS)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise convert.ConfigError(
            f"{path} is not a plan ({error}); make one with: python -m experiments.plan -o {path} KEY=VALUE ..."
        ) from error
    return Plan(convert.config(config), tuple(argv), revision(convert.convert(Revision, planned, "revision")))


def run_in_fresh_process(plan: Plan) -> int:
    """Execute `plan` in a process of its own, which inherits no CUDA context and no caches, and return its exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "plan.json"
        plan.write(path)
        return subprocess.run([sys.executable, "-m", "experiments.run", "--plan", str(path)], check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Compose a plan, or print the revision that a machine without Git needs in WTS_REVISION."""
    parser = argparse.ArgumentParser(prog="python -m experiments.plan", description="Compose a run that can be executed elsewhere.")
    parser.add_argument("-o", "--output", type=Path, default=Path("plan.json"))
    parser.add_argument("--revision", action="store_true", help="print the source revision and make no plan")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args(arguments)
    try:
        if args.revision:
            print(revision())
            return 0
        from experiments.compose import compose

        Plan(compose(args.overrides), tuple(args.overrides), revision()).write(args.output)
    except (convert.ConfigError, NoRevision) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"plan: {args.output} cannot be written ({error.strerror}); make its folder first, or choose another -o", file=sys.stderr)
        return 2
    print(f"{args.output}: run it with: python -m experiments.run --plan {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
