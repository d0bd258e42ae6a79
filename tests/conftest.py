"""What all tests share.

`--update-data` writes expected files anew instead of comparing.  The suite draws the same random
examples every time, so that what passed once passes again; `--hypothesis-profile=explore` draws
new ones.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("suite", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("suite")


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
