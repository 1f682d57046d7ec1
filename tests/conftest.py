"""`--all`: every format on every chip in every kernel family instead of each of them at least once; what `make test-all` passes.

`--no-skips`: what `make test` passes, since its set-up installs everything the tests need.

A test that skips itself there hides a broken set-up, so it fails the run. Only nvcc, which no package brings, may be missing.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every format x chip x kernel family (an hour)")
    parser.addoption("--no-skips", action="store_true", help="fail if a test is skipped, but for want of nvcc")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--no-skips"):
        return
    hidden = [r for r in reporter.stats.get("skipped", []) if "nvcc" not in str(r.longrepr)]
    if hidden:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.section("skipped, although make setup installs what they need")
        for report in hidden:
            reporter.line(f"{report.nodeid}: {report.longrepr}")
