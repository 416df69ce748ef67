from __future__ import annotations

from pathlib import Path

import pytest

from tests.data import make_runs


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture runs with known lines; read only."""
    root = tmp_path_factory.mktemp("results")
    make_runs.write_results(root)
    return root
