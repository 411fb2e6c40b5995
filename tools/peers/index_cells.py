"""Index scores and top-k of a decode and of a chunk, kv4 beside DeepGEMM and public top-k kernels."""
from .bench import INDEX_HEADS, KEY_WIDTH, TOPK
from .kv4_library import PeerIndex
from .public_kernels import first_that_works, in_words
from .timing import MOST_LAUNCHES, Contender


def agree_choice(torch, ours, theirs):
    """Lists of entries. Scores that differ in their last bits exchange a few entries at the end of a list."""
    if ours.shape != theirs.shape:
        return f"lists of {tuple(ours.shape)} and {tuple(theirs.shape)}"
    common = sum(len(set(a) & set(b)) for a, b in zip(ours[:16].tolist(), theirs[:16].tolist()))
    share = common / max(1, ours[:16].numel())
    return "" if share >= 0.97 else f"only {share:.0%} of the chosen entries are the same"


class IndexData:
    """Keys, queries and tables of `sets` sets; a decode has a token per request, a chunk one request."""

    def __init__(self, bench, tokens, keys, is_chunk, sets):
        torch = bench.torch
        self.bench, self.tokens, self.keys, self.sets, self.is_chunk = bench, tokens, keys, sets, is_chunk
        self.requests, self.rows = 1 if is_chunk else tokens, 64
        self.blocks = keys // self.rows
        pages = max(bench.clock.pool_bytes // (self.rows * 132), self.blocks)
        self.fp8, self.mxfp4 = (bench.key_pages(pages, self.rows, payload) for payload in (KEY_WIDTH, KEY_WIDTH // 2))
        token = torch.arange(tokens, device=bench.device)
        zero = torch.zeros_like(token)
        end = 4 * keys
        if is_chunk:
            position = end - tokens + token
            self.records = bench.records(zero, zero + end - tokens, zero + tokens, zero, zero, position)
        else:
            position = zero + end - 1
            self.records = bench.records(token, position, zero + 1, token, token, position)
        self.visible = ((position + 1) // 4).int()
        self.launches = []
        ones = torch.ones(tokens, INDEX_HEADS, dtype=torch.float32, device=bench.device)
        self.scales = {"fp8": ones.view(torch.uint8),
                       "mxfp4": torch.full((tokens, INDEX_HEADS * 4), 127, dtype=torch.uint8, device=bench.device)}
        for _ in range(sets):
            if is_chunk:
                table = torch.randperm(pages, generator=bench.random, device=bench.device)[:self.blocks].int()[None]
            else:
                table = bench.below(pages, tokens, self.blocks)
            both, like = self.queries(), None if is_chunk else self.queries()
            cut = tokens * INDEX_HEADS * KEY_WIDTH
            self.launches.append({"table": table, "both": both, "like": like,
                                  "q": both[:cut].view(torch.float8_e4m3fn).view(tokens, INDEX_HEADS, KEY_WIDTH),
                                  "q4": both[cut:].view(tokens, INDEX_HEADS * KEY_WIDTH // 2),
                                  "weights": torch.rand(tokens, INDEX_HEADS, generator=bench.random, device=bench.device)})
        self.out = bench.empty(tokens, TOPK, dtype=torch.int32)
        room = bench.kv4.index_workspace_bytes(keys, tokens)
        self.workspace = torch.zeros(room, dtype=torch.uint8, device=bench.device)

    def queries(self):
        """Bytes of fp8 queries, then of mxfp4 queries: one kernel writes both."""
        torch, bench = self.bench.torch, self.bench
        fp8 = bench.full_range(bench.normal(self.tokens * INDEX_HEADS, KEY_WIDTH, dtype=torch.float32)).view(-1)
        return torch.cat((fp8, bench.below(256, self.tokens * INDEX_HEADS * KEY_WIDTH // 2).to(torch.uint8)))

    def launch(self, i):
        return self.launches[i % self.sets]

    def call(self, i, name, fast=False, **more):
        x, fp8 = self.launch(i), name == "fp8"
        pages = self.fp8 if fp8 else self.mxfp4
        return PeerIndex(**dict(on_host=self.bench.on_host, stream=self.bench.clock.stream, num_tokens=self.tokens,
                                num_requests=self.requests, num_heads=INDEX_HEADS, format=0 if fp8 else 1,
                                q=x["q"] if fp8 else x["q4"], q_scale=self.scales[name],
                                q_row_stride=INDEX_HEADS * (128 if fp8 else 64), weights=x["weights"], records=self.records,
                                block_table=x["table"], blocks_per_request=self.blocks, pages=pages,
                                page_stride=pages.stride(0), page_rows=self.rows, ratio=4, fast=int(fast), top=TOPK,
                                indices=self.out, workspace=self.workspace, workspace_bytes=self.workspace.numel()) | more)

    def ordinary(self, i):
        x = self.launch(i)
        x["both"].copy_(x["like"])


def topk_peers(bench, data):
    """[(label, select(logits, out))] of the available public top-k kernels, and the missing ones."""
    torch, found, missing = bench.torch, [], []
    lens, tokens = data.visible, data.tokens
    names = (("topk_transform_ragged_v2", "top_k_per_row_prefill") if data.is_chunk else
             ("topk_transform_512_v2", "topk_transform_512", "top_k_per_row_decode"))
    for name in names:
        peer = bench.peers[name]
        if peer.call is None:
            missing.append(f"{name}: {peer.why}")
            continue
        zeros = torch.zeros(tokens, dtype=torch.int32, device=bench.device)
        if name == "topk_transform_512_v2":
            try:
                plan = peer.module.plan_topk_v2(lens)
            except Exception as error:  # the kernels are compiled at the first call
                missing.append(f"{name}: {in_words(error)}")
                continue
            select = lambda logits, out, call=peer.call, plan=plan: call(logits, lens, None, out, data.rows, plan)
        elif name == "topk_transform_ragged_v2":
            select = lambda logits, out, call=peer.call, z=zeros: call(logits, lens, out_offsets=z, out_indices=out)
        elif name == "topk_transform_512":
            scratch = torch.empty_like(data.out)
            select = lambda logits, out, call=peer.call, s=scratch: call(logits, lens, data.launch(0)["table"], s,
                                                                         data.rows, out)
        elif name == "top_k_per_row_prefill":
            select = lambda logits, out, call=peer.call, z=zeros: call(logits, z, lens, out, tokens, logits.stride(0),
                                                                       logits.stride(1), TOPK)
        else:
            select = lambda logits, out, call=peer.call: call(logits, 1, lens, out, tokens, logits.stride(0),
                                                              logits.stride(1), TOPK)
        found.append((peer.label, select))
    return found, missing


def decode_scorer(bench, data):
    """logits(i) of DeepGEMM over pages."""
    peer = bench.peers["fp8_paged_mqa_logits"]
    score, gemm, torch = peer.need(), peer.module, bench.torch
    cache = data.fp8.view(-1, data.rows, 1, KEY_WIDTH + 4)
    sms = gemm.get_num_sms()

    def form(lens, pair, clean):
        plan = {}

        def call(i=0):
            x = data.launch(i)
            q = x["q"].view(data.tokens, 1, INDEX_HEADS, KEY_WIDTH)
            if not plan:
                plan["of"] = gemm.get_paged_mqa_logits_metadata(lens, data.rows, sms)
            return score((q, None) if pair else q, cache, x["weights"], lens, x["table"], plan["of"], data.keys, **clean)
        return call

    forms = [form(lens, pair, clean) for clean in ({"clean_logits": False}, {}) for pair in (False, True)
             for lens in (data.visible[:, None].contiguous(), data.visible)]
    return first_that_works(peer.label, forms)[0], peer.label


def chunk_scorer(bench, data):
    """logits(i) of DeepGEMM over contiguous keys, the gather before it, and the missing functions."""
    torch, missing = bench.torch, []
    peer, gather = bench.peers["fp8_mqa_logits"], bench.peers["cp_gather_indexer_k_quant_cache"]
    score = peer.need()
    keys = bench.empty(data.keys, KEY_WIDTH, dtype=torch.uint8)
    scales = bench.empty(data.keys, 4, dtype=torch.uint8)
    begins, cut = torch.zeros_like(data.visible), bench.ints(0, data.keys)

    def plain(i):
        pages = data.fp8[data.launch(i)["table"][0].long()]
        keys.copy_(pages[:, :data.rows * KEY_WIDTH].reshape(-1, KEY_WIDTH))
        scales.copy_(pages[:, data.rows * KEY_WIDTH:].reshape(-1, 4))

    if gather.call is None:
        missing.append(f"{gather.name}: {gather.why}; the public time is without the gather")
    plain(0)

    def form(pair, clean):
        def call(i=0):
            x = data.launch(i)
            if gather.call is not None:
                gather.call(data.fp8.view(-1, data.rows, KEY_WIDTH + 4), keys, scales, x["table"], cut)
            kv = (keys.view(torch.float8_e4m3fn), scales.view(torch.float32)[:, 0])
            return score((x["q"], None) if pair else x["q"], kv, x["weights"], begins, data.visible, **clean)
        return call

    forms = [form(pair, clean) for clean in ({"clean_logits": False}, {"max_seqlen_k": 0}, {}) for pair in (False, True)]
    label = f"{gather.label} + {peer.label}" if gather.call is not None else f"{peer.label} without gather"
    return first_that_works(peer.label, forms)[0], label, missing


def index_cell(bench, tokens, keys, is_chunk):
    torch = bench.torch
    sets = max(2, min(MOST_LAUNCHES, (200 << 20) // (keys * 132 * (1 if is_chunk else tokens)) + 1))
    data = IndexData(bench, tokens, keys, is_chunk, sets)
    contenders = []
    for name, fast in (("fp8", False), ("fp8", True), ("mxfp4", False)):
        label = f"kv4 {name} {'fast' if fast else 'exact'}"
        queue = lambda i, name=name, fast=fast: bench.kv4.run("index_topk", data.call(i, name, fast))
        # mxfp4 keys are other numbers, so their top-k is compared with no other.
        contenders.append(Contender(label, queue, True, (lambda: data.out.clone()) if name == "fp8" else None))
    missing = []
    try:
        if is_chunk:
            logits, scored_by, missing = chunk_scorer(bench, data)
        else:
            logits, scored_by = decode_scorer(bench, data)
        selects, absent = topk_peers(bench, data)
        missing += absent
        for label, select in selects:
            out = torch.full_like(data.out, -1)

            def chain(i, select=select, out=out):
                select(logits(i), out)
            contenders.append(Contender(f"{scored_by} + {label}", chain, False, lambda out=out: out))
    except Exception as error:  # of a public kernel: kv4 is measured all the same
        missing.append(in_words(error))
    return contenders, missing, agree_choice, None if is_chunk else data.ordinary
