"""The door: `python -m experiments.run key=value ...` composes with Hydra, `--plan plan.json` executes a plan without it.

With `-m` every combination of a sweep runs in a process of its own. `--debug` (or HYDRA_FULL_ERROR=1) shows full tracebacks.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.convert import ConfigError
from experiments.execute import execute, execute_replica, report
from experiments.outcome import Status
from experiments.plan import Plan, read, run_in_fresh_process
from experiments.provenance import NoRevision, revision
from experiments.record import RecordError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit code: 0 ok, 1 the run failed, 2 the request cannot be met (one sentence says why)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--replica", type=int)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--debug", action="store_true")
    args, rest = parser.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwind, so that replicas and temporary files end too
    debug = args.debug or os.environ.get("HYDRA_FULL_ERROR") == "1"
    if args.plan is None:
        return _answered(lambda: _with_hydra(rest, debug), debug)
    return _answered(lambda: _with_plan(args.plan, rest, args.replica, args.into), debug)


def _answered(work: Callable[[], int], debug: bool) -> int:
    """The exit code of `work`; what the user can mend is told in one sentence instead of a traceback."""
    try:
        return work()
    except (ConfigError, NoRevision, RecordError) as error:
        if debug:
            raise
        print(f"run: {error}", file=sys.stderr)
        return 1 if isinstance(error, RecordError) else 2


def _with_plan(path: Path, rest: Sequence[str], replica: int | None, into: Path | None) -> int:
    if rest:
        raise ConfigError(f"a plan is executed as it is; it takes no {' '.join(rest)}")
    plan = read(path)
    if replica is None or into is None:
        return report(execute(plan))
    return 0 if execute_replica(plan, replica, into) is Status.OK else 1


def _with_hydra(arguments: Sequence[str], debug: bool) -> int:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from experiments import compose

    codes: list[int] = []

    def job(composed: Any) -> None:
        codes.append(_answered(lambda: carry_out(composed), debug))

    def carry_out(composed: Any) -> int:
        chosen = HydraConfig.get()
        plan = Plan(compose.from_hydra(composed), tuple(chosen.overrides.task), revision())
        return report(execute(plan)) if chosen.mode is RunMode.RUN else run_in_fresh_process(plan)

    compose.register()
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [sys.argv[0], *sorted(arguments, key=lambda word: word not in ("-m", "--multirun"))]  # Hydra wants all overrides in one row
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them and leaving
    try:
        hydra.main(config_path=str(compose.CONFIGS), config_name="config", version_base="1.3")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(compose.explain(error)) from error
    except OSError as error:  # with -m Hydra makes OUTPUT/.hydra before any job
        raise ConfigError(f"output: {error.filename} can not be written ({error.strerror}); choose another with output=...") from error
    finally:
        sys.argv = before[0]
        os.environ.pop("HYDRA_FULL_ERROR")
        if before[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = before[1]
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
