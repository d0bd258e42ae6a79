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


@pytest.fixture(scope="session")
def host_compiler() -> None:
    """For tests that run the CUDA text on the CPU: a C++ compiler, or a reason to skip."""
    from attngen.cpu.build import find_compiler
    from attngen.diagnostics.diagnostic import AttnError

    try:
        find_compiler()
    except AttnError as error:
        pytest.skip(str(error))
