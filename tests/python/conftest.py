"""Prints the last line that `./test` reads: `N passed, N failed, N skipped`."""
import importlib.util

# with_torch/ needs torch and transformers: `./test --all` brings them.
collect_ignore = [] if importlib.util.find_spec("torch") else ["with_torch"]


def pytest_unconfigure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    count = {name: len(reporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    reporter.write_line(f"{count['passed']} passed, {count['failed'] + count['error']} failed, {count['skipped']} skipped")
