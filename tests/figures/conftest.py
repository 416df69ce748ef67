from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from tests.data import make_runs


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture runs with known lines; read only."""
    root = tmp_path_factory.mktemp("results")
    make_runs.write_results(root)
    return root


@pytest.fixture
def closed() -> Iterator[None]:
    """Figures are closed after each test, where no fixture keeps one for a whole module."""
    yield
    plt.close("all")
