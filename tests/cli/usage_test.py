#!/usr/bin/env python3
"""Behaviour that all commands share: lost output, typing errors, help, log, Ctrl-C, completion.

Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree); an argument runs only tests whose name contains it.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cli_test import mooncake, write_trace
from tool import KV4, ROOT, Skipped, equal, kv4, ok, ok_json, refused, run_tests


def test_lost_output():
    """A lost result is a failure, wherever the disk was full."""
    commands = [["plan"], ["plan", "--json"], ["--help"], ["--version"], ["plan", "--help"], ["bench", "--list"], ["completion", "fish"],
                ["golden", str(ROOT / "tests/reference/vectors"), "--json"], ["session", "inspect", str(ROOT / "tests/cli/three_tokens.session")],
                ["replay", "--generate", "--limit", "10"], ["serve-metrics", "/none", "--once"], ["run", "--tokens", "1500", "--requests", "1"],
                ["bench", "--filter", "allocator/publish", "--min-time", "0.01"]]
    for args in commands:
        with open("/dev/full", "w") as full:
            done = subprocess.run([KV4, *args], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
        equal((args, done.returncode), (args, 3))
        equal((args, done.stderr), (args, "error: the output could not be written: No space left on device\n"))
    closed = subprocess.run(["sh", "-c", f"'{KV4}' plan >&-"], stderr=subprocess.PIPE, text=True)
    assert closed.returncode == 3 and "could not be written" in closed.stderr, closed


def test_nearest_names():
    with tempfile.TemporaryDirectory() as folder:
        path = write_trace(folder, [mooncake(0, 600, [1, 2])])
        for args, word in ((["plna"], "plan"), (["replya", path], "replay"), (["store", "verfy", folder], "verify"), (["session", "inspct", path], "inspect"),
                           (["plan", "--contxt", "1M"], "--context"), (["plan", "--reqests=4"], "--requests"), (["replay", path, "--polcy", "lru"], "--policy"),
                           (["store", "verify", folder, "--jsn"], "--json"), (["plan", "--model", "v4-flsh"], "v4-flash"), (["plan", "--model", "V4-pro"], "v4-pro"), (["plan", "--model", "V4-FLASH"], "v4-flash"),
                           (["plan", "--modle", "v4-pro"], "--model"),
                           (["plan", "--rows", "fp8_tile46"], "fp8_tile64"), (["plan", "--keys", "mxpf4"], "mxfp4"), (["plan", "--hca", "onlin"], "online"),
                           (["replay", path, "--policy", "s3fio"], "s3fifo"), (["replay", path, "--data", "reel"], "real"),
                           (["replay", path, "--snapshots", "checkpiont"], "checkpoint"), (["bench", "--filter", "gathre"], "gather"),
                           (["bench", "--filter", "alocator/publish_evict"], "allocator/publish_evict"), (["inspect", path, "--part", "entires"], "entries"),
                           (["completion", "bsh"], "bash"), (["run", "--device", "cdua"], "cuda"), (["golden", folder, "--device", "gpu"], "cuda"),
                           (["replay", path, "--device", "cup"], "cpu")):
            refused(args, f"did you mean '{word}'?")
        for args, command in ((["plna"], "kv4"), (["plan", "--contxt", "1M"], "kv4 plan"), (["store", "verfy", folder], "kv4 store"),
                              (["store", "verify", folder, "--jsn"], "kv4 store verify"), (["session", "inspect"], "kv4 session inspect")):
            refused(args, f"see '{command} --help'")
    for args in (["xyzzy"], ["plan", "--xyzzy"], ["plan", "--model", "gpt"], ["plan", "--model", "x" * 100_000]):
        assert "did you mean" not in kv4(*args).stderr, args


def test_help_fits_80_columns():
    for command in ok_json("completion"):
        text = ok(*command.split()[1:], "--help").stdout
        wide = [line for line in text.splitlines() if len(line) > 80]
        assert not wide, (command, wide)


def test_log_on_stderr():
    common = ["replay", "--generate", "--data", "real", "--limit", "10", "--capacity", "64K", "--layers", "3"]
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.touch(0o600)
        keys.write_text("ab" * 32)
        common += ["--key-file", str(keys)]
        quiet = ok(*common, "--disk", folder + "/a")
        equal(quiet.stderr, "")
        for args in (["-v", *common], [*common, "-v"], [*common, "--verbose"]):
            shutil.rmtree(folder + "/a")
            said = ok(*args, "--disk", folder + "/a").stderr
            assert said.startswith("info: store.opened: ") and folder in said, said
        said = kv4(*common, "--remote", "127.0.0.1:1").stderr  # no server; a warning needs no -v
        assert "warning: remote.failed: " in said and "info: " not in said, said


def interrupt(process, ready=None):
    """SIGINT as soon as the process wants to know of it (and `ready` is there). What it printed."""
    deadline = time.time() + 120
    caught = lambda: int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text()).group(1), 16) >> (signal.SIGINT - 1) & 1
    while not caught() or (ready is not None and not ready.exists()):
        assert time.time() < deadline and process.poll() is None, "it has ended before it could be interrupted"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=120)
    equal(process.returncode, 130)
    return printed, said


def start(*args):
    return subprocess.Popen([KV4, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_interrupted_results():
    """Ctrl-C gives the results so far."""
    vectors = str(ROOT / "tests/reference/vectors")
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "m"
        common = ["replay", "--generate", "--data", "real", "--limit", "5000", "--capacity", "64K", "--verify", "0", "--metrics", str(metrics)]
        printed, said = interrupt(start(*common, "--json"), metrics)
        result = json.loads(printed)
        assert result["interrupted"] is True and 0 < result["requests"] < 5000, result
        assert "interrupted: " in said and "of 5,000 requests" in said, said
        metrics.unlink()
        printed, _ = interrupt(start(*common), metrics)
        assert "block hit rate" in printed, printed
        printed, said = interrupt(start("replay", "--generate", "--limit", "300000", "--report", folder + "/page.html", "--json"))
        assert json.loads(printed)["interrupted"] is True and "no report" in said and not Path(folder, "page.html").exists(), said
    results = json.loads(interrupt(start("bench", "--json"))[0])
    equal(results[-1], {"interrupted": True})
    assert len(results) < 20, len(results)
    with tempfile.TemporaryDirectory() as folder:
        # The first work of the first round is done when the last one has begun to write.
        args, ready = ("store", "bench", folder, "--rounds", "1000", "--total-bytes", "2000000"), Path(folder, "kv4_store_bench", "cached files")
        printed, said = interrupt(start(*args), ready)
        assert "raw write" in printed and "store put" in printed and "interrupted: " in said, (printed, said)
        result = json.loads(interrupt(start(*args, "--json", "--index", "1000000"), ready)[0])
        assert result["interrupted"] is True and "index" not in result, result
        equal(len(result["sizes"]), 1)
        assert result["sizes"][0]["speeds"]["raw write"]["mb_per_s"] > 0, result
        equal(os.listdir(folder), [])
    printed, _ = interrupt(start("run", "--tokens", "1M"))  # no table without rows
    assert "tokens/s" in printed and "planned" not in printed and "check " not in printed, printed
    result = json.loads(interrupt(start("run", "--tokens", "1M", "--json"))[0])
    assert result["interrupted"] is True and result["ok"] is False and result["tokens"] < 10**6, result
    result = json.loads(interrupt(start("golden", vectors, "--json"))[0])
    assert result["interrupted"] is True and result["ok"] is False and len(result["checks"]) < 133, result
    equal(ok_json("golden", vectors)["interrupted"], False)


def test_completion():
    script = ok("completion", "bash").stdout
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kv4.bash"
        path.write_text(script)

        def complete(*words):
            line = " ".join(f"'{word}'" for word in words)
            command = f"source {path}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _kv4; echo ${{COMPREPLY[@]}}"
            return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split()

        equal(complete("kv4", "pl"), ["plan"])
        equal(complete("kv4", "store", "ver"), ["verify"])
        assert "--html" in complete("kv4", "plan", "--context", "1M", "--h"), complete("kv4", "plan", "--h")
        equal(complete("kv4", "session", "inspect", "--js"), ["--json"])
        # Values of the option before; files, by default, where it takes anything.
        equal(complete("kv4", "plan", "--model", ""), ["v4-flash", "v4-pro", "v4.1-flash"])
        equal(complete("kv4", "plan", "--rows", "b"), ["bf16"])
        equal(complete("kv4", "replay", "--policy", ""), ["lru", "s3fifo", "density"])
        equal(complete("kv4", "replay", "--snapshots", "c"), ["checkpoint"])
        equal(complete("kv4", "inspect", "--part", "pend"), ["pending", "pending-keys"])
        equal(complete("kv4", "run", "--device", "cu"), ["cuda", "cuda:0"])
        equal(complete("kv4", "plan", "--rows", "=", "b"), ["bf16"])  # --rows=b, as bash splits it
        equal(complete("kv4", "completion", "z"), ["zsh"])
        equal(complete("kv4", "plan", "--html", ""), [])
    assert ok("completion", "zsh").stdout.startswith("#compdef kv4\n")
    assert "complete -c kv4 -n '__fish_use_subcommand' -a plan" in ok("completion", "fish").stdout
    equal(ok_json("completion")["kv4 store"][:3], ["inspect", "verify", "gc"])
    refused(["completion", "tcsh"], "tcsh", "bash, zsh or fish")


def test_completion_in_zsh_and_fish():
    if not (shutil.which("zsh") and shutil.which("fish")):
        raise Skipped("there is no zsh or no fish; apt-get install zsh fish")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "_kv4"
        script.write_text(ok("completion", "zsh").stdout)

        def run(*command):
            return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "HOME": folder}).stdout.split()

        def zsh(*words):
            """The candidates for the last word, before zsh selects the fitting ones."""
            line = " ".join(f"'{word}'" for word in words)
            return run("zsh", "-fc", f"compdef() {{ :; }}; source {script}; compadd() {{ shift; print -l -- $@; }}; _files() {{ :; }}; compset() {{ :; }}; "
                                     f"words=({line}); CURRENT={len(words)}; _kv4")

        assert "plan" in zsh("kv4", "pl") and "--html" not in zsh("kv4", "pl")
        assert "--html" in zsh("kv4", "plan", "--context", "1M", "--h")
        assert "verify" in zsh("kv4", "store", "") and "plan" not in zsh("kv4", "store", "")
        equal(zsh("kv4", "plan", "--model", ""), ["v4-flash", "v4-pro", "v4.1-flash"])
        equal(zsh("kv4", "plan", "--model=v4-p"), ["v4-flash", "v4-pro", "v4.1-flash"])
        script.write_text(ok("completion", "fish").stdout)
        fish = lambda line: run("fish", "-N", "-c", f"source {script}; complete -C '{line}'")
        equal(fish("kv4 pl"), ["plan"])
        equal(fish("kv4 store ver"), ["verify"])
        equal(fish("kv4 plan --ht"), ["--html"])
        equal(fish("kv4 plan --model v"), ["v4.1-flash", "v4-flash", "v4-pro"])
        equal(fish("kv4 replay --policy s"), ["s3fifo"])
        equal(fish("kv4 replay --policy=s"), ["--policy=s3fifo"])
        # Commands of one name: kv4 inspect draws, kv4 session inspect does not.
        assert "--svg" in fish("kv4 inspect --"), fish("kv4 inspect --")
        equal(fish("kv4 session inspect --sv"), [])
        assert "--rounds" in fish("kv4 store bench --") and "--filter" not in fish("kv4 store bench --")


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
