"""kv4.torch against plain torch, on the CPU and on a GPU."""

import pytest
import torch

import kv4
import kv4.torch as operators
from devices import DEVICES, needs_gpu
from plain import (CHANNELS, attention, empty_pool, fp4_rows, fp8_keys, index_scores, padded, planes, random_lists,
                   read_v4_rows, write_v4_rows)

ROW_FORMATS = {"fp8_tile64": (576, 8), "fp8_row": (576, 4), "bf16": (1024, 0)}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


def random_pool(generator, pages, rows, format="fp8_tile64"):
    """A pool whose rows were appended, and their values."""
    pool = empty_pool(pages, rows, sum(ROW_FORMATS[format]))
    x = torch.randn(pages * rows, CHANNELS, generator=generator) / 2
    operators.append(x, pool, torch.arange(pages * rows), format=format)
    return pool, operators.gather(pool, torch.arange(pages * rows), format=format, dtype=torch.float32)


def check_attention(out, lse, expected, mode="all"):
    reference, _, rows, all_of_it = expected
    if mode == "rows":
        rows = torch.where(rows == -torch.inf, torch.inf, rows)
    torch.testing.assert_close(out.float().cpu(), reference, atol=2e-3, rtol=1 / 64)
    torch.testing.assert_close(lse.cpu(), rows if mode == "rows" else all_of_it, atol=2e-5, rtol=1e-4)


# --- rows


@pytest.mark.parametrize("rows", [1, 2, 53, 64])
def test_append_writes_the_bytes_of_v4(generator, rows):
    x = torch.randn(3, rows, CHANNELS, generator=generator)
    x[0, 0, :64] = 0
    ours, plain = empty_pool(3, rows), empty_pool(3, rows)
    write_v4_rows(plain, x)
    operators.append(x.bfloat16().flatten(0, 1), ours, torch.arange(3 * rows))
    for ours_plane, plain_plane in zip(planes(ours, 576), planes(plain, 576)):
        assert torch.equal(ours_plane, plain_plane)
    gathered = operators.gather(ours, torch.arange(3 * rows).int(), dtype=torch.float32)
    assert torch.equal(gathered, read_v4_rows(plain))


def test_append_skips_slots_outside_of_the_pool(generator):
    pool = empty_pool(2, 5, fill=0x11)
    before = pool.clone()
    x = torch.randn(6, CHANNELS, generator=generator)
    operators.append(x, pool, torch.tensor([-1, 10, 2**40, -(2**40), 4, 11]))
    changed = (operators.gather(pool, torch.arange(10)) != operators.gather(before, torch.arange(10))).any(-1)
    assert changed.nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("device", DEVICES)
def test_gather(generator, device):
    pool, values = random_pool(generator, 3, 7)
    slots = torch.tensor([[0, 20, -1], [21, 6, 7]])
    valid = torch.empty(2, 3, dtype=torch.bool, device=device)
    rows = operators.gather(pool.to(device), slots.to(device), dtype=torch.float32, valid=valid)
    assert valid.tolist() == [[True, True, False], [False, True, True]]
    assert torch.equal(rows.cpu()[valid.cpu()], values[slots[valid.cpu()]])
    assert not rows[~valid].any()


@pytest.mark.parametrize("format, row_bytes", [("mxfp4", 68), ("fp8", 132), ("bf16", 256)])
def test_append_of_index_keys(generator, format, row_bytes):
    pool = empty_pool(2, 64, row_bytes, alignment=1)
    x = torch.randn(128, 128, generator=generator).bfloat16()
    operators.append(x, pool, torch.arange(127, -1, -1), format=format)
    back = operators.gather(pool, torch.arange(127, -1, -1), 128, format=format).float()
    assert (back - x.float()).abs().max() <= {"mxfp4": 0.6, "fp8": 0.2, "bf16": 0}[format]


# --- attention


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("extra_format", [None, *ROW_FORMATS])
def test_attend_formats(generator, format, extra_format):
    tokens, heads = 5, 3
    pool, values = random_pool(generator, 4, 61, format)
    lists = random_lists(generator, tokens, 70, 244)
    lens = torch.tensor([70, 0, 13, 99, -5], dtype=torch.int32)
    parts, extra = [(values, lists, lens)], {}
    if extra_format is not None:
        extra_pool, extra_values = random_pool(generator, 9, 2, extra_format)
        extra = {"extra_cache": extra_pool, "extra_indices": random_lists(generator, tokens, 33, 18),
                 "extra_lens": torch.tensor([33, 0, 1, 20, 7], dtype=torch.int32), "extra_format": extra_format}
        parts.append((extra_values, extra["extra_indices"], extra["extra_lens"]))
    q = torch.randn(tokens, heads, CHANNELS, generator=generator).bfloat16()
    sink = torch.tensor([0.5, -torch.inf, 3.0])
    out, lse = operators.attend(q, pool, lists, 0.06, lens=lens, sink=sink, format=format, **extra)
    check_attention(out, lse, attention(q, parts, 0.06, sink))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["all", "rows"])
@pytest.mark.parametrize("q_type, out_type", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)])
def test_attend_requests(generator, device, mode, q_type, out_type):
    """[b, s_q, ...], lengths per request, sinks of both infinities, strides."""
    b, s_q, heads, n = 3, 2, 9, 40
    pool, values = random_pool(generator, 5, 64)
    lists = random_lists(generator, b * s_q, n, 320).view(b, s_q, n)
    lens = torch.tensor([40, 0, 21], dtype=torch.int32)
    q = torch.randn(b, s_q, heads, CHANNELS, generator=generator).to(q_type)
    sink = torch.randn(heads, generator=generator)
    sink[3], sink[4] = -torch.inf, torch.inf
    memory = pool.as_strided((5, pool.stride(0)), (pool.stride(0), 1)).to(device)
    out = torch.empty(b, s_q, heads, CHANNELS, dtype=out_type, device=device)
    largest = torch.empty(b, s_q, heads, device=device)
    out_again, lse = operators.attend(
        padded(q).to(device), memory[:, : 64 * 584].view(5, 64, 1, 584), padded(lists).to(device), 0.05,
        lens=lens.to(device), sink=sink.to(device), lse_mode=mode, out=out, max_logits=largest)
    assert out_again is out
    expected = attention(q.flatten(0, 1), [(values, lists.flatten(0, 1), lens.repeat_interleave(s_q))], 0.05, sink)
    check_attention(out.flatten(0, 1), lse.flatten(0, 1), expected, mode)
    torch.testing.assert_close(largest.flatten(0, 1).cpu(), expected[1], atol=1e-5, rtol=1e-5)


def test_attend_strides_and_outputs(generator):
    """Given outputs with gaps, expanded queries, lists in columns: the same numbers as dense ones."""
    pool, _ = random_pool(generator, 4, 16)
    lists = random_lists(generator, 6, 20, 64)
    q = torch.randn(1, 2, CHANNELS, generator=generator).bfloat16().expand(6, -1, -1)
    dense, dense_lse = operators.attend(q.contiguous(), pool, lists, 0.1)
    out = torch.zeros(6, 3, CHANNELS + 8, dtype=torch.bfloat16)
    lse = torch.zeros(2, 6)
    operators.attend(q, pool, lists.t().contiguous().t(), 0.1, out=out[:, :2, :CHANNELS], lse=lse.t())
    assert torch.equal(out[:, :2, :CHANNELS], dense) and torch.equal(lse.t(), dense_lse)
    assert not out[:, 2].any() and not out[..., CHANNELS:].any()


def test_attend_empty(generator):
    """Empty lists, empty pools, no tokens."""
    pool, _ = random_pool(generator, 2, 4)
    q = torch.ones(3, 2, CHANNELS, dtype=torch.bfloat16)
    none = torch.empty(3, 0, dtype=torch.int32)
    for cache, lists in [(pool, none), (pool[:0], torch.zeros(3, 5, dtype=torch.int32))]:
        out, lse = operators.attend(q, cache, lists, 1.0, lse_mode="rows")
        assert not out.any() and (lse == torch.inf).all()
        out, lse = operators.attend(q, cache, lists, 1.0, sink=torch.zeros(2))
        assert not out.any() and (lse == 0).all()
    out, lse = operators.attend(q[:0], pool, none[:0], 1.0)
    assert out.shape == (0, 2, CHANNELS) and lse.shape == (0, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_attend_bf16_rows(generator, device):
    rows = torch.randn(50, 1, CHANNELS, generator=generator).bfloat16()
    lists = random_lists(generator, 7, 30, 50)
    lens = torch.tensor([30, 0, 1, 99, 5, 29, 30], dtype=torch.int32)
    q = torch.randn(7, 8, CHANNELS, generator=generator).bfloat16()
    sink = torch.randn(8, generator=generator)
    largest = torch.empty(7, 8, device=device)
    out, lse = operators.attend_bf16_rows(
        padded(q).to(device), padded(rows).to(device), padded(lists).to(device)[:, None], 0.05, lens=lens.to(device),
        sink=sink.to(device), lse_mode="rows", max_logits=largest)
    expected = attention(q, [(rows[:, 0].float(), lists, lens)], 0.05, sink)
    check_attention(out, lse, expected, "rows")
    torch.testing.assert_close(largest.cpu(), expected[1], atol=1e-5, rtol=1e-5)


def test_threads_do_not_change_results(generator):
    pool, _ = random_pool(generator, 4, 16)
    lists = random_lists(generator, 9, 20, 64)
    q = torch.randn(9, 20, CHANNELS, generator=generator).bfloat16()
    one = operators.attend(q, pool, lists, 0.1)
    operators.set_cpu_threads(3)
    try:
        three = operators.attend(q, pool, lists, 0.1)
    finally:
        operators.set_cpu_threads(1)
    assert torch.equal(one[0], three[0]) and torch.equal(one[1], three[1])


# --- index scores


def key_pool(generator, format, pages, rows, channels=128):
    """Index keys in pages, and their values [pages * rows, channels]."""
    row_bytes = {"mxfp4": channels // 2 + channels // 32, "fp8": channels + 4, "bf16": 2 * channels}[format]
    pool = empty_pool(pages, rows, row_bytes, alignment=1)
    x = torch.randn(pages * rows, channels, generator=generator)
    operators.append(x, pool, torch.arange(pages * rows), format=format)
    return pool, operators.gather(pool, torch.arange(pages * rows), channels, format=format, dtype=torch.float32)


def keys_of(values, table, rows):
    return values.view(-1, rows, values.shape[-1])[table.long()].flatten(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format, mode", [("mxfp4", "exact"), ("fp8", "exact"), ("fp8", "fast"), ("bf16", "exact")])
@pytest.mark.parametrize("s_q", [1, 3])
def test_index_scores_and_topk(generator, device, format, mode, s_q):
    b, heads, rows, blocks, k = 3, 7, 64, 4, 20
    pool, values = key_pool(generator, format, b * blocks, rows)
    table = torch.randperm(b * blocks, generator=generator).int().view(b, blocks)
    q = torch.randn(b, s_q, heads, 128, generator=generator).bfloat16()
    weights = torch.randn(b * s_q, heads, generator=generator)
    lens = torch.tensor([250, 2, 130], dtype=torch.int32)
    there = [x.to(device) for x in (q, pool, weights, lens, table)]
    scores = operators.index_scores(*there, 200, format=format, mode=mode).cpu()

    seen = (lens[:, None] - s_q + 1 + torch.arange(s_q)).clamp(0, 200).flatten()
    mask = torch.arange(200) < seen[:, None]
    assert torch.equal(scores != -torch.inf, mask)
    encoded = q.flatten(0, 1).float()  # what the operators make of the queries
    if format != "bf16":
        query_pool = empty_pool(1, b * s_q * heads, pool.shape[-1], alignment=1)
        every = torch.arange(b * s_q * heads)
        operators.append(q.flatten(0, 2), query_pool, every, format=format)
        encoded = operators.gather(query_pool, every, 128, format=format, dtype=torch.float32).view(-1, heads, 128)
    keys = keys_of(values, table, rows).repeat_interleave(s_q, 0)[:, :200]
    expected = index_scores(encoded, keys, weights)
    torch.testing.assert_close(scores[mask], expected[mask], atol=0.02, rtol=1e-3)
    assert torch.equal(operators.index_scores(*there, 200, format=format, mode=mode, dtype=torch.bfloat16).cpu(),
                       scores.bfloat16())
    per_token = (lens[:, None] - s_q + 1 + torch.arange(s_q)).int().to(device)
    assert torch.equal(operators.index_scores(*there[:3], per_token, there[4], 200, format=format, mode=mode).cpu(),
                       scores)

    slots = torch.empty(b * s_q, k, dtype=torch.int32, device=device)
    best = operators.index_topk(*there, k, format=format, mode=mode, slots=slots)
    whole = operators.index_scores(*there, rows * blocks, format=format, mode=mode).cpu()
    selected = operators.select_topk(whole.to(device), per_token.flatten().clamp_min(0), k)
    for token, (ours, again, at) in enumerate(zip(best.cpu(), selected.cpu(), slots.cpu())):
        count = min(k, int(per_token.flatten()[token].clamp_min(0)))
        wanted = whole[token].topk(count).indices
        assert set(ours.tolist()) - {-1} == set(again.tolist()) - {-1} == set(wanted.tolist())
        assert (ours == -1).sum() == k - count
        pages = table[token // s_q]
        assert at.tolist() == [-1 if j < 0 else int(pages[j // rows]) * rows + j % rows for j in ours.tolist()]


def test_page_ids_outside_of_the_pool_read_page_0(generator):
    """Whatever a block table holds, behind a request's keys or among them, only the pool is read."""
    pool, values = key_pool(generator, "fp8", 3, 64)
    q = torch.randn(2, 4, 128, generator=generator).bfloat16()
    weights, lens = torch.randn(2, 4, generator=generator), torch.tensor([130, 20], dtype=torch.int32)
    good = torch.tensor([[1, 0, 0], [2, 0, 0]], dtype=torch.int32)
    bad = torch.tensor([[1, 2**31 - 1, -1], [2, -(2**31), 12345]], dtype=torch.int32)
    expected = operators.index_scores(q, pool, weights, lens, good, 192)
    assert torch.equal(operators.index_scores(q, pool, weights, lens, bad, 192), expected)
    assert torch.equal(operators.index_scores(q, pool, weights, lens, padded(bad), 192), expected)
    assert (operators.index_scores(q, pool[:0], weights, lens, good, 192) == -torch.inf).all()


def test_select_topk_order(generator):
    scores = torch.tensor([[1.0, torch.nan, 1.0, 1.0, -torch.inf, 5.0], [0.0, -0.0, 0.0, 0.0, 0.0, 9.0]])
    lens = torch.tensor([6, 5], dtype=torch.int32)
    best = operators.select_topk(scores, lens, 3)
    assert [sorted(row) for row in best.tolist()] == [[0, 2, 5], [0, 1, 2]]
    assert [sorted(row) for row in operators.select_topk(padded(scores), lens, 3).tolist()] == [[0, 2, 5], [0, 1, 2]]
    assert (operators.select_topk(scores, torch.tensor([0, -3], dtype=torch.int32), 2) == -1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels, count", [(32, 70), (64, 128), (128, 131)])
def test_index_scores_rows(generator, device, channels, count):
    tokens, heads = 6, 32
    q = torch.randn(tokens, heads, channels, generator=generator).to(torch.float8_e4m3fn)
    keys, scales = fp8_keys(torch.randn(count, channels, generator=generator))
    weights = torch.randn(tokens, heads, generator=generator)
    begins = torch.tensor([0, 5, 60, 3, 69, -4], dtype=torch.int32)
    ends = torch.tensor([count, 6, 65, 3, count + 50, 2], dtype=torch.int32)
    expected = index_scores(q.float(), (keys.float() * scales[:, None])[None], weights)
    at = torch.arange(count)
    mask = (at >= begins[:, None]) & (at < ends[:, None])
    there = [x.to(device) for x in (q, keys, scales, weights, begins, ends)]
    whole = operators.index_scores_rows(*there, mode="fast").cpu()
    assert torch.equal(whole != -torch.inf, mask)
    torch.testing.assert_close(whole[mask], expected[mask], atol=0.02, rtol=1e-3)
    compact = operators.index_scores_rows(*there, mode="fast", max_keys=40, dtype=torch.bfloat16).cpu()
    for token in range(tokens):
        first = max(int(begins[token]), 0)
        row = whole[token, first : min(max(int(ends[token]), first), count)][:40]
        assert torch.equal(compact[token, : len(row)], row.bfloat16())
        assert (compact[token, len(row) :] == -torch.inf).all()


def test_encoded_fp4_queries(generator):
    """Packed codes and scales, as DeepGEMM has them, score as the values that they stand for."""
    codes, scales, values = fp4_rows(torch.randn(4, 8, 128, generator=generator))
    pool, keys = key_pool(generator, "mxfp4", 2, 64)
    weights = torch.randn(4, 8, generator=generator)
    lens, table = torch.tensor([128, 1, 64, 77], dtype=torch.int32), torch.tensor([[1, 0]] * 4, dtype=torch.int32)
    scores = operators.index_scores(codes, pool, weights, lens, table, 128, q_scale=scales, format="mxfp4")
    mask = torch.arange(128) < lens[:, None]
    expected = index_scores(values, keys_of(keys, table, 64), weights)
    torch.testing.assert_close(scores[mask], expected[mask], atol=1e-3, rtol=1e-5)


def test_rows_with_gaps_keep_their_gaps(generator):
    pool, _ = key_pool(generator, "fp8", 1, 64)
    q = torch.randn(1, 5, 2, 128, generator=generator).bfloat16()
    weights = torch.randn(5, 2, generator=generator)
    lens, table = torch.tensor([40], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    dense = operators.index_scores(q, pool, weights, lens, table, 40)
    larger = torch.full((5, 90), 7.0)
    operators.index_scores(q, pool, weights, lens, table, 40, out=larger[:, :40])
    assert torch.equal(larger[:, :40], dense) and (larger[:, 40:] == 7).all()


# --- compilation, streams, graphs


def attention_layer(q, pool, lists, extra, extra_lists, sink, x, slots):
    operators.append(x, pool, slots)
    out, lse = operators.attend(q * 0.5, pool, lists, 0.06, extra_cache=extra, extra_indices=extra_lists, sink=sink)
    return out + 1, lse.exp()


def layer_arguments(generator, device="cpu"):
    pool, _ = random_pool(generator, 4, 16)
    extra, _ = random_pool(generator, 4, 2)
    arguments = [torch.randn(3, 2, CHANNELS, generator=generator).bfloat16(), pool,
                 random_lists(generator, 3, 20, 64), extra, random_lists(generator, 3, 6, 8),
                 torch.zeros(2), torch.randn(2, CHANNELS, generator=generator).bfloat16(), torch.tensor([3, 17])]
    return [x.to(device) for x in arguments]


def test_compile_full_graph(generator):
    arguments = layer_arguments(generator)
    twins = [x.clone() for x in arguments]
    compiled = torch.compile(attention_layer, fullgraph=True, backend="aot_eager")
    expected, ours = attention_layer(*arguments), compiled(*twins)
    assert all(torch.equal(a, b) for a, b in zip(expected, ours))
    assert torch.equal(arguments[1], twins[1])


def test_compile_index_scores(generator):
    pool, _ = key_pool(generator, "fp8", 4, 64)
    q = torch.randn(2, 4, 128, generator=generator).bfloat16()
    weights = torch.randn(2, 4, generator=generator)
    lens, table = torch.tensor([128, 3], dtype=torch.int32), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)

    def scores_and_best(*arguments):
        scores = operators.index_scores(*arguments, 128)
        return scores * 2, operators.select_topk(scores, arguments[3], 9), operators.index_topk(*arguments, 9)

    compiled = torch.compile(scores_and_best, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(q, pool, weights, lens, table), scores_and_best(q, pool, weights, lens, table)):
        assert torch.equal(ours, expected)


def test_fake_tensors(generator):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in layer_arguments(generator)]
        out, lse = attention_layer(*fakes)
    assert out.shape == (3, 2, CHANNELS) and out.dtype == torch.bfloat16 and lse.shape == (3, 2)


@needs_gpu
def test_cuda_graph(generator):
    """Captured calls read the values at replay; nothing is allocated by value, nothing waits."""
    q, pool, lists, extra, extra_lists, sink, x, slots = layer_arguments(generator, "cuda")
    lens = torch.zeros(3, dtype=torch.int32, device="cuda")
    call = lambda: operators.attend(q, pool, lists, 0.06, lens=lens, extra_cache=extra, extra_indices=extra_lists)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operators.append(x, pool, slots)
        out, lse = call()
    lens.fill_(20)
    q.mul_(2)
    graph.replay()
    expected, expected_lse = call()
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@needs_gpu
def test_current_stream(generator):
    """A call is queued behind slow work of its own stream, not on the default one."""
    q, pool, lists, *_ = layer_arguments(generator, "cuda")
    target = q * 3
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q.copy_(target)
        out, _ = operators.attend(q, pool, lists, 0.06)
    torch.cuda.synchronize()
    assert torch.equal(out, operators.attend(target, pool, lists, 0.06)[0])


# --- bad input


def bad_calls():
    pool = empty_pool(2, 4)
    q = torch.zeros(3, 2, CHANNELS, dtype=torch.bfloat16)
    lists = torch.zeros(3, 5, dtype=torch.int32)
    attend = lambda *changed, **named: lambda: operators.attend(*changed, 1.0, **named)
    yield "q must be bfloat16 or float32; got torch.float16", attend(q.half(), pool, lists)
    yield "q must have 3 to 4 dimensions; got 2", attend(q[0], pool, lists)
    yield "q must have 1 to 128 heads; got [3, 0, 512]", attend(q[:, :0], pool, lists)
    yield "q has 100 channels; fp8_tile64 takes", attend(q[..., :100], pool, lists)
    yield "cache must have rows of 584 bytes (fp8_tile64, 512 channels); got 656", attend(
        q, empty_pool(2, 4, 656), lists)
    yield "cache must be uint8 or int8 or float8_e4m3fn or bfloat16; got torch.float32", attend(q, pool.float(), lists)
    yield "cache must have dense pages: strides 584", attend(
        q, empty_pool(4, 4).as_strided((2, 4, 1, 584), (5760, 1168, 584, 1)), lists)
    yield "cache must have pages that do not overlap", attend(
        q, pool.as_strided((2, 4, 1, 584), (584, 584, 584, 1)), lists)
    yield "cache must have one head", attend(q, pool.as_strided((2, 2, 2, 584), (2880, 584, 584, 1)), lists)
    yield "indices must be int32; got torch.int64", attend(q, pool, lists.long())
    yield "indices must be [tokens, n] or [tokens, 1, n] for q [3, 2, 512]; got [2, 5]", attend(q, pool, lists[:2])
    yield "indices must be [b, s_q, n] for q [1, 3, 2, 512]; got [3, 5]", attend(q[None], pool, lists)
    yield "lens must have the shape [3]; got [2]", attend(q, pool, lists, lens=lists[:2, 0])
    yield "sink must have the shape [2]; got [3]", attend(q, pool, lists, sink=torch.zeros(3))
    yield "out must have the shape of q", attend(q, pool, lists, out=q[:2].clone())
    yield "lse must have the shape of q without channels", attend(q, pool, lists, lse=torch.zeros(3, 3))
    yield "extra_cache and extra_indices belong together", attend(q, pool, lists, extra_cache=pool)
    yield "extra_lens needs extra_cache", attend(q, pool, lists, extra_lens=lists[:, 0])
    yield "format mxfp4 is a format of index keys", attend(q, pool, lists, format="mxfp4")
    yield "format fp8_tile32 has no operations yet", attend(q, pool, lists, format="fp8_tile32")
    yield "format 'fp9' is unknown", attend(q, pool, lists, format="fp9")
    yield "lse_mode must be 'all'", attend(q, pool, lists, lse_mode="none")
    yield "rows must have q's 512 channels; got [4, 64]", lambda: operators.attend_bf16_rows(
        q, torch.zeros(4, 64, dtype=torch.bfloat16), lists, 1.0)
    yield "slots must be int32 or int64; got torch.float32", lambda: operators.append(q[0], pool, torch.zeros(2))
    yield "rows must have the shape of slots, [3], and channels; got [2, 512]", lambda: operators.append(
        q[0], pool, torch.zeros(3, dtype=torch.int32))
    yield "format nvfp4 has a scale per page", lambda: operators.append(q[0], pool, lists[0, :2], format="nvfp4")

    keys, index_q = empty_pool(2, 64, 132), torch.zeros(1, 4, 128, dtype=torch.bfloat16)
    weights, lens, table = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    scores = lambda *changed, **named: lambda: operators.index_scores(*changed, 8, **named)
    yield "q must have 1 to 64 heads", scores(index_q.expand(1, 4, 128).repeat(1, 17, 1), keys, weights, lens, table)
    yield "weights must be [1, 4]", scores(index_q, keys, torch.zeros(1, 3), lens, table)
    yield "lens must be [1]", scores(index_q, keys, weights, torch.zeros(2, dtype=torch.int32), table)
    yield "block_table must have a row per request", scores(index_q, keys, weights, lens, table.repeat(2, 1))
    yield "format fp8_row is a format of rows; index keys can be", scores(index_q, keys, weights, lens, table,
                                                                         format="fp8_row")
    yield "mode", scores(index_q, keys, weights, lens, table, mode="faster")
    yield "q_scale must be given with queries encoded as mxfp4", scores(
        torch.zeros(1, 4, 64, dtype=torch.uint8), empty_pool(2, 64, 68), weights, lens, table, format="mxfp4")
    yield "indices must be [2, k], k from 1 to 2048", lambda: operators.select_topk(
        torch.zeros(2, 9), torch.zeros(2, dtype=torch.int32), 2049)


@pytest.mark.parametrize("words, call", [pytest.param(*pair, id=pair[0][:40]) for pair in bad_calls()])
def test_bad_input_is_named(words, call):
    with pytest.raises(ValueError) as refusal:
        call()
    assert words in str(refusal.value)
    assert isinstance(refusal.value, kv4.ArgumentError) or "lse_mode" in words


@needs_gpu
def test_devices_are_not_mixed(generator):
    q, pool, lists, *_ = layer_arguments(generator, "cuda")
    with pytest.raises(kv4.ArgumentError, match="cache must be on cuda:0 as the arguments before it; got cpu"):
        operators.attend(q, pool.cpu(), lists, 1.0)
