"""kv4.deep_gemm against plain torch: cases of the kinds that DeepGEMM's own tests have, sampled."""
import dataclasses
import itertools
import random
import subprocess
import sys

import pytest
import torch

import kv4
import kv4.deep_gemm as deep_gemm
from devices import DEVICES
from plain import fp4_rows, fp8_keys, index_scores


def difference(x, y):
    """DeepGEMM's measure: 1 - 2 x.y / (x.x + y.y)."""
    x, y = x.double(), y.double()
    total = (x * x + y * y).sum()
    return float(1 - 2 * (x * y).sum() / total) if total > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    fp4: bool
    dtype: torch.dtype
    heads: int
    channels: int
    next_n: int = 1
    lens_2d: bool = True
    block: int = 64
    compact: bool = False

    @property
    def tolerance(self):
        return 3e-5 if self.dtype == torch.bfloat16 else 5e-6


def all_cases(**varied):
    names = list(varied)
    for fp4, dtype, heads, channels, *rest in itertools.product(
            [False, True], [torch.float32, torch.bfloat16], [8, 32, 64], [32, 64, 128], *varied.values()):
        if not fp4 or channels == 128:
            yield Case(fp4, dtype, heads, channels, **dict(zip(names, rest)))


def encode_queries(case, q):
    """What the functions take, and the values that it stands for."""
    if not case.fp4:
        codes = q.to(torch.float8_e4m3fn)
        return codes, None, codes.float()
    return fp4_rows(q)


def paged_cache(case, keys, block):
    """[pages, block, 1, bytes] uint8 and the values [pages, block, channels]."""
    pages = keys.shape[0] // block
    if case.fp4:
        codes, scales, values = fp4_rows(keys)
    else:
        codes, scales = fp8_keys(keys)
        values = codes.float() * scales[:, None]
    payload = codes.view(torch.uint8).view(pages, -1)
    cache = torch.cat([payload, scales.view(torch.uint8).view(pages, -1)], -1)
    return cache.view(pages, block, 1, -1), values.view(pages, block, -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", random.Random(5).sample(
    list(all_cases(next_n=[1, 2, 6], lens_2d=[False, True], block=[64, 32])), 24), ids=str)
def test_paged(case, device):
    generator = torch.Generator().manual_seed(case.heads)
    b, average = 5, 150
    lens = torch.randint(int(0.7 * average), int(1.3 * average), (b,), generator=generator).int()
    blocks = -(-lens // case.block)
    most = int(blocks.max()) * case.block
    cache, values = paged_cache(
        case, torch.randn(int(blocks.sum()) * case.block, case.channels, generator=generator).bfloat16(), case.block)
    order = torch.randperm(int(blocks.sum()), generator=generator).int()
    table = torch.zeros(b, int(blocks.max()), dtype=torch.int32)
    first = 0
    for request, count in enumerate(blocks.tolist()):
        table[request, :count] = order[first : first + count]
        first += count
    q = torch.randn(b, case.next_n, case.heads, case.channels, generator=generator).bfloat16()
    weights = torch.randn(b * case.next_n, case.heads, generator=generator)
    codes, scales, q_values = encode_queries(case, q)
    if case.lens_2d:
        context = ((lens[:, None] + 1) * torch.rand(b, case.next_n, generator=generator)).int()
        context[:, -1] = lens
        seen = context
    else:
        context = lens
        seen = lens[:, None] - case.next_n + 1 + torch.arange(case.next_n)

    there = [x.to(device) for x in (cache, weights, context, table)]
    q_there = (codes.to(device), None if scales is None else scales.to(device))
    plan = deep_gemm.get_paged_mqa_logits_metadata(there[2], case.block, 132)
    assert plan.shape == (133, 2) and plan.dtype == torch.int32
    logits = deep_gemm.fp8_fp4_paged_mqa_logits(q_there, *there, plan, most, clean_logits=True, logits_dtype=case.dtype)
    assert logits.shape == (b * case.next_n, most) and logits.dtype == case.dtype
    assert logits.stride(0) * case.dtype.itemsize % 1024 == 0
    for _ in range(3):
        again = deep_gemm.fp8_fp4_paged_mqa_logits(q_there, *there, plan, most, logits_dtype=case.dtype)
        assert torch.equal(again, logits)

    mask = torch.arange(most) < seen.reshape(-1, 1)
    keys = values[table.long()].flatten(1, 2).repeat_interleave(case.next_n, 0)
    expected = index_scores(q_values.flatten(0, 1), keys, weights)
    logits = logits.cpu().float()
    assert torch.equal(logits == -torch.inf, ~mask)
    assert difference(logits.masked_fill(~mask, 0), expected.masked_fill(~mask, 0)) < case.tolerance
    if case.dtype == torch.float32:
        newer = deep_gemm.fp8_fp4_paged_mqa_logits(q_there, *there, plan, most, indices=None)
        assert torch.equal(newer.cpu(), logits)
        if not case.fp4:
            legacy = deep_gemm.fp8_paged_mqa_logits(q_there[0], *there, plan, most, False)
            assert torch.equal(legacy.cpu(), logits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", random.Random(6).sample(list(all_cases(compact=[False, True])), 16), ids=str)
def test_contiguous(case, device):
    generator = torch.Generator().manual_seed(case.heads)
    tokens, count = 24, 200
    q = torch.randn(tokens, case.heads, case.channels, generator=generator).bfloat16()
    kv = torch.randn(count, case.channels, generator=generator).bfloat16()
    weights = torch.randn(tokens, case.heads, generator=generator)
    begins = torch.randint(0, 60, (tokens,), generator=generator).int()
    ends = torch.clamp(begins + torch.randint(0, 150, (tokens,), generator=generator), max=count).int()
    codes, scales, q_values = encode_queries(case, q)
    keys, key_scales = fp4_rows(kv)[:2] if case.fp4 else fp8_keys(kv)
    values = fp4_rows(kv)[2] if case.fp4 else keys.float() * key_scales[:, None]

    there = [x.to(device) for x in (weights, begins, ends)]
    q_there = (codes.to(device), None if scales is None else scales.to(device))
    kv_there = (keys.to(device), key_scales.to(device))
    most = int((ends - begins).max()) if case.compact else 0
    call = lambda: deep_gemm.fp8_fp4_mqa_logits(
        q=q_there, kv=kv_there, weights=there[0], cu_seq_len_k_start=there[1], cu_seq_len_k_end=there[2],
        clean_logits=not case.compact, max_seqlen_k=most, logits_dtype=case.dtype)
    logits = call()
    assert logits.shape == (tokens, most or count) and logits.dtype == case.dtype
    assert torch.equal(call(), logits)
    if case.dtype == torch.float32:
        newer = deep_gemm.fp8_fp4_mqa_logits(q_there, kv_there, *there, most, None)  # max_seqlen_k, schedule_meta
        assert torch.equal(newer, logits)
        if not case.fp4:
            assert torch.equal(deep_gemm.fp8_mqa_logits(q_there[0], kv_there, *there, False, most), logits)

    logits = logits.cpu().float()
    if case.compact:
        whole = torch.full((tokens, count), -torch.inf)
        for token, (first, last) in enumerate(zip(begins.tolist(), ends.tolist())):
            whole[token, first:last] = logits[token, : last - first]
        logits = whole
    at = torch.arange(count)
    mask = (at >= begins[:, None]) & (at < ends[:, None])
    expected = index_scores(q_values, values[None], weights)
    assert torch.equal(logits == -torch.inf, ~mask)
    assert difference(logits.masked_fill(~mask, 0), expected.masked_fill(~mask, 0)) < case.tolerance


def test_compile_full_graph():
    q = torch.randn(2, 1, 8, 128).to(torch.float8_e4m3fn)
    keys, _ = paged_cache(Case(False, torch.float32, 8, 128), torch.randn(256, 128), 64)
    weights, lens = torch.randn(2, 8), torch.tensor([[100], [7]], dtype=torch.int32)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)

    def scores(*arguments):
        plan = deep_gemm.get_paged_mqa_logits_metadata(arguments[3], 64, 132)
        return deep_gemm.fp8_paged_mqa_logits(*arguments, plan, 128) + 1

    compiled = torch.compile(scores, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, keys, weights, lens, table), scores(q, keys, weights, lens, table))


def test_bad_input_is_named():
    q = torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16)
    cache = torch.zeros(2, 64, 1, 132, dtype=torch.uint8)
    lens, table = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    weights = torch.zeros(1, 8)
    codes = q.to(torch.float8_e4m3fn)
    for words, call in [
        ("q must be float8_e4m3fn", lambda: deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lens, table, None, 128)),
        ("max_context_len must be an int", lambda: deep_gemm.fp8_paged_mqa_logits(codes, cache, weights, lens, table,
                                                                                 None, -1)),
        ("logits_dtype must be", lambda: deep_gemm.fp8_fp4_paged_mqa_logits((codes, None), cache, weights, lens, table,
                                                                          None, 128, False, torch.float16)),
        ("cache must have rows of 132 bytes", lambda: deep_gemm.fp8_paged_mqa_logits(codes, cache[..., :68], weights,
                                                                                   lens, table, None, 128)),
        ("keys must be dense rows of 128 bytes", lambda: deep_gemm.fp8_mqa_logits(
            codes[0], (torch.zeros(9, 64).to(torch.float8_e4m3fn), torch.zeros(9)), weights, lens[0], lens[0])),
        ("key_scales must be dense, with 4 bytes for each of 9 keys", lambda: deep_gemm.fp8_mqa_logits(
            codes[0], (torch.zeros(9, 128).to(torch.float8_e4m3fn), torch.zeros(8)), weights, lens[0], lens[0])),
        ("two fp4 codes in a byte", lambda: deep_gemm.fp8_fp4_paged_mqa_logits(
            (torch.zeros(1, 1, 8, 32, dtype=torch.uint8), lens), cache, weights, lens, table, None, 128)),
    ]:
        with pytest.raises(kv4.ArgumentError) as refusal:
            call()
        assert words in str(refusal.value)


def test_it_is_deep_gemm_for_everything_else(tmp_path):
    """An installed deep_gemm is re-exported, its index scores are replaced, and it can stand under its name."""
    package = tmp_path / "deep_gemm"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from . import testing\n__version__ = '9'\nfp8_gemm_nt = lambda: 'a GEMM'\nfp8_mqa_logits = None\n")
    (package / "testing.py").write_text("bench = 'theirs'\n")
    (package / "utils.py").write_text("ceil_div = lambda a, b: -(-a // b)\n")
    program = """
import sys, kv4.deep_gemm
sys.modules["deep_gemm"] = kv4.deep_gemm
import deep_gemm
from deep_gemm.testing import bench
from deep_gemm.utils import ceil_div
assert deep_gemm.fp8_gemm_nt() == "a GEMM" and bench == "theirs" and ceil_div(5, 2) == 3
assert deep_gemm.fp8_mqa_logits.__module__ == "kv4.deep_gemm" and deep_gemm.why_no_deep_gemm == ""
import importlib
assert deep_gemm.__version__ == "9"
"""
    subprocess.run([sys.executable, "-c", program], check=True,
                   env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path]), "PATH": "/usr/bin:/bin"})


def test_without_deep_gemm_other_names_say_why():
    if not deep_gemm.why_no_deep_gemm:
        pytest.skip("deep_gemm is installed here")
    with pytest.raises(AttributeError, match="only index scores are its own, and deep_gemm cannot be imported"):
        deep_gemm.fp8_gemm_nt
