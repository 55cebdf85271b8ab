"""The list of planted errors after `pytest -m mutations`."""


def pytest_terminal_summary(terminalreporter) -> None:
    """List which test caught each error, then the errors that no test caught."""
    reports = [
        (report, dict(report.user_properties))
        for kind in ("passed", "failed")
        for report in terminalreporter.stats.get(kind, [])
        if "test_is_caught" in report.nodeid and report.when == "call"
    ]
    if not reports:
        return
    terminalreporter.section("planted errors")
    for report, found in reports:
        name = report.nodeid.partition("[")[2].removesuffix("]")
        by = found.get("caught by", "SURVIVED, or could not be tried: see above")
        terminalreporter.write_line(f"{report.duration:6.1f} s  {name}: {by}")
    caught = sum(report.passed for report, _ in reports)
    terminalreporter.write_line(f"{caught} of {len(reports)} planted errors were caught")
