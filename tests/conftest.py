"""What all tests share: `--update-data` writes expected files anew instead of comparing."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-data", action="store_true", help="rewrite expected files; read the diff after"
    )


@pytest.fixture
def update_data(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-data"))
