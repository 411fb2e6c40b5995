#!/usr/bin/env python3
"""What README shows of the tool is what the tool prints. Last line: `N passed, N failed`.

A paragraph that begins with a command in backticks and ends with a colon is followed by its output: every line is there in this order, `...` stands for any.
"""
import re
import shlex
import sys

from tool import ROOT, equal, ok, run_tests


def shown():
    """(command, the lines that README shows of its output)."""
    text = (ROOT / "README.md").read_text()
    return [(command, block.splitlines()) for command, block in re.findall(r"^`(kv4 [^`]+)`[^`\n]*:\n\n```\n(.*?)```", text, flags=re.M | re.S)]


def test_outputs_in_readme():
    commands = shown()
    assert len(commands) >= 2, commands
    for command, lines in commands:
        printed = ok(*shlex.split(command)[1:]).stdout.splitlines()
        at = 0
        for line in lines:
            if line.strip() in ("", "..."):
                continue
            assert line in printed[at:], f"{command}: README shows '{line}', which is not printed after line {at}"
            at = printed.index(line, at) + 1


def test_plan_ends_as_shown():
    """Where README says that a command ends with something, it does."""
    text = (ROOT / "README.md").read_text()
    for command, block in re.findall(r"^`(kv4 [^`]+)` ends with:\n\n```\n(.*?)```", text, flags=re.M | re.S):
        lines = block.splitlines()
        equal(ok(*shlex.split(command)[1:]).stdout.splitlines()[-len(lines):], lines)


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
