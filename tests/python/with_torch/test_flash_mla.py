"""kv4.flash_mla against plain torch: cases of the kinds that FlashMLA's own tests have, sampled."""
import dataclasses
import inspect
import itertools
import random

import pytest
import torch

import kv4
import kv4.flash_mla as flash_mla
from devices import DEVICES
from plain import CHANNELS, attention, empty_pool, padded, random_lists, read_v4_rows, write_v4_rows

# FlashMLA's tolerances.
OUT = {"atol": 1e-3, "rtol": 2.01 / 128}
LSE = {"atol": 1e-6, "rtol": 8.01 / 65536}


@dataclasses.dataclass(frozen=True)
class Decode:
    b: int
    s_q: int
    heads: int
    n: int
    page: int
    extra: tuple[int, int] | None = None  # n and rows of a page of the second pool
    lens: bool = False
    extra_lens: bool = False
    sink: bool = True
    nothing: bool = False  # no index names a row
    empty: bool = False    # some requests have no rows


def decode_cases():
    shapes = [(64, 2), (64, 64), (64, 69), (64, 61), (72, 53), (130, 576)]
    extras = [None, (64, 2), (64, 64), (72, 61), (40, 69)]
    every = [Decode(b, s_q, heads, n, page, extra, lens, extra_lens and extra is not None, sink)
             for b, s_q, heads, (n, page), extra, lens, extra_lens, sink in itertools.product(
                 [1, 4, 7], [1, 3], [1, 8, 16, 32, 64, 128], shapes, extras, [False, True], [False, True],
                 [False, True])]
    corners = [Decode(3, 3, 64, 64, 61, (72, 53), True, True, sink, nothing, empty)
               for sink, nothing, empty in itertools.product([False, True], repeat=3)]
    return random.Random(23).sample(every, 36) + corners


@dataclasses.dataclass
class Pool:
    cache: torch.Tensor
    indices: torch.Tensor  # [b, s_q, n]
    lens: torch.Tensor | None
    values: torch.Tensor   # [slots, channels], NaN where no list names a row


def decode_pool(generator, case, n, page, has_lens):
    """A pool in which all rows that no list names hold NaN."""
    pages = -(-3 * n // (2 * page)) + 1
    tokens = case.b * case.s_q
    indices = random_lists(generator, tokens, n, pages * page)
    lens = torch.randint(0, n + 2, (case.b,), generator=generator).int() if has_lens else None
    if case.nothing:
        indices[:] = -1
    if case.empty:
        indices.view(case.b, -1)[::2] = -1
    counted = indices.clone()
    if lens is not None:
        counted[torch.arange(n) >= lens.repeat_interleave(case.s_q)[:, None]] = -1
    cache = empty_pool(pages, page)
    x = torch.randn(pages, page, CHANNELS, generator=generator).clamp(-1, 1) / 3
    write_v4_rows(cache, x)
    named = torch.zeros(pages * page, dtype=torch.bool)
    named[counted[(counted >= 0) & (counted < pages * page)].long()] = True
    payload = cache.as_strided((pages, page, 576), (cache.stride(0), 576, 1))
    payload[~named.view(pages, page)] = 0x7F
    return Pool(cache, indices.view(case.b, case.s_q, n), lens, read_v4_rows(cache).nan_to_num(0.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", decode_cases(), ids=str)
def test_decode(case, device):
    generator = torch.Generator().manual_seed(case.b + case.n)
    pools = [decode_pool(generator, case, case.n, case.page, case.lens)]
    if case.extra is not None:
        pools.append(decode_pool(generator, case, *case.extra, case.extra_lens))
    q = torch.randn(case.b, case.s_q, case.heads, CHANNELS, generator=generator).clamp(-1, 1).bfloat16()
    sink = None
    if case.sink:
        sink = torch.randn(case.heads, generator=generator)
        kind = torch.randn(case.heads, generator=generator)
        sink[kind > 0.5], sink[kind < -0.5] = torch.inf, -torch.inf
    scale = CHANNELS ** -0.55

    def there(tensor):
        return None if tensor is None else tensor.to(device)

    def cache_there(pool):
        pages, page = pool.cache.shape[:2]
        memory = pool.cache.as_strided((pages, pool.cache.stride(0)), (pool.cache.stride(0), 1)).to(device)
        return memory[:, : page * 584].view(pages, page, 1, 584)

    second = pools[1] if len(pools) > 1 else None
    plan, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        padded(q).to(device), cache_there(pools[0]), None, None, CHANNELS, plan, None, scale, False, True,
        padded(pools[0].indices).to(device), there(sink), None if second is None else cache_there(second),
        None if second is None else padded(second.indices).to(device), there(pools[0].lens),
        None if second is None else there(second.lens))

    lens_of_tokens = lambda pool: None if pool.lens is None else pool.lens.repeat_interleave(case.s_q)
    expected, _, rows, _ = attention(
        q.flatten(0, 1), [(p.values, p.indices.flatten(0, 1), lens_of_tokens(p)) for p in pools], scale, sink)
    rows = torch.where(rows == -torch.inf, torch.inf, rows).view(case.b, case.s_q, case.heads).transpose(1, 2)
    assert out.shape == q.shape and out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.cpu().flatten(0, 1).float(), expected.bfloat16().float(), **OUT)
    torch.testing.assert_close(lse.cpu(), rows, **LSE)
    if sink is not None:
        assert not out[:, :, sink == torch.inf].any()
    x, y = out.cpu().double().flatten(), expected.double().flatten()
    if y.any():
        assert 1 - 2 * (x @ y) / (x @ x + y @ y) < 5e-6


@dataclasses.dataclass(frozen=True)
class Prefill:
    s_q: int
    s_kv: int
    n: int
    heads: int
    sink: bool
    lens: bool
    nothing: bool = False


def prefill_cases():
    every = [Prefill(s_q, s_kv, n, heads, sink, lens) for s_q, (s_kv, n), heads, sink, lens in itertools.product(
        [1, 6, 13], [(128, 128), (59, 12), (95, 128), (31, 64), (300, 70)], [64, 128, 8], [False, True], [False, True])]
    return random.Random(24).sample(every, 14) + [Prefill(6, 128, 128, 64, True, True, True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", prefill_cases(), ids=str)
def test_prefill(case, device):
    generator = torch.Generator().manual_seed(case.s_kv)
    q = torch.randn(case.s_q, case.heads, CHANNELS, generator=generator).bfloat16() / 10
    kv = torch.randn(case.s_kv, 1, CHANNELS, generator=generator).bfloat16() / 10
    indices = random_lists(generator, case.s_q, case.n, case.s_kv)
    if case.nothing:
        indices[torch.randn(case.s_q, generator=generator) < 0] = 2147480000
    sink = lens = None
    if case.sink:
        sink = torch.randn(case.heads, generator=generator)
        sink[0], sink[-1] = torch.inf, -torch.inf
    if case.lens:
        lens = torch.randint(0, case.n + 1, (case.s_q,), generator=generator).int()
    there = lambda tensor: None if tensor is None else tensor.to(device)
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(
        padded(q).to(device), padded(kv).to(device), padded(indices[:, None]).to(device), sm_scale=0.5,
        attn_sink=there(sink), topk_length=there(lens))
    expected, logits, rows, _ = attention(q, [(kv[:, 0].float(), indices, lens)], 0.5, sink)
    torch.testing.assert_close(out.cpu().float(), expected, atol=8e-4, rtol=3.01 / 128)
    torch.testing.assert_close(largest.cpu(), logits, atol=1e-6, rtol=2.01 / 65536)
    torch.testing.assert_close(lse.cpu(), torch.where(rows == -torch.inf, torch.inf, rows), atol=1e-6,
                               rtol=2.01 / 65536)


# --- signatures


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(1)
    case = Decode(2, 1, 8, 30, 64, (20, 2), True, True)
    pools = [decode_pool(generator, case, 30, 64, True), decode_pool(generator, case, 20, 2, True)]
    q = torch.randn(2, 1, 8, CHANNELS, generator=generator).bfloat16()
    return q, torch.zeros(8), *pools


def test_signatures_of_all_generations(problem):
    q, sink, first, second = problem
    plan, splits = flash_mla.get_mla_metadata(torch.zeros(2), 8, 1, num_heads_q=8, is_fp8_kvcache=True, topk=30)
    assert isinstance(plan, flash_mla.FlashMLASchedMeta) and splits is None
    named = dict(q=q, k_cache=first.cache, block_table=None, cache_seqlens=None, head_dim_v=512,
                 tile_scheduler_metadata=plan, softmax_scale=0.1, is_fp8_kvcache=True, indices=first.indices,
                 attn_sink=sink, extra_k_cache=second.cache, extra_indices_in_kvcache=second.indices,
                 topk_length=first.lens, extra_topk_length=second.lens)
    out, lse = flash_mla.flash_mla_with_kvcache(**named)
    head = (q, first.cache, None, None, 512, plan, None, 0.1, False)
    lists = (first.indices, sink, second.cache, second.indices, first.lens, second.lens)
    given = torch.empty_like(q)
    calls = [
        lambda: flash_mla.flash_mla_with_kvcache(*head, True, *lists),                      # FlashMLA
        lambda: flash_mla.flash_mla_with_kvcache(*head, True, *lists, False, True, "V4"),   # sgl-flash-mla
        lambda: flash_mla.flash_mla_with_kvcache(*head, None, None, True, *lists),          # sgl-kernel
        lambda: flash_mla.flash_mla_with_kvcache(*head, True, *lists, given),               # vLLM
        lambda: flash_mla.flash_mla_with_kvcache(**named, out=given),
        lambda: flash_mla.flash_mla_with_kvcache(**named, enable_batch_invariant=False, use_legacy=True, kv_format=None,
                                                 descale_q=None, descale_k=None),
        lambda: flash_mla.flash_mla_with_kvcache(**{**named, "tile_scheduler_metadata": torch.zeros(3), "num_splits":
                                                    torch.zeros(3)}),
        lambda: flash_mla.flash_mla_with_kvcache(**{**named, "k_cache": first.cache.view(torch.float8_e4m3fn)}),
    ]
    for call in calls:
        given.zero_()
        out_again, lse_again = call()
        assert torch.equal(out, out_again) and torch.equal(lse, lse_again)
    assert list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters)[:16] == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
        "softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache",
        "extra_indices_in_kvcache", "topk_length", "extra_topk_length"]


def test_given_outputs_are_written(problem):
    q, sink, first, second = problem
    given = torch.empty(2, 8, CHANNELS, dtype=torch.bfloat16)
    named = dict(indices=first.indices, topk_length=first.lens)
    out, _ = flash_mla.flash_mla_with_kvcache(q, first.cache, None, None, 512, None, is_fp8_kvcache=True,
                                              out=given.unsqueeze(1), **named)
    assert out.data_ptr() == given.data_ptr()
    assert torch.equal(out, flash_mla.flash_mla_with_kvcache(q, first.cache, None, None, 512, None,
                                                             softmax_scale=512**-0.5, **named)[0])
    kv = torch.randn(9, 1, CHANNELS).bfloat16()
    indices = torch.arange(9, dtype=torch.int32).expand(2, 1, 9)
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(q[:, 0], kv, indices, 0.1, out=given)
    assert out is given
    positional = flash_mla.flash_mla_sparse_fwd(q[:, 0], kv, indices, 0.1, 512, None, None, torch.empty_like(given))
    assert torch.equal(positional[0], given)
    none = flash_mla.flash_mla_sparse_fwd(q[:, 0], kv, indices, 0.1, use_legacy=True, return_log2_lse=False)
    assert torch.equal(none[0], given) and none[1:] == (None, None)
    base2 = flash_mla.flash_mla_sparse_fwd(q[:, 0], kv, indices, 0.1, use_legacy=True, return_log2_lse=True)
    torch.testing.assert_close(torch.exp2(base2[2]), torch.exp(lse))
    torch.testing.assert_close(torch.exp2(base2[1]), torch.exp(largest))


def test_pages_of_several_layers_in_one_allocation(problem):
    """Only stride(0) tells where the next page is: the pages of two layers alternate in memory."""
    q, _, first, _ = problem
    pages, page_bytes = first.cache.shape[0], first.cache.stride(0)
    shared = torch.full((pages, 2, page_bytes), 0x7F, dtype=torch.uint8)
    shared[:, 1] = first.cache.as_strided((pages, page_bytes), (page_bytes, 1))
    layer = shared[:, 1].as_strided((pages, 64, 1, 584), (2 * page_bytes, 584, 584, 1))
    call = lambda cache: flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, indices=first.indices,
                                                          topk_length=first.lens)
    assert torch.equal(call(layer)[0], call(first.cache)[0])


def test_compile_full_graph(problem):
    q, sink, first, second = problem
    def layer(q, cache, indices, lens, sink):
        plan, _ = flash_mla.get_mla_metadata()
        out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, plan, indices=indices, topk_length=lens,
                                                    attn_sink=sink, is_fp8_kvcache=True)
        return out * 2, lse
    arguments = (q, first.cache, first.indices, first.lens, sink)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(*arguments), layer(*arguments)):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("words, changed", [
    ("656 bytes (d_qk 576)", {"k_cache": torch.zeros(2, 4, 1, 656, dtype=torch.uint8)}),
    ("528 bytes", {"k_cache": torch.zeros(2, 4, 1, 528, dtype=torch.uint8)}),
    ("extra_k_cache must be [pages, rows, 1, 584]", {"extra_k_cache": torch.zeros(2, 4, 1, 288, dtype=torch.uint8)}),
    ("q and head_dim_v must be [b, s_q, h_q, 512]", {"q": torch.zeros(2, 1, 8, 576, dtype=torch.bfloat16)}),
    ("512; got", {"head_dim_v": 256}),
    ("indices must be given: kv4 has no dense attention", {"indices": None}),
    ("causal must be False", {"causal": True}),
    ("is_fp8_kvcache must be True", {"is_fp8_kvcache": False}),
    ("kv_format must be None or 'V4'; got 'V32'", {"kv_format": "V32"}),
    ("enable_batch_invariant must be False", {"enable_batch_invariant": True}),
    ("descale_q and descale_k must be None", {"descale_q": torch.zeros(2)}),
    ("lens must have the shape [2]; got [3]", {"topk_length": torch.zeros(3, dtype=torch.int32)}),
    ("sink must be float32; got torch.bfloat16", {"attn_sink": torch.zeros(8, dtype=torch.bfloat16)}),
    ("cache must have dense pages", {"k_cache": torch.zeros(4, 8, 1, 584, dtype=torch.uint8)[:, ::2]}),
])
def test_bad_input_is_named(problem, words, changed):
    q, _, first, _ = problem
    call = dict(q=q, k_cache=first.cache, block_table=None, cache_seqlens=None, head_dim_v=512, indices=first.indices)
    with pytest.raises(kv4.ArgumentError) as refusal:
        flash_mla.flash_mla_with_kvcache(**{**call, **changed})
    assert words in str(refusal.value)


def test_prefill_refuses_d_576():
    with pytest.raises(kv4.ArgumentError, match="d_qk 576"):
        flash_mla.flash_mla_sparse_fwd(torch.zeros(1, 64, 576, dtype=torch.bfloat16), None, None, 1.0)
