#!/usr/bin/env python3
"""The tool prints the output that README shows. Last line: `N passed, N failed`.

A paragraph that begins with a command in backticks and ends with a colon is followed by its output. The tool prints
every line of it in this order; `...` stands for any lines.
"""
import re
import shlex
import sys

from tool import ROOT, equal, ok, ok_json, run_tests


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
    """A command ends with the line that README gives as its end."""
    text = (ROOT / "README.md").read_text()
    for command, block in re.findall(r"^`(kv4 [^`]+)` ends with:\n\n```\n(.*?)```", text, flags=re.M | re.S):
        lines = block.splitlines()
        equal(ok(*shlex.split(command)[1:]).stdout.splitlines()[-len(lines):], lines)


def test_commands_of_the_documents():
    """The tool has the flags of every command in a document; a replay has requests."""
    commands = ok_json("completion")
    documents = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(ROOT.glob("docs/**/*.md"))
    seen = 0
    for path in documents:
        for line in re.findall(r"(?:`|^|/)(kv4 [a-z-]+[^`\n|#>]*)", path.read_text(), flags=re.M):
            words = line.split()
            command = " ".join(words[:2])
            if command not in commands:
                continue
            if len(words) > 2 and f"{command} {words[2]}" in commands:
                command = f"{command} {words[2]}"
            flags = re.findall(r"(--[a-z-]+)", line)
            seen += bool(flags)
            unknown = set(flags) - set(commands[command]) - {"--help"}
            assert not unknown, f"{path.name}: {command} has no {unknown}: {line}"
            if command == "kv4 replay" and len(flags) > 1:  # with one it is the flag that is spoken of
                assert "--generate" in flags or not words[2].startswith("-"), f"{path.name}: a replay of nothing: {line}"
    assert seen > 20, seen


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
