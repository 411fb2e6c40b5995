"""Attention of a decode and of a chunk, kv4 beside FlashMLA."""
import inspect
from dataclasses import dataclass

from .bench import DATA, ROW, SCALE, WIDTH, WINDOW, round_up
from .kv4_library import PeerAttend
from .public_kernels import in_words
from .timing import MOST_LAUNCHES, Contender


def agree_rows(torch, ours, theirs):
    """FlashMLA's own tolerance of outputs."""
    a, b = ours.float().flatten(), theirs.float().flatten()
    if not bool(torch.isfinite(a).all()) or not bool(torch.isfinite(b).all()):
        return "results are not finite"
    cosine = 1 - 2 * float((a * b).double().sum()) / max(float((a * a + b * b).double().sum()), 1e-12)
    # Both sides round probabilities and results at places of their own: bf16 has 8 bits.
    return "" if cosine < 2e-5 else f"results differ: 1 - cosine is {cosine:.2g}"


def legacy(call):
    """Arguments of packages that have separate kernels for Hopper."""
    return {"use_legacy": True} if "use_legacy" in inspect.signature(call).parameters else {}


@dataclass
class AttendShape:
    name: str
    heads: int
    entries: int   # seen by a decode besides its window
    ratio: int     # 4: chosen entries; 128: all visible ones
    pool: int = 8192


DECODES = [AttendShape("Flash SWA 128", 64, 0, 0), AttendShape("Flash CSA 640", 64, 512, 4),
           AttendShape("Flash HCA 1152", 64, 1024, 128), AttendShape("Flash HCA 8320", 64, 8192, 128),
           AttendShape("Pro CSA 1152", 128, 1024, 4), AttendShape("Pro HCA 8320", 128, 8192, 128),
           AttendShape("8 heads CSA 640", 8, 512, 4), AttendShape("16 heads CSA 640", 16, 512, 4),
           AttendShape("32 heads CSA 640", 32, 512, 4)]


def decode_attend(bench, shape, batch, sets=MOST_LAUNCHES):
    """Each launch of a graph has its own windows, pages and q."""
    torch = bench.torch
    page_rows = 64 if shape.ratio == 4 else 2
    visible = shape.pool if shape.ratio == 4 else shape.entries
    position = max(visible * shape.ratio, WINDOW)
    blocks_each = visible // page_rows if shape.entries else 0
    windows = bench.row_pages(sets * batch, WINDOW)
    pool = None
    if shape.entries:
        pool = bench.row_pages(max(bench.clock.pool_bytes // (page_rows * ROW), blocks_each), page_rows)
    padded = max(shape.heads, 64)  # FlashMLA has 64 and 128 heads; engines pad
    sink = bench.normal(padded, dtype=torch.float32)
    launches = []
    rows = torch.arange(batch, device=bench.device)
    for at in range(sets):
        one = torch.full_like(rows, 1)
        slots = at * batch + rows
        records = bench.records(rows, one * position, one, rows, slots, one * position)
        q = bench.normal(batch, 1, padded, WIDTH)
        launch = {"q": q, "records": records, "mine": q[:, :, :shape.heads].contiguous(),  # q itself if nothing is padded
                  "window": (slots[:, None] * WINDOW + torch.arange(WINDOW, device=bench.device)).int()[:, None].contiguous()}
        launch["source"] = torch.randn_like(launch["mine"])
        if shape.entries:
            table = bench.below(pool.shape[0], batch, blocks_each)
            chosen = (bench.different(batch, shape.entries, visible) if shape.ratio == 4 else
                      torch.arange(visible, device=bench.device, dtype=torch.int32).expand(batch, visible))
            index = (table.gather(1, (chosen // page_rows).long()) * page_rows + chosen % page_rows).int()
            launch |= {"table": table, "index": index[:, None].contiguous()}
            if shape.ratio == 4:
                launch["chosen"] = chosen
        launches.append(launch)
    out = bench.empty(batch, shape.heads, WIDTH, dtype=torch.bfloat16)

    def ours(i):
        x = launches[i % sets]
        call = dict(on_host=bench.on_host, stream=bench.clock.stream, num_tokens=batch, num_requests=batch,
                    num_heads=shape.heads, softmax_scale=SCALE, q=x["mine"], sink=sink, out=out, records=x["records"],
                    ring=windows, ring_scales=windows.data_ptr() + WINDOW * DATA, ring_stride=windows.stride(0),
                    ratio=shape.ratio, page_rows=page_rows, workspace=bench.attend_workspace,
                    workspace_bytes=bench.attend_workspace.numel())
        if shape.entries:
            call |= dict(block_table=x["table"], blocks_per_request=blocks_each, pages=pool, page_stride=pool.stride(0))
            if shape.ratio == 4:
                call |= dict(chosen=x["chosen"], num_chosen=shape.entries)
        bench.kv4.run("attend_call", PeerAttend(**call))

    contenders = [Contender("kv4", ours, True, lambda: out.clone())]
    missing, peer = [], bench.peers["flash_mla_with_kvcache"]
    try:
        flash = peer.need()
        plan = getattr(peer.module, "get_mla_metadata")()[0]
        extra = {"extra_k_cache": bench.rows_view(pool, page_rows)} if shape.entries else {}
        extra |= legacy(flash)
        cache, kept = bench.rows_view(windows, WINDOW), {}

        def theirs(i):
            x = launches[i % sets]
            if shape.entries:
                extra["extra_indices_in_kvcache"] = x["index"]
            kept["out"] = flash(q=x["q"], k_cache=cache, block_table=None, cache_seqlens=None, head_dim_v=WIDTH,
                                tile_scheduler_metadata=plan, softmax_scale=SCALE, causal=False, is_fp8_kvcache=True,
                                indices=x["window"], attn_sink=sink, **extra)[0]

        contenders.append(Contender(peer.label, theirs, False,
                                    lambda: kept["out"][:, 0, :shape.heads]))
    except Exception as error:  # of a public kernel: kv4 is measured all the same
        missing.append(in_words(error))

    def ordinary(i):
        x = launches[i % sets]
        x["mine"].copy_(x["source"])
        if padded != shape.heads:  # q then has two copies, and both are written
            x["q"][:, :, :shape.heads].copy_(x["source"])

    return contenders, missing, agree_rows, ordinary


@dataclass
class Chunk:
    name: str
    heads: int
    tokens: int
    ratio: int       # 0: windows only, 4: chosen of a pool, 128: all visible
    entries: int     # pool, or entries of the context
    top: int = 512

    @property
    def page_rows(self):
        return {0: 1, 4: 64, 128: 2}[self.ratio]


CHUNKS = ([Chunk("Flash SWA", 64, 1024, 0, 0)] +
          [Chunk(f"Flash CSA 640, pool {n >> 10}K", 64, tokens, 4, n) for tokens in (1024, 4096)
           for n in (8192, 32768, 131072, 262144) if tokens == 4096 or n <= 32768] +
          [Chunk(f"Flash HCA, context {n}K", 64, 4096, 128, n * 8) for n in (32, 128, 512)] +
          [Chunk(f"Pro CSA 1152, pool {n >> 10}K", 128, tokens, 4, n, 1024) for tokens in (1024, 4096)
           for n in (8192, 32768)])


@dataclass
class ChunkData:
    """The inputs of a chunk's launch. kv: bf16 rows of window and entries, if the gather is not timed."""

    call: dict
    q: object
    windows: object
    pool: object
    block_table: object
    index: object    # i32 [tokens, 1, n]: rows of windows, then entries; -1: none
    lengths: object  # i32 [tokens]
    kv: object = None


def chunk_data(bench, chunk, sink, out, workspace):
    torch, tokens = bench.torch, chunk.tokens
    page_rows = chunk.page_rows
    context = chunk.entries * chunk.ratio
    start = context - tokens if chunk.ratio == 128 else context + WINDOW
    if start % WINDOW:
        raise ValueError("a chunk starts at a multiple of the window, so that its ring is in order")
    # One page holds the window before the chunk, kv4's ring, and the chunk's rows, kv4's scratch.
    rows = WINDOW + tokens
    windows = bench.row_pages(1, rows)
    scales = windows.data_ptr() + rows * DATA
    token = torch.arange(tokens, device=bench.device)
    zero = torch.zeros_like(token)
    records = bench.records(zero, zero + start, zero + tokens, zero, zero, start + token, long_step=True)
    q = bench.normal(tokens, chunk.heads, WIDTH)
    call = dict(on_host=bench.on_host, num_tokens=tokens, num_requests=1, num_heads=chunk.heads, softmax_scale=SCALE, q=q,
                sink=sink, out=out, records=records, ring=windows, ring_scales=scales, ring_stride=windows.stride(0),
                scratch=windows.data_ptr() + WINDOW * DATA, scratch_scales=scales + WINDOW * 8, ratio=chunk.ratio,
                page_rows=page_rows, workspace=workspace, workspace_bytes=workspace.numel())
    index = token[:, None] + 1 + torch.arange(WINDOW, device=bench.device)
    lengths, pool, block_table = zero + WINDOW, None, None
    if chunk.ratio:
        blocks = chunk.entries // page_rows
        pool = bench.row_pages(blocks, page_rows)
        block_table = torch.randperm(blocks, generator=bench.random, device=bench.device).int()
        call |= dict(block_table=block_table, blocks_per_request=blocks, pages=pool, page_stride=pool.stride(0))
        if chunk.ratio == 4:
            chosen = bench.different(tokens, chunk.top, chunk.entries)
            call |= dict(chosen=chosen, num_chosen=chunk.top)
            index = torch.cat((index, rows + chosen), 1)
            lengths = lengths + chunk.top
        else:
            visible = (start + token + 1) // chunk.ratio
            entry = torch.arange(chunk.entries, device=bench.device).expand(tokens, -1)
            index = torch.cat((index, torch.where(entry < visible[:, None], rows + entry, -1)), 1)
            lengths = lengths + visible
    padding = round_up(index.shape[1], 128) - index.shape[1]
    index = torch.nn.functional.pad(index, (0, padding), value=-1).int()[:, None].contiguous()
    return ChunkData(call, q, windows, pool, block_table, index, lengths.int())


def prefill_attend(bench, chunk):
    torch, rows = bench.torch, WINDOW + chunk.tokens
    sink = bench.normal(chunk.heads, dtype=torch.float32)
    out = bench.empty(chunk.tokens, chunk.heads, WIDTH, dtype=torch.bfloat16)
    # q alone is 64 MiB for 1,024 tokens of 64 heads: no launch finds the data of the last launch but one in L2.
    room = bench.make_attend_workspace(chunk.tokens, 1, chunk.entries)
    launches = [chunk_data(bench, chunk, sink, out, room) for _ in range(3)]

    def ours(i):
        bench.kv4.run("attend_call", PeerAttend(stream=bench.clock.stream, **launches[i % 3].call))

    contenders = [Contender("kv4", ours, True, lambda: out)]
    missing, kept = [], {}
    peer, gather = bench.peers["flash_mla_sparse_fwd"], bench.peers["dequantize_and_gather_k_cache"]
    try:
        flash = peer.need()
        more = legacy(flash)
        workspace = bench.empty(1, rows + chunk.entries, WIDTH, dtype=torch.bfloat16)
        one = bench.ints(0)[None]

        def attention(i):
            x = launches[i % 3]
            kv = workspace if x.kv is None else x.kv
            kept["out"] = flash(q=x.q, kv=kv.view(-1, 1, WIDTH), indices=x.index, sm_scale=SCALE, d_v=WIDTH, attn_sink=sink,
                                topk_length=x.lengths, **more)[0]

        def expand(i):
            x, fetch = launches[i % 3], gather.call
            fetch(workspace, bench.rows_view(x.windows, rows)[:, :, 0], bench.ints_of(rows), None, one, rows, 0)
            if chunk.ratio:
                fetch(workspace, bench.rows_view(x.pool, chunk.page_rows)[:, :, 0], bench.ints_of(chunk.entries), None,
                      x.block_table[None], chunk.page_rows, rows)

        def chain(i):
            expand(i)
            attention(i)

        why = gather.why
        if gather.call is not None:
            try:
                expand(0)
                bench.clock.synchronize()
            except Exception as error:
                why = in_words(error)
        if why:
            missing.append(f"{gather.name}: {why}; the public time is without the gather")
            for x in launches:
                x.kv = torch.empty_like(workspace)
                plain_expand(bench, x.kv[0, :rows], x.windows, rows, torch.zeros(1, dtype=torch.long, device=bench.device))
                if chunk.ratio:
                    plain_expand(bench, x.kv[0, rows:], x.pool, chunk.page_rows, x.block_table.long())
            contenders.append(Contender(f"{peer.label} alone", attention, False, lambda: kept["out"]))
        else:
            contenders.append(Contender(f"{gather.label} + {peer.label}", chain, False, lambda: kept["out"]))
    except Exception as error:  # of a public kernel: kv4 is measured all the same
        missing.append(in_words(error))
    return contenders, missing, agree_rows, None


def plain_expand(bench, out, pages, page_rows, table):
    """Rows as bf16, by torch: replaces a missing gather, outside of the measured time."""
    torch = bench.torch
    for at in range(0, len(table), 4096):
        part = pages[table[at:at + 4096]]
        data = part[:, :page_rows * DATA].reshape(-1, DATA)
        scale = part[:, page_rows * DATA:page_rows * ROW].reshape(-1, 8)[:, :7]
        values = data[:, :448].contiguous().view(torch.float8_e4m3fn).float().view(-1, 7, 64)
        values = values * torch.exp2(scale.float() - 127)[..., None]
        tail = data[:, 448:].contiguous().view(torch.bfloat16)
        out[at * page_rows:at * page_rows + data.shape[0]] = torch.cat((values.flatten(1).to(torch.bfloat16), tail), 1)
