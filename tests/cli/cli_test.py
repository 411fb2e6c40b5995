#!/usr/bin/env python3
"""The command line as a user sees it: figures, JSON, exit codes, messages. Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree); an argument runs only tests whose name contains it.
"""
import fcntl
import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

from tool import KV4, ROOT, Skipped, equal, kv4, ok, ok_json, parse_metrics, refused, run_tests

TINY = {
    "model_type": "deepseek_v4", "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 8,
    "sliding_window": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "rms_norm_eps": 1e-6,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
}
TINY_FORMATS = ["--rows", "fp8_row", "--keys", "fp8"]


def tiny_config(folder):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


# ---- help and usage

def test_version_and_help():
    assert ok("--version").stdout.startswith("kv4 ")
    text = ok("--help").stdout
    for command in ("plan", "run", "bench", "golden", "store", "session", "inspect", "replay", "serve-metrics", "completion"):
        assert command in text
        help_text = ok(command, "--help").stdout
        assert "--json" in help_text and "kv4 " + command in help_text, f"no example in the help of {command}"
    for command in ok_json("completion"):  # also nested ones: "kv4 store verify"
        help_text = ok(*command.split()[1:], "--help").stdout
        assert "Example" in help_text and (command == "kv4" or "--json" in help_text), command


def test_bad_usage():
    refused([], "subcommand")
    refused(["bogus"], "bogus", "plan, run, bench, golden, store, session, inspect, replay, serve-metrics, completion")
    refused(["plan", "--bogus"], "--bogus", "kv4 plan --help")
    refused(["plan", "extra"], "extra")
    refused(["plan", "--context"], "--context")
    refused(["plan", "--config", "x", "--model", "v4-pro"], "--model", "--config")


# ---- plan

def test_plan_weights():
    assert "weights are not counted" in ok("plan").stdout
    plan = ok_json("plan", "--memory", "141GB", "--gpus", "8", "--weights", "690GB", "--context", "1M")
    equal((plan["gpus"], plan["weights_bytes"]), (8, 690 * 10**9))
    equal((plan["memory"]["bytes"], plan["memory"]["cache_bytes"]), (141 * 10**9, 8 * 141 * 10**9 - 690 * 10**9))
    same = ok_json("plan", "--memory", str(plan["memory"]["cache_bytes"]), "--context", "1M")
    equal((plan["requests"], plan["total_bytes"]), (same["requests"], same["total_bytes"]))
    text = ok("plan", "--weights", "160GB", "--gpus", "4", "--context", "8K").stdout
    assert "With weights of 160" in text and "each of 4 GPUs" in text and "not counted" not in text, text
    refused(["plan", "--memory", "80GB", "--weights", "160GB", "--gpus", "2"], "--weights 160GB", "--gpus")
    text = ok("plan", "--gpus", "4", "--context", "1M").stdout
    assert "weights are not counted" in text and "on each of 4 GPUs, spread evenly: 1.10 GB" in text, text
    refused(["plan", "--gpus", "0"], "--gpus")
    refused(["plan", "--weights", "lots"], "--weights", "lots")
    refused(["plan", "--memory", "9000000000GB", "--gpus", "4096"], "--memory", "too large")


def test_plan_v4_flash():
    plan = ok_json("plan", "--model", "v4-flash", "--context", "1M", "--requests", "1")
    equal(plan["block_bytes"], 450944)
    equal(plan["state_bytes_per_request"], 5139456)
    assert plan["bytes_per_token"] <= 3530
    equal(round(plan["paper"]["bytes_per_token"]), 3514)
    equal(plan["paper"]["window_bytes_per_request"], 3214336)
    equal(plan["context"], 1 << 20)
    equal(sum(part["bytes"] for part in plan["parts"]), plan["total_bytes"])
    equal(sum(row["block_bytes"] for row in plan["rows"]), plan["block_bytes"])
    equal(sum(part["bytes"] for part in plan["state"]), plan["state_bytes_per_request"])
    names = {part["name"] for part in plan["parts"]}
    assert {"spare slots", "step workspace"} <= names, names


def test_plan_v4_pro():
    plan = ok_json("plan", "--model", "v4-pro", "--context", "128K")
    equal(plan["block_bytes"], 645760)
    equal(round(plan["paper"]["bytes_per_token"]), 5031)


def test_plan_text():
    text = ok("plan", "--context", "1M", "--requests", "2").stdout
    for part in ("450,944", "5,139,456", "3,523.00", "3,514.25", "spare slots", "step workspace", "█"):
        assert part in text, f"'{part}' is missing"
    assert max(len(line) for line in text.splitlines()) <= 110


def test_plan_formats():
    plain = ok_json("plan", "--context", "8K")
    equal(ok_json("plan", "--context", "8K", "--arrangement", "layer_major")["total_bytes"], plain["total_bytes"])
    bf16 = ok_json("plan", "--context", "8K", "--rows", "bf16", "--keys", "bf16")
    equal(bf16["block_bytes"], 21 * 32 * (1024 + 256) + 20 * 1024)
    equal(bf16["paper"], plain["paper"])
    assert ok_json("plan", "--context", "8K", "--page-alignment", "576")["block_bytes"] > plain["block_bytes"]
    assert ok_json("plan", "--context", "8K", "--rewind", "8")["state_bytes_per_request"] > plain["state_bytes_per_request"]
    assert ok_json("plan", "--context", "8K", "--hca", "raw")["state_bytes_per_request"] > plain["state_bytes_per_request"]
    assert ok_json("plan", "--context", "8K", "--pending", "bf16")["state_bytes_per_request"] < plain["state_bytes_per_request"]
    draft = ok_json("plan", "--context", "8K", "--draft-layers", "3")
    equal(draft["draft_bytes_per_request"], 3 * 128 * 584)
    equal(draft["state_bytes_per_request"], plain["state_bytes_per_request"])


def test_plan_memory():
    plan = ok_json("plan", "--memory", "141GB", "--context", "1M")
    memory = plan["memory"]
    equal(memory["bytes"], 141 * 10**9)
    most = memory["most_requests"]
    equal(plan["requests"], most["requests"])
    assert plan["total_bytes"] <= memory["bytes"] and memory["fits"]
    more = ok_json("plan", "--context", "1M", "--requests", str(most["requests"] + 1))
    assert more["total_bytes"] > memory["bytes"], "one more request would have fitted"

    plan = ok_json("plan", "--memory", "8GiB", "--requests", "16")
    context = plan["memory"]["longest_context"]["context"]
    equal(plan["context"], context)
    equal(context % 128, 0)
    assert plan["total_bytes"] <= 8 << 30
    longer = ok_json("plan", "--context", str(context + 128 * 2), "--requests", "16")
    assert longer["total_bytes"] > 8 << 30, "two more blocks each would have fitted"

    both = ok_json("plan", "--memory", "1GB", "--context", "1M", "--requests", "1")
    assert not both["memory"]["fits"] and both["memory"]["most_requests"]["requests"] == 0
    assert "does not fit" in ok("plan", "--memory", "1GB", "--context", "1M", "--requests", "1").stdout


def test_plan_sizes():
    for text, tokens in (("1M", 1 << 20), ("128K", 1 << 17), ("128k", 1 << 17), ("1.5K", 1536), ("131072", 1 << 17), ("131,072", 1 << 17), ("131_072", 1 << 17)):
        equal(ok_json("plan", "--context", text)["context"], tokens)
    for text, size in (("80GiB", 80 << 30), ("80GB", 80 * 10**9), ("80G", 80 * 10**9), ("0.5TB", 5 * 10**11), ("141 gb", 141 * 10**9), ("9000000000", 9 * 10**9)):
        equal(ok_json("plan", "--context", "8K", "--memory", text)["memory"]["bytes"], size)


def test_plan_bad_values():
    for text in ("12Q", "", "K", "1..5K", "0x10", "nan", "1e6", "1,,0", "1.5"):
        refused(["plan", "--context", text], "--context", f"'{text}'", "128K")
    for text in ("-5", "-1M"):
        refused(["plan", f"--context={text}"], "--context", text, "negative")
    for text in ("99999999999999999999", "9999999999G", "1" * 200):
        refused(["plan", "--context", text], "--context", "too large")
        refused(["plan", "--memory", text], "--memory", "too large")
    refused(["plan", "--context", "0"], "--context", "outside 1")
    refused(["plan", "--memory", "12ZB"], "--memory", "ZB", "141GB")
    refused(["plan", "--memory", "1MB"], "--memory", "cannot hold")
    refused(["plan", "--context", "2M"], "2,097,152", "1,048,576")
    refused(["plan", "--requests", "0"], "--requests", "65,536")
    refused(["plan", "--requests", "two"], "--requests", "two")
    refused(["plan", "--step-tokens", "999G"], "--step-tokens")
    refused(["plan", "--rows", "fp9"], "fp9", "fp8_tile64")
    refused(["plan", "--rows", "mxfp4"], "mxfp4", "fp8_tile64")
    refused(["plan", "--keys", "fp8_row"], "fp8_row", "mxfp4")
    refused(["plan", "--pending", "fp16"], "fp16", "bf16")
    refused(["plan", "--hca", "offline"], "offline", "online")
    refused(["plan", "--arrangement", "sideways"], "sideways", "layer")
    refused(["plan", "--page-alignment", "100"], "100", "64")
    refused(["plan", "--block-tokens", "100"], "100", "multiple")
    refused(["plan", "--model", "v5"], "v5", "v4-flash")
    refused(["plan", "--config", "/no/such/file.json"], "/no/such/file.json")


def test_plan_config():
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(folder)
        plan = ok_json("plan", "--config", config, *TINY_FORMATS)
        equal(plan["layers"], 4)
        refused(["plan", "--config", config], "fp8_tile64", "24")
        Path(folder, "bad.json").write_text('{"model_type": "deepseek_v4", "num_hidden_layers": -1')
        refused(["plan", "--config", str(Path(folder, "bad.json"))], "bad.json: the config is not valid JSON")


# ---- run

RUN_CHECKS = {"memory == plan", "gathered window", "gathered entries and keys", "gathered choice", "entries and keys against double precision",
              "rewind == never appended", "forked == alone", "fork == separate", "chunked == whole", "imported == original",
              "reused slot == fresh", "all returned"}


def check_run(*args):
    result = ok_json("run", *args)
    assert result["ok"] is True
    equal({check["name"] for check in result["checks"]}, RUN_CHECKS)
    assert all(check["ok"] for check in result["checks"])
    assert result["tokens"] > 0 and result["tokens_per_s"] > 0 and result["memcpy_share"] > 0
    for part in result["parts"]:
        equal(part["bytes"], part["planned_bytes"])
    return result


def test_run_whole_model():
    result = check_run("--tokens", "2K", "--seed", "3")
    equal(result["layers"], 43)
    equal(result["model"], "v4-flash")
    assert result["rewound_tokens"] > 0


def test_run_text():
    done = ok("run", "--tokens", "1500", "--requests", "2")
    for part in ("tokens/s", "share of memcpy speed", "planned", "chunked == whole", "rewind == never appended"):
        assert part in done.stdout, f"'{part}' is missing"
    assert "FAILED" not in done.stdout and "\x1b" not in done.stdout
    equal(done.stderr, "")


def test_run_tiny_in_every_format():
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(folder)
        for rows in ("fp8_row", "bf16"):
            for keys in ("fp8", "bf16", "nvfp4"):
                check_run("--config", config, "--tokens", "2K", "--rows", rows, "--keys", keys)
        for more in (["--hca", "raw"], ["--pending", "bf16"], ["--no-hadamard"], ["--arrangement", "layer_major"], ["--page-alignment", "576"],
                     ["--rewind", "0"], ["--rewind", "1"], ["--rewind", "33"], ["--rewind", "600"], ["--block-tokens", "8"], ["--block-tokens", "256"],
                     ["--requests", "1"], ["--requests", "7"], ["--threads", "3"], ["--seed", "0"]):
            check_run("--config", config, "--tokens", "3K", *TINY_FORMATS, *more)


def test_run_bad_values():
    refused(["run", "--tokens", "5"], "--tokens", "at least")
    refused(["run", "--tokens", "lots"], "lots")
    refused(["run", "--requests", "0"], "--requests")
    refused(["run", "--threads", "0"], "--threads")
    refused(["run", "--seed", "-1"], "--seed")
    refused(["run", "--tokens", "64M"], "--tokens", "positions")


# ---- devices

def test_device_names():
    vectors = str(ROOT / "tests/reference/vectors")
    for bad in ("gpu", "cuda:", "cuda:x", "cuda:-1"):
        refused(["run", "--device", bad], "--device", f"'{bad}' is not known", "cuda:N")
        refused(["golden", vectors, "--device", bad], "--device", f"'{bad}' is not known")
    refused(["run", "--device", "cuda:99"], "cannot be used")
    for command in ("run", "golden"):
        assert "--device" in ok(command, "--help").stdout


def test_device_cuda_or_a_clear_error():
    with tempfile.TemporaryDirectory() as folder:
        args = ("run", "--config", tiny_config(folder), "--tokens", "2000", "--device", "cuda", "--json")
        done = kv4(*args)
        if done.returncode == 0:
            equal(json.loads(done.stdout)["device"], "cuda")
        else:
            refused(args, "--device cuda cannot be used")


# ---- replay

def mooncake(time_ms, tokens, ids):
    return json.dumps({"timestamp": time_ms, "input_length": tokens, "output_length": 10, "hash_ids": ids})


# By hand: 3 + 3 + 2 + 3 ids. Without a limit the 2nd finds [1, 2], the 3rd nothing, the 4th all three. The lines are
# not in order of time.
SMALL_TRACE = [mooncake(30, 1300, [1, 2, 3]), mooncake(0, 1100, [1, 2, 3]), mooncake(10, 1536, [1, 2, 4]), mooncake(20, 600, [8, 9])]


def write_trace(folder, lines, name="trace.jsonl"):
    path = Path(folder) / name
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


def test_replay_by_hand():
    with tempfile.TemporaryDirectory() as folder:
        for name in ("trace.jsonl", "trace.jsonl.gz"):
            path = write_trace(folder, SMALL_TRACE, name)
            for policy in ("lru", "s3fifo", "density"):
                result = ok_json("replay", path, "--data", "none", "--policy", policy)
                equal(result["requests"], 4)
                equal(result["block_hit_rate"], 5 / 11)
                equal(result["token_hit_rate"], (1024 + 1280) / (1100 + 1536 + 600 + 1300))
        # Three ids fit: 4 displaces 3; 8 and 9 displace 4 and 2; the last request finds 1 only.
        result = ok_json("replay", path, "--capacity", str(3 * 512))
        equal(result["hit_blocks"], 3)
        equal(ok_json("replay", path, "--limit", "2")["hit_blocks"], 2)
        text = ok("replay", path).stdout
        assert "block hit rate" in text and "0.4545" in text, text


def test_replay_run_length():
    head = json.dumps({"format": "weka128_rle v1", "block_tokens": 128})
    line = lambda s, t, i, r: json.dumps({"s": s, "t": t, "i": i, "o": 1, "r": r})
    with tempfile.TemporaryDirectory() as folder:
        # Session 0 asks at 0 and, its gap of 9000 s cut, at 300 s; session 1 at 20 s, between them.
        path = write_trace(folder, [head, line(0, 5, 300, [[10, 2]]), line(0, 9005, 520, [[10, 2], [30, 2]]), line(1, 0, 700, [[10, 2], [30, 3]])], "t.gz")
        result = ok_json("replay", path)
        equal(result["blocks"], 2 + 5 + 4)
        equal(result["hit_blocks"], 0 + 2 + 4)


def test_replay_capacity_in_bytes():
    """A capacity with a final B is bytes, of whole blocks of the model; any other is tokens."""
    common = ["replay", "--generate", "--seed", "7", "--limit", "50"]
    block = ok_json("plan")["block_bytes"]
    for text, size in (("40GB", 40 * 10**9), ("4GiB", 4 << 30), ("450944B", 450944), ("1000kb", 10**6)):
        result = ok_json(*common, "--capacity", text)
        equal((text, result["capacity_tokens"], result["capacity_bytes"]), (text, size // block * 128, size))
    assert "(40GB)" in ok(*common, "--capacity", "40GB").stdout
    equal(ok_json(*common, "--capacity", "40GB", "--model", "v4-pro")["capacity_tokens"], 40 * 10**9 // 645760 * 128)
    equal(ok_json(*common, "--capacity", "1G")["capacity_tokens"], 1 << 30)
    assert "capacity_bytes" not in ok_json(*common, "--capacity", "1M")
    refused([*common, "--capacity", "450943B"], "450943B", "450,944 bytes")
    refused([*common, "--capacity", "40QB"], "40QB", "QB")
    refused([*common, "--capacity", "1MB", "--data", "real", "--layers", "2"], "windows only")
    real = ok_json("replay", "--generate", "--data", "real", "--limit", "5", "--layers", "3", "--capacity", "4MB")
    assert 0 < real["capacity_tokens"] < 10**6 and real["capacity_tokens"] % 128 == 0, real


def test_replay_generated():
    first = ok_json("replay", "--generate", "--seed", "7", "--limit", "500")
    again = ok_json("replay", "--generate", "--seed", "7", "--limit", "500")
    equal(first["requests"], 500)
    equal(first["hit_blocks"], again["hit_blocks"])
    assert 0.3 < first["block_hit_rate"] < 1
    assert ok_json("replay", "--generate", "--seed", "8", "--limit", "500")["hit_blocks"] != first["hit_blocks"]
    small = ok_json("replay", "--generate", "--seed", "7", "--limit", "500", "--capacity", "100K")
    assert small["block_hit_rate"] < first["block_hit_rate"] and small["evicted_blocks"] > 0


def test_replay_bad_input():
    good = mooncake(0, 600, [1, 2])
    head = json.dumps({"format": "weka128_rle v1", "block_tokens": 128})
    with tempfile.TemporaryDirectory() as folder:
        def bad(lines, *parts):
            path = write_trace(folder, lines)
            refused(["replay", path], *[part.replace("FILE", path) for part in parts])
        bad([good, "{"], "FILE:2", "JSON")
        bad([good, ""], "FILE:2", "JSON")
        bad([good, "[" * 100000], "FILE:2", "JSON")
        bad(["[]"], "FILE:1", "JSON object")
        bad([good, '{"timestamp": 0}'], "FILE:2", "input_length")
        bad([good.replace("600", "-5")], "FILE:1", "input_length", "-5")
        bad([good.replace("600", "1e300")], "FILE:1", "input_length")
        bad([good.replace("600", "6000")], "FILE:1", "2 ids", "12")
        bad([good.replace("[1, 2]", "[1, 1]")], "FILE:1", "twice")
        bad([good.replace("[1, 2]", '[1, "x"]')], "FILE:1", "hash_ids")
        bad([good.replace("[1, 2]", "[1, 18446744073709551615]")], "FILE:1", "hash_ids")
        bad([good.replace('"timestamp": 0', '"timestamp": null')], "FILE:1", "timestamp")
        bad([good, mooncake(1, 600, [3, 2])], "chain")
        bad(['{"format": "weka128_rle v2"}'], "FILE:1", "v2")
        bad([head, '{"s":0,"t":0,"i":128,"o":0,"r":[[0]]}'], "FILE:2", "'r'")
        bad([head, '{"s":0,"t":0,"i":128,"o":0,"r":[[0,2]]}'], "FILE:2", "2 ids")
        bad([head, '{"s":0,"t":9,"i":128,"o":0,"r":[[0,1]]}', '{"s":0,"t":8,"i":128,"o":0,"r":[[0,1]]}'], "FILE:3", "'t' is 8")
        bad([], "no request")
        path = write_trace(folder, [good] * 1000, "cut.gz")
        Path(path).write_bytes(Path(path).read_bytes()[:-9])
        refused(["replay", path], path, "damaged or truncated")
        path = write_trace(folder, [good])
        refused(["replay", path, "--policy", "lfu"], "lfu", "s3fifo")
        refused(["replay", path, "--capacity", "100"], "100 tokens", "512")
        refused(["replay", path, "--capacity", "0"], "--capacity")
        refused(["replay", path, "--data", "some"], "some", "none")
        refused(["replay", path, "--limit", "0"], "--limit")
        refused(["replay", path, "--generate"], "--generate")
    refused(["replay"], "--generate")
    refused(["replay", "/no/such/trace"], "/no/such/trace")


def test_replay_flags_of_bytes():
    """Without bytes these options do nothing, so they are refused before any other check."""
    for args in (["--remote", "127.0.0.1:1"], ["--remote", "no server"], ["--remote-optional"], ["--remote-allow", "a"], ["--remote-ca", "/none"],
                 ["--remote-cert", "/none"], ["--remote-key", "/none"], ["--remote-ttl", "5"], ["--disk", "/none"], ["--disk-capacity", "1GB"],
                 ["--host", "1MB"], ["--key-file", "/none"], ["--authenticate"], ["--accept-unauthenticated"], ["--status", "/none"], ["--serve"],
                 ["--layers", "3"], ["--threads", "2"], ["--device", "cuda"], ["--verify", "0"]):
        refused(["replay", "--generate", "--limit", "5", *args], args[0] + " ", "--data real")
        refused(["replay", "--generate", "--limit", "5", "--data", "none", *args], args[0] + " ", "--data real")
    done = subprocess.run([KV4, "replay", "--generate", "--limit", "5"], capture_output=True, text=True, env=dict(os.environ, KV4_KEY_FILE="/none"))
    equal((done.returncode, done.stderr), (0, ""))  # it is set for other commands


def test_replay_snapshots():
    """Three requests with one prefix: the first stores it, the second extends it, the third branches off inside it."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.jsonl")
        lines = [{"timestamp": t, "input_length": n, "output_length": 1, "hash_ids": ids}
                 for t, n, ids in ((0, 1100, [1, 2, 3]), (1, 1600, [1, 2, 4, 5]), (2, 600, [1, 6]))]
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))
        equal(ok_json("replay", path, "--snapshots", "full")["recomputed_tokens_per_hit"], 0)
        # Snapshots stand at 1024 (end of the first prompt) and 1536 (of the second); the third has none in 512 tokens.
        equal(ok_json("replay", path)["recomputed_tokens_per_hit"], 512 / 2)
        equal(ok_json("replay", path, "--snapshots", "checkpoint:512")["recomputed_tokens_per_hit"], 0)
        equal(ok_json("replay", path, "--snapshots", "none")["recomputed_tokens_per_hit"], (1024 + 512) / 2)
        for bad in ("some", "full:512", "checkpoint:100", "checkpoint:0"):
            refused(["replay", path, "--snapshots", bad], bad.split(":")[-1])


def test_replay_tenants():
    alone = ok_json("replay", "--generate", "--seed", "7", "--limit", "1000", "--capacity", "200K")
    shared = ok_json("replay", "--generate", "--seed", "7", "--limit", "1000", "--capacity", "200K", "--tenants", "4")
    equal(len(alone["tenants"]), 1)
    equal(len(shared["tenants"]), 4)
    equal(sum(tenant["requests"] for tenant in shared["tenants"]), 1000)
    assert shared["hit_blocks"] != alone["hit_blocks"]  # shares change the evictions
    equal(shared["tenant_share_tokens"], 200 * 1024 // 4)
    refused(["replay", "--generate", "--tenants", "0"], "--tenants")
    # Bytes do not change the tenants' shares.
    common = ["replay", "--generate", "--seed", "7", "--limit", "30", "--capacity", "64K", "--tenants", "2"]
    real = ok_json(*common, "--data", "real", "--layers", "3", "--verify", "0.2")
    equal(real["tenant_share_tokens"], ok_json(*common)["tenant_share_tokens"])
    equal((real["tenant_share_tokens"], real["wrong_bytes"]), (32 * 1024, 0))


def test_replay_with_bytes():
    """Every second request is also computed cold: hits must give the same bytes, whatever is stored."""
    common = ["replay", "--generate", "--data", "real", "--limit", "60", "--verify", "0.5", "--capacity", "64K"]
    for more in (["--snapshots", "full"], ["--snapshots", "checkpoint:1024", "--policy", "s3fifo", "--tenants", "2"],
                 ["--snapshots", "none", "--rows", "bf16", "--keys", "fp8", "--rewind", "4"]):
        result = ok_json(*common, *more)
        equal(result["wrong_bytes"], 0)
        assert result["verified_requests"] > 10 and result["verified_blocks"] > 1000, result
        assert result["block_hit_rate"] > 0.5 and result["evicted_blocks"] > 0, result
    refused([*common, "--layers", "0"], "--layers")
    refused([*common, "--layers", "2", "--host", "1MB"], "--layers 2", "windows")
    refused([*common, "--verify", "2"], "--verify")
    refused([*common, "--block-tokens", "256"], "--block-tokens 256", "128")


def test_replay_tiers_across_a_restart():
    with tempfile.TemporaryDirectory() as folder:
        common = ["replay", "--generate", "--data", "real", "--limit", "40", "--verify", "0.5", "--capacity", "64K", "--disk", folder + "/store"]
        first = ok_json(*common, "--host", "32MB")
        equal([tier["name"] for tier in first["tiers"]], ["host", "disk"])
        assert all(tier["stored"] > 100 and tier["refused"] == 0 for tier in first["tiers"]), first
        again = ok_json(*common)  # another process, which has only the store
        assert again["loaded_blocks"] > 100 and again["block_hit_rate"] > max(0.95, first["block_hit_rate"]), again
        for result in (first, again):
            assert result["wrong_bytes"] == 0 and result["verified_blocks"] > 500, result
        equal(ok_json("store", "verify", folder + "/store")["ok"], True)


class Redis:
    """A server on loopback without persistence, while the block runs."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def ask(self, command):
        """Sends a command, with the password of --requirepass if there is one; returns the raw reply."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            if self.arguments:
                connection.sendall(f"AUTH {self.arguments[1]}\r\n".encode())
                connection.recv(100)
            connection.sendall(command.encode() + b"\r\n")
            return connection.recv(1 << 16).decode()

    def __enter__(self):
        if shutil.which("redis-server") is None:
            raise Skipped("there is no redis-server; apt-get install redis-server")
        for _ in range(6):  # another process may take the port before the server does
            self.port = random.randint(12_000, 32_000)
            self.folder = tempfile.TemporaryDirectory()
            self.server = subprocess.Popen(["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder.name,
                                            *self.arguments], stdout=subprocess.DEVNULL)
            if self.answers():
                return self
            self.__exit__()
        raise AssertionError("redis-server does not start")

    def answers(self):
        for _ in range(200):
            try:
                if f"process_id:{self.server.pid}\r\n" in self.ask("INFO server"):
                    return True
            except OSError:
                pass
            if self.server.poll() is not None:
                return False
            time.sleep(0.05)
        return False

    def __exit__(self, *_):
        self.server.kill()
        self.server.wait()
        self.folder.cleanup()


def test_replay_metrics():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kv4.prom"
        common = ["replay", "--generate", "--limit", "20", "--capacity", "64K", "--layers", "3", "--tenants", "2", "--host", "8MB"]
        result = ok_json(*common, "--data", "real", "--metrics", str(path))
        values = parse_metrics(path.read_text())
        equal(values['kv4_prompts_total{result="hit"}'] + values['kv4_prompts_total{result="miss"}'], result["requests"])
        equal(values['kv4_prompt_tokens_total{result="usable"}'], result["hit_tokens"])
        equal(values['kv4_prefix_block_events_total{event="evicted"}'] >= result["evicted_blocks"], True)
        equal(sum(values[f'kv4_blocks{{state="{state}"}}'] for state in ("free", "held", "evictable")), 512)
        equal(sum(values[f'kv4_tenant_blocks{{tenant="{tenant}"}}'] for tenant in (0, 1)), values["kv4_prefix_blocks"])
        equal(values['kv4_tenant_share_blocks{tenant="1"}'], 256)
        equal(values['kv4_usable_tokens_bucket{le="+Inf"}'], values["kv4_usable_tokens_count"])
        equal(values["kv4_usable_tokens_sum"], result["hit_tokens"])
        equal(values['kv4_tier_writes_total{tier="host",result="stored"}'], result["tiers"][0]["stored"])
        equal(os.listdir(folder), ["kv4.prom"])
        refused([*common, "--data", "real", "--metrics", folder + "/no/such/place"], "place")
        refused(["replay", "--generate", "--metrics", str(path)], "--metrics", "--data real")


def test_replay_metrics_take_the_place_of_files_only():
    """A pipe stays a pipe and a link a link."""
    common = ["replay", "--generate", "--limit", "2", "--capacity", "4K", "--layers", "3", "--data", "real", "--verify", "0", "--metrics"]
    with tempfile.TemporaryDirectory() as folder:
        pipe, link, file = (Path(folder) / name for name in ("pipe", "link", "there/kv4.prom"))
        os.mkfifo(pipe)
        ends, end, said = os.open(pipe, os.O_RDWR), b"the end", []  # figures come several times, each closes the pipe

        def listen():
            while not b"".join(said).endswith(end):
                said.append(os.read(ends, 1 << 16))

        listener = threading.Thread(target=listen)
        listener.start()
        ok(*common, str(pipe))
        os.write(ends, end)
        listener.join(60)
        os.close(ends)
        assert stat.S_ISFIFO(os.lstat(pipe).st_mode), os.lstat(pipe)
        assert parse_metrics("# HELP kv4_build_info" + b"".join(said)[:-len(end)].decode().rsplit("# HELP kv4_build_info", 1)[1]), said
        file.parent.mkdir()
        link.symlink_to("there/kv4.prom")
        for before in (None, "before"):  # a link to nothing yet, and to a file
            ok(*common, str(link))
            equal(os.readlink(link), "there/kv4.prom")
            assert parse_metrics(file.read_text()), file.read_text()
            file.write_text("before")
        ok(*common, str(link))
        equal(os.listdir(file.parent), ["kv4.prom"])
        equal(sorted(os.listdir(folder)), ["link", "pipe", "there"])
        mine = Path(folder) / "mine"
        mine.write_text("precious")
        file.with_name("kv4.prom.new").symlink_to(mine)  # by an attacker who knows that name
        ok(*common, str(file))
        equal((mine.read_text(), os.listdir(file.parent)), ("precious", ["kv4.prom"]))
        assert parse_metrics(file.read_text())


def test_lost_files():
    """A file that does not take all bytes is a failure, and its old contents stay."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        for args in (["plan", "--html"], ["replay", "--generate", "--limit", "5", "--report"],
                     ["replay", "--generate", "--limit", "2", "--capacity", "4K", "--layers", "3", "--data", "real", "--metrics"]):
            path.write_text("before")
            done = subprocess.run([KV4, *args, str(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, preexec_fn=limit,
                                  restore_signals=False)  # Python ignores SIGXFSZ, and so does its child
            equal((args, done.returncode, done.stderr), (args, 3, f"error: {path}{'.new' if '--metrics' in args else ''} could not be written: File too large\n"))
            equal(os.listdir(folder), ["out"])
            if "--metrics" in args:
                equal(path.read_text(), "before")


def test_replay_remote_tier():
    common = ["replay", "--generate", "--data", "real", "--limit", "30", "--verify", "0.5", "--capacity", "64K", "--layers", "3"]
    for bad in ("host", "host:", ":1", "host:0", "host:70000", "host:1,", "a:1,b", "http://a:1", "redis://a/1", "redis://a,rediss://b"):
        refused([*common, "--remote", bad], "--remote" if "," not in bad or "//" not in bad else "rediss://")
    for bad in ("redis://user:hunter2@", "redis://user:hunter2@host:x", "user:hunter2@host:1", "redis://user:hunter2@host/3"):
        assert "hunter2" not in refused([*common, "--remote", bad], "--remote")
    for flags in (["--remote-ttl", "60"], ["--remote-optional"], ["--remote-ca", "x"]):
        refused([*common, *flags], "--remote")
    refused([*common, "--remote", "a:1", "--remote-ttl", "0"], "--remote-ttl")
    refused([*common, "--remote", "a:1", "--remote-allow", "a b"], "--remote-allow")
    refused([*common, "--remote", "127.0.0.1:1", "--remote-ca", "/no/such.pem"], "rediss://")
    refused([*common, "--remote", "rediss://127.0.0.1:1", "--remote-ca", "/no/such.pem"], "/no/such.pem")
    with Redis() as redis:
        first = ok_json(*common, "--remote", f"127.0.0.1:{redis.port}", "--host", "1MB")
        equal([tier["name"] for tier in first["tiers"]], ["host", "remote"])
        again = ok_json(*common, "--remote", f"127.0.0.1:{redis.port}")  # another process, which has only the server
        remote = again["tiers"][0]
        assert again["loaded_blocks"] > 100 and remote["hit_bytes"] > 0 and remote["hits"] >= again["loaded_blocks"], again
        assert again["block_hit_rate"] > max(0.95, first["block_hit_rate"]), again
        for result in (first, again):
            assert result["wrong_bytes"] == 0 and result["verified_blocks"] > 100, result
    address = f"127.0.0.1:{redis.port}"
    refused([*common, "--remote", address], "connection_refused", address, "--remote-optional")
    done = kv4(*common, "--remote", address, "--remote-optional", "--json")  # then gets miss, with a warning
    equal(done.returncode, 0)
    assert "connection_refused" in done.stderr, done.stderr
    gone = json.loads(done.stdout)
    equal((gone["loaded_blocks"], gone["wrong_bytes"]), (0, 0))
    equal(gone["tiers"][0]["failure"], "connection_refused")


def test_replay_remote_failures():
    common = ["replay", "--generate", "--data", "real", "--limit", "10", "--capacity", "64K", "--layers", "3"]
    with tempfile.TemporaryDirectory() as folder, Redis("--requirepass", "hunter2") as redis:
        address, metrics = f"127.0.0.1:{redis.port}", Path(folder) / "kv4.prom"
        for server, reason in ((address, "password_needed"), (f"redis://:wrong@{address}", "wrong_password"),
                               (f"rediss://:hunter2@{address}", "tls_refused")):
            assert "hunter2" not in refused([*common, "--remote", server], reason, address)
        right = f"redis://default:hunter2@{address}/0"
        first = ok_json(*common, "--remote", right, "--remote-ttl", "600")
        equal(first["tiers"][0]["failure"], "")
        assert first["tiers"][0]["stored"] > 10, first
        os.environ["KV4_REMOTE_PASSWORD"] = "hunter2"
        try:
            equal(ok_json(*common, "--remote", address)["tiers"][0]["failure"], "")
        finally:
            del os.environ["KV4_REMOTE_PASSWORD"]
        keys = int(redis.ask("DBSIZE")[1:])
        info = redis.ask("INFO keyspace")
        assert f"keys={keys},expires={keys}" in info, info
        redis.ask("CONFIG SET maxmemory 1mb")  # noeviction: every put is refused
        redis.ask("FLUSHALL")
        full = kv4(*common, "--remote", right, "--metrics", str(metrics))
        equal(full.returncode, 1)
        assert "server_full" in full.stderr and address in full.stderr and "hunter2" not in full.stdout + full.stderr, full
        values = parse_metrics(metrics.read_text())
        equal(values['kv4_tier_failing{tier="remote",reason="server_full"}'], 1)
        assert values['kv4_tier_failures_total{tier="remote",reason="server_full"}'] > 0, values
        told = kv4(*common, "--remote", right, "--remote-optional")
        equal(told.returncode, 0)
        assert "server_full" in told.stderr, told.stderr


def test_replay_with_the_documented_rights():
    """The Redis user of docs/security.md may do everything that a remote tier does, and nothing else."""
    rule = re.search(r"^ACL SETUSER kv4 .*$", (ROOT / "docs/security.md").read_text(), re.M)[0].replace("PASSWORD", "hunter2")
    common = ["replay", "--generate", "--data", "real", "--limit", "10", "--capacity", "64K", "--layers", "3"]
    with Redis() as redis:
        equal(redis.ask(rule), "+OK\r\n")
        server = f"redis://kv4:hunter2@127.0.0.1:{redis.port}"
        first = ok_json(*common, "--remote", server, "--remote-ttl", "600")["tiers"][0]
        again = ok_json(*common, "--remote", server)["tiers"][0]
        assert first["stored"] > 10 and again["hits"] > 10, (first, again)
        equal((first["failures"], again["failures"]), ({}, {}))
        with socket.create_connection(("127.0.0.1", redis.port), 5) as connection:
            connection.sendall(b"AUTH kv4 hunter2\r\nKEYS *\r\nGET other\r\n")
            said = b""
            while said.count(b"\r\n") < 3:
                said += connection.recv(1 << 16)
            equal((said.count(b"+OK"), said.count(b"NOPERM")), (1, 2))


def test_replay_report_in_a_browser():
    browser = shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        result = ok_json("replay", "--generate", "--seed", "7", "--limit", "2000", "--capacity", "1M", "--tenants", "3", "--report", str(page))
        text = page.read_text()
        assert "http" not in text and f"{result['block_hit_rate']:.4f}" in text
        refused(["replay", "--generate", "--limit", "10", "--report", folder + "/no/such/place.html"], "place.html")
        if browser is None:
            raise Skipped("there is no chromium to open the report; apt-get install chromium")
        open_page = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}/profile", "--dump-dom", page.as_uri()]
        shown = subprocess.run(open_page, capture_output=True, text=True, timeout=120)
        equal(shown.returncode, 0)
        assert 'data-plots="6"' in shown.stdout, shown.stdout[-500:]  # the page's script has run
        lines = re.findall(r'<polyline[^>]* points="([^"]*)"', shown.stdout)
        equal(len(lines), 2)
        points = [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]
        assert all(0 <= x <= 640 and 0 <= y <= 300 for line in points for x, y in line)
        equal([len(line) for line in points], [100, 100])
        equal(len(re.findall(r'<polygon class="series"', shown.stdout)), 3)
        equal(len(re.findall(r'<rect class="series" data-name="(?:lru|s3fifo|density)"', shown.stdout)), 3 * 6)

        # With bytes: also the work of tiers and requests.
        ok_json("replay", "--generate", "--data", "real", "--layers", "3", "--limit", "20", "--capacity", "64K", "--host", "8MB", "--report", str(page))
        shown = subprocess.run(open_page, capture_output=True, text=True, timeout=120)
        assert 'data-plots="8"' in shown.stdout, shown.stdout[-500:]
        for title in ("Block hit rate over time", "Block hit rate against capacity", "Bytes by tier", "Tokens computed again per hit", "Admit, restores included: requests no slower than"):
            assert title in shown.stdout, title


def test_replay_known_traces():
    """Hit rates that others measured on public traces; KV4_TRACES names the traces' folder."""
    folder = Path(os.environ.get("KV4_TRACES", ROOT.parent / "shared" / "traces"))
    known = {("conversation_trace.jsonl", "lru"): (.3664, .0533, .1361, .2852, .3513, .3635),
             ("conversation_trace.jsonl", "s3fifo"): (.3664, .0780, .1568, .2483, .3157, .3631),
             ("conversation_trace.jsonl", "density"): (.3664, .1045, .1785, .2994, .3513, .3638),  # our own: no less than the better of the two above
             ("weka128_rle.jsonl.gz", "lru"): (.9634, .0323, .1814, .7990, .9410, .9634)}
    recomputed = {"conversation_trace.jsonl": 133, "weka128_rle.jsonl.gz": 119}  # per hit, snapshots at ends of prompts and every 8192
    missing = sorted({name for name, _ in known if not (folder / name).exists()})
    for (name, policy), rates in known.items():
        if name in missing:
            continue
        for millions, rate in zip((None, 1, 3, 10, 20, 50), rates):
            size = ["--capacity", str(millions * 10**6)] if millions else []
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            result = ok_json("replay", str(folder / name), "--policy", policy, *size)
            assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60, f"{name} {policy} {millions}M: more than a minute of one core"
            got = result["block_hit_rate"]
            if not millions:
                assert abs(result["recomputed_tokens_per_hit"] - recomputed[name]) <= 0.02 * recomputed[name], result
            assert abs(got - rate) <= (0.002 if millions else 0.00005), f"{name} {policy} {millions}M: {got}, expected {rate}"
    if missing:
        raise Skipped(f"{', '.join(missing)} not in {folder}; set KV4_TRACES to the folder that holds them")


# ---- bench

def test_bench_json():
    started = time.time()
    results = ok_json("bench", "--filter", "append/prefill512/csa/fp8_tile64|allocator|gather/topk512/csa/bf16", "--min-time", "0.01")
    assert time.time() - started < 120
    equal([r["name"] for r in results], ["append/prefill512/csa/fp8_tile64", "gather/topk512/csa/bf16", "allocator/allocate_release", "allocator/publish_evict"])
    for result in results:
        assert result["seconds"] > 0
        if result["name"].startswith("allocator"):
            assert result["bytes"] == 0 and result["memcpy_ratio"] is None
        else:
            assert result["bytes"] > 0 and result["memcpy_ratio"] > 0


def test_bench_list():
    names = ok("bench", "--list").stdout.split()
    equal(len(names), len(set(names)))
    for group in ("append/", "compress/", "gather/", "snapshot/", "block/", "context/", "allocator/", "step/"):
        assert any(name.startswith(group) for name in names), group
    equal(ok_json("bench", "--list"), names)
    equal(ok_json("bench", "--list", "--filter", "^append/"), [name for name in names if name.startswith("append/")])
    refused(["bench", "--filter", "no such case"], "no such case", "--list")
    refused(["bench", "--filter", "("], "regular expression")
    refused(["bench", "--min-time", "-1"], "--min-time")


def test_bench_target():
    """An instruction set instead of the best one."""
    refused(["bench", "--target", "skalar"], "skalar", "does not run here", "did you mean 'scalar'")
    assert ", scalar." in ok("bench", "--target", "scalar", "--filter", "gather/topk512/csa/bf16", "--min-time", "0.01").stdout


def test_bench_resident_memory():
    result = ok_json("bench", "--rss")
    assert result["ok"] and result["planned_bytes"] >= 1 << 30
    assert abs(result["difference"]) <= 0.02


# ---- store

def make_store(folder):
    """Writes a store by hand as the format specifies: two records, 64 KiB. Returns its segment."""
    segment = Path(folder) / "segment-0000000000000001.kv4"
    segment.write_bytes((ROOT / "tests/cli/two_records.segment").read_bytes().ljust(1 << 16, b"\0"))
    return segment


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(bytes(data))


def test_store_sound():
    with tempfile.TemporaryDirectory() as folder:
        make_store(folder)
        for command in ("inspect", "verify"):
            found = ok_json("store", command, folder)
            assert found["ok"] and found["keys"] == 2 and found["tenants"] == 2, found
            equal(found["segments"][0]["payload_bytes"], 5 + 5000)
        assert "Every record is sound" in ok("store", "verify", folder).stdout
        freed = ok_json("store", "gc", folder)
        assert freed["ok"] and freed["freed_bytes"] == 0, freed
        equal(ok_json("store", "verify", folder)["keys"], 2)


def test_store_damaged():
    with tempfile.TemporaryDirectory() as folder:
        segment = make_store(folder)
        flip(segment, 8192 + 4096 + 2)     # the first record's payload
        flip(segment, 8192 + 8192 + 50)    # the second one's header
        equal(kv4("store", "inspect", folder).returncode, 1)
        done = kv4("store", "verify", folder)
        equal(done.returncode, 1)
        for part in ("damaged payload", "damaged header", "tenant 7", "000102030405060708090a0b0c0d0e0f"):
            assert part in done.stdout, f"'{part}' is missing in: {done.stdout}"
        found = json.loads(kv4("store", "verify", folder, "--json").stdout)
        assert not found["ok"] and found["damaged_records"] == 1 and found["unreadable_ranges"] == 1, found
        assert "damaged payload" in ok("store", "gc", folder).stdout
        after = ok_json("store", "verify", folder)
        assert after["ok"] and after["keys"] == 0, after


def test_store_refused():
    with tempfile.TemporaryDirectory() as folder:
        for command in ("inspect", "verify", "gc"):
            refused(["store", command, folder], "no store")
            refused(["store", command, folder + "/none"], "No such file")
            refused(["store", command], "DIR")
        refused(["store"], "subcommand")
        segment = make_store(folder)
        with open(Path(folder) / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused(["store", "verify", folder], "in use by another process")
        for copy in (0, 4096):
            flip(segment, copy + 9)
        assert "format version 1027" in kv4("store", "inspect", folder).stdout
        refused(["store", "gc", folder], "format version 1027", "reads 2 and 3")


def test_store_attacked():
    """Foreign files with a store's names: commands return, report files that they set aside, and change nothing."""
    with tempfile.TemporaryDirectory() as folder:
        make_store(folder)
        planted = ["segment-fffffffffffffffe.kv4", "segment-000000000000000A.kv4", "segment-0000000000000002.kv4", "index.kv4", "lock"]
        for name in planted[:2]:
            (Path(folder) / name).write_bytes(b"x" * 10000)
        for name in planted[2:]:
            os.mkfifo(Path(folder) / name)
        for command in ("inspect", "verify", "gc"):
            done = kv4("store", command, folder)
            assert all(name in done.stdout for name in planted), done
            found = json.loads(kv4("store", command, folder, "--json").stdout)
            equal((found["keys"], found["set_aside_files"], found["damaged_segments"]), (2, 4, 1))
        equal(sorted(path.name for path in Path(folder).iterdir()), sorted(planted + ["segment-0000000000000001.kv4"]))


def test_store_bench_ended():
    """A signal leaves no files behind; after a kill, the next run names and removes them."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "kv4_store_bench"
        start = lambda: subprocess.Popen([KV4, "store", "bench", folder, "--rounds", "1000", "--total-bytes", "20000000"],
                                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                         preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # nohup ignores it
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
            bench = start()
            while not (base.exists() and any(base.iterdir())) and bench.poll() is None:
                time.sleep(0.01)
            if number == signal.SIGKILL:
                refused(["store", "bench", folder, "--total-bytes", "2000000"], "another 'kv4 store bench'")
            bench.send_signal(number)
            equal((bench.communicate(timeout=60), bench.returncode)[1], -number if number == signal.SIGKILL else 128 + number)
            equal(base.exists(), number == signal.SIGKILL)
        done = kv4("store", "bench", folder, "--record-bytes", "70000", "--total-bytes", "1000000", "--rounds", "1")
        assert done.returncode == 0 and "an earlier bench was killed and left" in done.stderr, done
        equal(list(Path(folder).iterdir()), [])


def test_store_bench():
    with tempfile.TemporaryDirectory() as folder:
        figures = ok_json("store", "bench", folder, "--record-bytes", "70000", "--total-bytes", "2000000", "--rounds", "1",
                          "--depth", "4", "--index", "3000", "--encrypt")
        size = figures["sizes"][0]
        assert size["record_bytes"] == 70000 and size["ratios"]["store get / raw read"]["median"] > 0, figures
        assert size["speeds"]["store put"]["cpu_s_per_gb"] > 0, figures
        for name in ("sealed put / store put", "sealed get / store get", "authenticated put / store put"):
            assert size["ratios"][name]["median"] > 0, figures
        assert figures["index"]["records"] == 3000 and figures["index"]["lookup_ns"] > 0, figures
        equal(list(Path(folder).iterdir()), [])
        assert "store put / raw write" in ok("store", "bench", folder, "--total-bytes", "2000000", "--rounds", "1").stdout
        refused(["store", "bench", folder, "--depth", "0"], "depth")
        refused(["store", "bench", "/dev/null"], "/dev/null/kv4_store_bench", "cannot be made")


def test_plan_page():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.html"
        figures = ok_json("plan", "--context", "128K", "--requests", "4", "--html", str(path))
        page = path.read_text()
        for part in figures["parts"]:
            assert f"{part['name']}: {part['bytes']:,} bytes" in page, part
        assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
        refused(["plan", "--html", str(Path(folder) / "none" / "plan.html")], "plan.html", "folder")


def test_plan_page_of_a_machine():
    """The page agrees with the text about weights and GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.html"
        text = ok("plan", "--context", "128K", "--html", str(path)).stdout
        assert "weights are not counted" in text and "weights are not counted" in path.read_text()
        assert "<td>3,523.00 B</td>" in path.read_text(), path.read_text()[-3000:]
        text = ok("plan", "--context", "128K", "--weights", "690GB", "--gpus", "8", "--memory", "141GB", "--html", str(path)).stdout
        page = path.read_text()
        together, each = re.search(r"With weights of 690 GB: (\S+ TB), (\S+ GB) on each of 8 GPUs", text).groups()
        for row in ("<td>weights</td><td>690 GB (690,000,000,000 bytes)</td>", f"<td>with weights</td><td>{together}</td>",
                    f"<td>on each of 8 GPUs, spread evenly</td><td>{each}</td>", "<td>memory of each GPU</td><td>141 GB (141,000,000,000 bytes)</td>"):
            assert row in page, row
        assert "not counted" not in page
        ok("plan", "--weights", "9223372036854775807", "--gpus", "3", "--html", str(path))


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
