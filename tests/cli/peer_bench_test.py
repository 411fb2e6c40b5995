#!/usr/bin/env python3
"""tools/peer_bench: its arithmetic and its report, with pretended kernels; what it says where torch, GPU, kv4 or public
kernels are missing. Where there are torch and libkv4_peer.so, a rehearsal too: kv4's CPU backend beside plain
reimplementations of the public functions, on the bytes that the GPU's cells have.

    tests/cli/peer_bench_test.py [BUILD_DIR]

Needs no GPU. Ends with `N passed, N failed`.
"""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "peer_bench"
BUILD = Path(sys.argv.pop() if len(sys.argv) > 1 else ROOT / "build")
LIBRARY = BUILD / "lib" / "libkv4_peer.so"

sys.dont_write_bytecode = True
sys.path.insert(0, str(SCRIPT.parent))
from peers.groups import run_cell
from peers.public_kernels import NotHere, first_that_works
from peers.report import Cell, table
from peers.timing import Contender, compare, launches_for, measure, time_in_both_orders


def can_rehearse():
    if not LIBRARY.exists():
        return f"{LIBRARY} is not built"
    return "" if importlib.util.find_spec("torch") else "torch is not here"


def run(*arguments, **environment):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **environment})


class Clock:
    """A simulated clock: launch i of a kernel takes its cost; `calls` lists the calls."""

    repeats, warm_ups, most_launches = 11, 3, 24

    def __init__(self):
        self.now, self.calls = 0.0, []

    def synchronize(self):
        pass

    def spend(self, name, us):
        def queue(i):
            self.calls.append((name, i))
            self.now += us
        return queue

    def graph(self, queue, launches):
        return lambda: [queue(i) for i in range(launches)]

    def once_us(self, work):
        begin = self.now
        work()
        return self.now - begin


def contender(clock, name, us, kv4=False, result=1):
    return Contender(name, clock.spend(name, us), kv4, lambda: result)


class Arithmetic(unittest.TestCase):
    def test_times_are_of_one_launch(self):
        clock = Clock()
        times = measure(clock, [contender(clock, "kv4", 8, True), contender(clock, "theirs", 20)])
        self.assertEqual((times["kv4"]["us"], times["theirs"]["us"]), (8, 20))
        self.assertNotIn("after_us", times["kv4"])

    def test_the_ordinary_kernel_is_taken_off(self):
        clock = Clock()
        times = measure(clock, [contender(clock, "kv4", 8, True), contender(clock, "theirs", 20)],
                        clock.spend("ordinary", 3))
        self.assertEqual((times["kv4"]["after_us"], times["theirs"]["after_us"], times["kv4"]["ordinary_us"]), (8, 20, 3))
        behind = clock.calls.index(("ordinary", 1))
        self.assertEqual(clock.calls[behind + 1], ("kv4", 1))  # of the same launch

    def test_both_orders_and_eleven_replays_of_each(self):
        clock, begun = Clock(), []
        graphs = {name: (lambda name=name: begun.append(name)) for name in ("a", "b")}
        time_in_both_orders(clock, graphs)
        each = clock.warm_ups + clock.repeats
        self.assertEqual(begun, ["a"] * each + ["b"] * each + ["b"] * each + ["a"] * each)

    def test_medians_pass_over_what_was_disturbed(self):
        clock, us = Clock(), iter([9, 9, 9] + [100, 5, 5, 5, 5, 5, 5, 5, 5, 5, 1] + [9, 9, 9] + [7] * 11)
        clock.once_us = lambda work: next(us)
        self.assertEqual(time_in_both_orders(clock, {"a": None}), {"a": (5, 7)})

    def test_ratios(self):
        self.assertEqual(compare({"kv4": (8, 10), "theirs": (10, 20)}, "kv4", "theirs"), (0.6, 0.8, 0.5))

    def test_launches(self):
        self.assertEqual([launches_for(us) for us in (0, 5, 100, 1000, 30000)], [24, 24, 10, 1, 1])

    def test_other_ways_to_call(self):
        def refuses():
            raise TypeError("no clean_logits")
        way, value = first_that_works("f", [refuses, lambda: 7])
        self.assertEqual((way(), value), (7, 7))
        with self.assertRaisesRegex(NotHere, "^f: no known way to call it works: TypeError: no clean_logits$"):
            first_that_works("f", [refuses, refuses])


class Report(unittest.TestCase):
    def cell(self, *contenders, missing=(), agree=lambda torch, a, b: "" if a == b else "results differ", clock=None):
        clock = clock or Clock()
        made = [c(clock) if callable(c) else c for c in contenders]
        bench = types.SimpleNamespace(clock=clock, torch=None)
        return run_cell(bench, "group", "cell", lambda _: (made, list(missing), agree, None))

    def test_the_fastest_public_kernel_is_the_one_to_beat(self):
        cell = self.cell(lambda c: contender(c, "kv4", 8, True), lambda c: contender(c, "slow", 20),
                         lambda c: contender(c, "quick", 10))
        self.assertEqual(cell.public, "quick")
        self.assertEqual(cell.json()["ratios"], {"kv4": {"ratio": 0.8, "by_order": [0.8, 0.8]}})
        self.assertRegex(table([cell]), r"kv4 +8.00 +quick +10.00 +0.80")

    def test_what_is_not_here_has_no_ratio(self):
        cell = self.cell(lambda c: contender(c, "kv4", 8, True), missing=["flash: not here"])
        self.assertEqual((cell.failure, cell.json()["ratios"], cell.json()["missing"]), ("", {}, ["flash: not here"]))
        self.assertRegex(table([cell]), r"kv4 +8.00 +not here$")

    def test_differences_below_the_noise_have_no_ratio(self):
        cell = Cell("group", "cell", {"kv4": {"us": 8, "orders": [8, 8], "after_us": 0, "after_orders": [1, -1]},
                                      "theirs": {"us": 16, "orders": [16, 16], "after_us": 0, "after_orders": [0, 0]}},
                    "theirs", ["kv4"])
        self.assertEqual((cell.ratio("kv4"), cell.ratio("kv4", after=True)), ((0.5, 0.5, 0.5), None))
        self.assertEqual(list(cell.json()["ratios"]["kv4"]), ["ratio", "by_order"])
        self.assertRegex(table([cell]), "0.50 +0.00$")

    def test_one_that_refuses_is_named_and_the_others_measured(self):
        def broken(clock):
            def queue(i):
                raise RuntimeError("sm_90 is not supported\nat line 3")
            return Contender("broken", queue, False, lambda: 1)
        cell = self.cell(lambda c: contender(c, "kv4", 8, True), broken, lambda c: contender(c, "theirs", 16))
        self.assertEqual((cell.failure, cell.public), ("", "theirs"))
        self.assertEqual(cell.missing, ["broken: RuntimeError: sm_90 is not supported"])

    def test_kernels_that_disagree_fail_and_have_no_ratio(self):
        cell = self.cell(lambda c: contender(c, "kv4", 8, True), lambda c: contender(c, "theirs", 16, result=2))
        self.assertIn("results differ", cell.failure)
        self.assertEqual(cell.json()["ratios"], {})
        self.assertIn("FAILED", table([cell]))

    def test_kv4_that_fails_fails_the_cell_only(self):
        def refuse(i):
            raise RuntimeError("kv4's attend: CUDA error 2")
        cell = self.cell(Contender("kv4", refuse, True, lambda: 1))
        self.assertIn("CUDA error 2", cell.failure)


class WhatIsHere(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name)

    def module(self, name, text):
        path = self.path.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(textwrap.dedent(text))

    def test_peers_are_named_with_their_version_or_the_reason(self):
        self.module("flash_mla", "__version__ = '7.1'\ndef flash_mla_with_kvcache(): pass\n")
        self.module("deep_gemm", "raise OSError('libcuda.so.1: not there')\n")
        result = run("--peers", PYTHONPATH=str(self.path))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r"flash_mla_with_kvcache +flash_mla.flash_mla_with_kvcache 7.1\n")
        self.assertRegex(result.stdout, r"flash_mla_sparse_fwd +not here: flash_mla has no flash_mla_sparse_fwd")
        self.assertRegex(result.stdout, r"fp8_mqa_logits +not here: deep_gemm: OSError: libcuda.so.1: not there")

    def test_newer_names_are_found(self):
        self.module("deep_gemm", "def fp8_fp4_mqa_logits(): pass\n")
        self.assertIn("deep_gemm.fp8_fp4_mqa_logits of unknown version", run("--peers", PYTHONPATH=str(self.path)).stdout)

    def test_without_torch(self):
        self.module("torch", "raise ImportError('it is not installed')\n")
        result = run(PYTHONPATH=str(self.path))
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertRegex(result.stderr, "^peer_bench: torch cannot be imported by .*: it is not installed\n$")

    def test_without_a_gpu(self):
        self.module("torch", "class cuda:\n    is_available = staticmethod(lambda: False)\n")
        result = run(PYTHONPATH=str(self.path))
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertIn("torch finds no GPU", result.stderr)

    def test_without_kv4(self):
        self.module("torch", "class cuda:\n    is_available = staticmethod(lambda: True)\n")
        result = run("--kv4", self.path / "none.so", PYTHONPATH=str(self.path))
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertRegex(result.stderr, "cannot load kv4: .*none.so.*build the target kv4_peer, or name the file with --kv4")

    def test_groups_and_help(self):
        result = run("--only", "decode")
        self.assertEqual(result.returncode, 2)
        self.assertIn("no group 'decode'; there are decode_attend, prefill_attend", result.stderr)
        self.assertIn("Example", run("--help").stdout)


# The public functions, plainly: rows are expanded to fp32, scores and softmax are computed as their documents say.
PLAIN = {
    "flash_mla": """
        import torch
        def rows(cache):  # [pages, rows, 1, 584] views: data of a page, then scales
            pages, n = cache.shape[:2]
            page = cache.as_strided((pages, n * 584), (cache.stride(0), 1))
            data = page[:, :n * 576].reshape(pages * n, 576)
            scale = page[:, n * 576:].reshape(pages * n, 8)[:, :7].float()
            value = data[:, :448].contiguous().view(torch.float8_e4m3fn).float().view(-1, 7, 64)
            value = value * torch.exp2(scale - 127)[..., None]
            return torch.cat((value.flatten(1), data[:, 448:].contiguous().view(torch.bfloat16).float()), 1)
        def attend(q, kv, seen, scale, sink):  # q [heads, 512]
            kv = kv[seen]
            p = q.float() @ kv.T * scale
            top = torch.maximum(p.amax(1), sink)
            e = torch.exp(p - top[:, None])
            return (e @ kv / (e.sum(1) + torch.exp(sink - top))[:, None]).to(torch.bfloat16)
        class Plan: pass
        def get_mla_metadata(*a, **k): return Plan(), None
        def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
                                   softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
                                   extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None):
            assert q.shape[2] in (64, 128) and k_cache.stride(0) % 576 == 0 and type(tile_scheduler_metadata) is Plan
            one = rows(k_cache)
            two = rows(extra_k_cache) if extra_k_cache is not None else one[:0]
            out = torch.empty(*q.shape, dtype=torch.bfloat16)
            for b in range(q.shape[0]):
                kv = torch.cat((one[indices[b, 0].long()],
                                two[extra_indices_in_kvcache[b, 0].long()] if extra_k_cache is not None else two))
                out[b, 0] = attend(q[b, 0], kv, slice(None), softmax_scale, attn_sink)
            return out, None
        def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
            assert indices.shape[2] % 128 == 0 and indices.dtype == torch.int32
            out = torch.empty_like(q)
            for t in range(q.shape[0]):
                seen = indices[t, 0, :topk_length[t]].long()
                out[t] = attend(q[t], kv[:, 0].float(), seen[seen >= 0], sm_scale, attn_sink)
            return out, None, None
    """,
    "deep_gemm": """
        import torch
        def get_num_sms(): return 132
        def get_paged_mqa_logits_metadata(lens, block, sms): return torch.zeros(1)
        def score(q, k, scale, w):  # [heads, 128], [n, 128]
            return (torch.relu(q.float() @ k.float().T) * w[:, None]).sum(0) * scale
        def fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len):
            assert isinstance(q, torch.Tensor) and context_lens.dim() == 2, 'q is a tensor, context_lens are [B, next_n]'
            n, out = kv_cache.shape[1], torch.full((q.shape[0], max_context_len), -torch.inf)
            for b in range(q.shape[0]):
                page = kv_cache[block_table[b].long()].reshape(-1, n * 132)
                keys = page[:, :n * 128].reshape(-1, 128).contiguous().view(torch.float8_e4m3fn)
                scales = page[:, n * 128:].contiguous().view(torch.float32).flatten()
                seen = int(context_lens[b, 0])
                out[b, :seen] = score(q[b, 0], keys, scales, weights[b])[:seen]
            return out
        def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=True):
            out = torch.full((q.shape[0], kv[0].shape[0]), -torch.inf)
            for t in range(q.shape[0]):
                out[t, ks[t]:ke[t]] = score(q[t], kv[0], kv[1], weights[t])[ks[t]:ke[t]]
            return out
    """,
    "vllm.__init__": "__version__ = '0.0'",
    "vllm._custom_ops": """
        def cp_gather_indexer_k_quant_cache(cache, keys, scales, table, cut):
            n = cache.shape[1]
            page = cache[table[0].long()].reshape(-1, n * 132)
            keys.copy_(page[:, :n * 128].reshape(-1, 128))
            scales.copy_(page[:, n * 128:].reshape(-1, 4))
        def best(logits, lens, out, k):
            for t in range(logits.shape[0]):
                n = min(k, int(lens[t]))
                out[t] = -1
                out[t, :n] = logits[t, :lens[t]].topk(n).indices
        def top_k_per_row_decode(logits, next_n, lens, out, rows, s0, s1, k): best(logits, lens, out, k)
        def top_k_per_row_prefill(logits, ks, ke, out, rows, s0, s1, k): best(logits, ke, out, k)
    """,
    "sglang.kernels.ops.attention.dsv4.topk": """
        def best(scores, lens, out, offsets=None):
            assert scores.stride(1) == 1 and scores.stride(0) % 4 == 0 and lens.shape == scores.shape[:1] == out.shape[:1]
            for t in range(len(lens)):
                n = min(out.shape[1], int(lens[t]))
                out[t] = -1
                out[t, :n] = scores[t, :lens[t]].topk(n).indices + (0 if offsets is None else offsets[t])
        def plan_topk_v2(seq_lens, static_threshold=0): return seq_lens.new_zeros(len(seq_lens) + 1, 2)
        def topk_transform_512_v2(scores, seq_lens, page_tables, out_page_indices, page_size, metadata):
            assert page_tables is None and metadata.shape == (len(seq_lens) + 1, 2)
            best(scores, seq_lens, out_page_indices)
        def topk_transform_512(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices=None):
            assert page_tables.shape[0] == scores.shape[0] and out_page_indices.is_contiguous()
            best(scores, seq_lens, out_raw_indices)
        def topk_transform_ragged_v2(scores, seq_lens, *, out_offsets, out_indices, row_starts=None):
            best(scores, seq_lens, out_indices, out_offsets)
    """,
    "vllm.models.__init__": "", "vllm.models.deepseek_v4.__init__": "", "vllm.models.deepseek_v4.common.__init__": "",
    "vllm.models.deepseek_v4.common.ops.__init__": "",
    "vllm.models.deepseek_v4.common.ops.cache_utils": """
        import flash_mla
        def dequantize_and_gather_k_cache(out, cache, seq_lens, gather_lens, table, block_size, offset):
            assert cache.shape[1] == block_size and cache.shape[2] == 584
            n = int(seq_lens[0])
            row = flash_mla.rows(cache[:, :, None])
            import torch
            at = torch.arange(n)
            slot = table[0].long()[at // block_size] * block_size + at % block_size
            out[0, offset:offset + n] = row[slot].to(out.dtype)
    """,
}


@unittest.skipIf(can_rehearse(), can_rehearse())
class Rehearsal(unittest.TestCase):
    def rehearse(self, modules, *arguments, other=("", "")):
        with tempfile.TemporaryDirectory() as folder:
            for name in modules:
                path = Path(folder).joinpath(*name.split(".")).with_suffix(".py")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(textwrap.dedent(PLAIN[name]).replace(*other))
            result = run("--device", "cpu", "--kv4", LIBRARY, "--json", *arguments, PYTHONPATH=folder)
        return result.returncode, json.loads(result.stdout), result.stderr

    def test_kv4_and_the_public_functions_agree_on_the_bytes_of_every_group(self):
        code, data, text = self.rehearse([name for name in PLAIN if not name.startswith("sglang")])
        self.assertEqual(code, 0, text)
        cells = {f"{cell['group']}: {cell['cell']}": cell for cell in data["cells"]}
        self.assertEqual(len(cells), 8)
        for name, cell in cells.items():
            self.assertNotIn("failure", cell, name)
            self.assertTrue(cell["ratios"], f"{name}: {cell['missing']}")
            self.assertTrue(all("ratio" in ratio for ratio in cell["ratios"].values()))
        self.assertEqual(cells["prefill_attend: CSA"]["public"],
                         "vllm.dequantize_and_gather_k_cache + flash_mla.flash_mla_sparse_fwd")
        self.assertEqual(cells["prefill_index: 8 tokens x 1024 keys"]["public"],
                         "vllm.cp_gather_indexer_k_quant_cache + deep_gemm.fp8_mqa_logits + vllm.top_k_per_row_prefill")
        self.assertIn("after_us", cells["decode_attend: CSA, b = 2"]["times"]["kv4"])

    def test_sglang_has_two_kernels_for_a_decode_and_one_for_a_chunk(self):
        code, data, text = self.rehearse(["deep_gemm", "sglang.kernels.ops.attention.dsv4.topk"],
                                         "--only", "decode_index,prefill_index")
        self.assertEqual(code, 0, text)
        chosen = [[name.split("sglang.")[1] for name in cell["times"] if "sglang." in name] for cell in data["cells"]]
        self.assertEqual(chosen, [["topk_transform_512_v2", "topk_transform_512"], ["topk_transform_ragged_v2"]])

    def test_a_kernel_that_computes_something_else_is_a_failure(self):
        for module, other in (("flash_mla", ("scale - 127", "scale - 126")),
                              ("deep_gemm", ("torch.relu(q.float() @ k.float().T)", "(q.float() @ k.float().T)"))):
            group = {"flash_mla": "decode_attend", "deep_gemm": "decode_index"}[module]
            code, data, text = self.rehearse(PLAIN, "--only", group, other=other)
            self.assertEqual(code, 1, text)
            self.assertTrue(any("differ" in cell.get("failure", "") or "are the same" in cell.get("failure", "")
                                for cell in data["cells"]), text)

    def test_without_a_gather_the_public_time_says_so(self):
        code, data, text = self.rehearse(["flash_mla"], "--only", "prefill_attend")
        self.assertEqual(code, 0, text)
        for cell in data["cells"]:
            self.assertEqual(cell["public"], "flash_mla.flash_mla_sparse_fwd alone")
            self.assertIn("the public time is without the gather", cell["missing"][0])

    def test_public_kernels_that_cannot_be_called_leave_kv4_alone(self):
        code, data, text = self.rehearse(PLAIN, "--only", "decode_index", other=("isinstance(q, torch.Tensor)", "False"))
        self.assertEqual(code, 0, text)
        self.assertEqual(data["cells"][0]["ratios"], {})
        self.assertIn("kv4 fp8 exact", data["cells"][0]["times"])
        self.assertIn("deep_gemm.fp8_paged_mqa_logits: no known way to call it works", data["cells"][0]["missing"][0])
        self.assertIn("without a ratio: deep_gemm.fp8_paged_mqa_logits", text)

    def test_without_any_public_kernel(self):
        code, data, text = self.rehearse([])
        self.assertEqual(code, 0, text)
        for cell in data["cells"]:
            self.assertEqual((cell["public"], cell["ratios"]), (None, {}))
            self.assertTrue(cell["missing"])


if __name__ == "__main__":
    why = can_rehearse()
    if why:
        print(f"no rehearsal: {why}")
    outcome = unittest.main(exit=False).result
    bad = len(outcome.failures) + len(outcome.errors)
    print(f"{outcome.testsRun - bad - len(outcome.skipped)} passed, {bad} failed")
    sys.exit(1 if bad else 0)
