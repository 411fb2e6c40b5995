"""What the operators compute, in plain torch: rows, attention and index scores, without regard to speed."""
import torch

CHANNELS, BODY, TAIL, TILE = 512, 448, 64, 64
PAYLOAD, SCALES = BODY + 2 * TAIL, 8
ROW = PAYLOAD + SCALES


def empty_pool(pages, rows, row_bytes=ROW, alignment=576, fill=0x7F, device="cpu"):
    """Pages of rows, [pages, rows, 1, bytes], with a stride that is a multiple of `alignment`. fill 0x7F: every code is
    NaN."""
    stride = -(-rows * row_bytes // alignment) * alignment
    memory = torch.full((pages, stride), fill, dtype=torch.uint8, device=device)
    return memory[:, : rows * row_bytes].view(pages, rows, 1, row_bytes)


def planes(pool, payload_bytes):
    """Payloads [pages, rows, payload_bytes] and scales of a pool: views of its memory."""
    pages, rows, _, row_bytes = pool.shape
    flat = pool.as_strided((pages, rows * row_bytes), (pool.stride(0), 1))
    cut = rows * payload_bytes
    return flat[:, :cut].view(pages, rows, payload_bytes), flat[:, cut:].view(pages, rows, row_bytes - payload_bytes)


def write_v4_rows(pool, x):
    """Stores f32 rows [pages, rows, 512] by the rule of V4: a power of two per 64 channels, 64 channels in bf16."""
    payload, scales = planes(pool, PAYLOAD)
    body = x[..., :BODY].bfloat16().float().unflatten(-1, (-1, TILE))
    exponent = torch.ceil(torch.log2(body.abs().amax(-1).clamp_min(1e-4) / 448.0))
    codes = (body / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn)
    payload[..., :BODY] = codes.flatten(-2).view(torch.uint8)
    payload[..., BODY:] = x[..., BODY:].bfloat16().contiguous().view(torch.uint8)
    scales[..., :7] = (exponent + 127).to(torch.uint8)
    scales[..., 7] = 0


def read_v4_rows(pool):
    """f32 [pages * rows, 512]"""
    payload, scales = planes(pool, PAYLOAD)
    codes = payload[..., :BODY].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, TILE))
    body = (codes * torch.exp2(scales[..., :7].float() - 127)[..., None]).flatten(-2)
    tail = payload[..., BODY:].contiguous().view(torch.bfloat16).float()
    return torch.cat([body, tail], -1).flatten(0, 1)


def chosen(rows, indices, lens):
    """Rows [tokens, n, channels] of lists [tokens, n], zero where an index names none, and which of them exist."""
    is_there = (indices >= 0) & (indices < rows.shape[0])
    if lens is not None:
        is_there &= torch.arange(indices.shape[-1], device=indices.device) < lens[:, None]
    found = rows[indices.clamp(0, max(rows.shape[0] - 1, 0)).long()]
    return torch.where(is_there[..., None], found, 0.0), is_there


def attention(q, parts, scale, sink=None):
    """q [tokens, heads, channels]; parts: (rows, indices, lens) of each pool. Returns out, the largest logit, lse
    without the sink (-inf without rows) and lse with it."""
    found, is_there = (torch.cat(x, 1) for x in zip(*(chosen(*part) for part in parts)))
    logits = torch.einsum("thd,tnd->thn", q.float(), found) * scale
    logits = logits.masked_fill(~is_there[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    with_sink = lse if sink is None else torch.logaddexp(lse, sink.float().expand_as(lse))
    weights = torch.where(is_there[:, None], torch.exp(logits - with_sink[..., None]), 0.0)
    weights = torch.where(with_sink[..., None].isinf(), 0.0, weights)  # nothing to see, or a sink of +inf
    largest = logits.amax(-1) if logits.shape[-1] else torch.full_like(lse, -torch.inf)
    return torch.einsum("thn,tnd->thd", weights, found), largest, lse, with_sink


def random_lists(generator, tokens, n, slots, outside=True):
    """Lists of distinct slots; some entries name no row."""
    order = torch.rand(tokens, max(slots, n), generator=generator).argsort(-1)[:, :n].int()
    none = torch.tensor([-1, -(2**31), slots, slots + 7, 2**31 - 1] if outside else [-1], dtype=torch.int32)
    pick = none[torch.randint(len(none), (tokens, n), generator=generator)]
    drop = (torch.rand(tokens, n, generator=generator) < 0.1) | (order >= slots)
    return torch.where(drop, pick, order)


def padded(tensor):
    """The same values with gaps between the elements of every dimension but the last."""
    larger_shape = [size + 1 for size in tensor.shape[:-1]] + [tensor.shape[-1] + 128]
    larger = torch.full(larger_shape, 77, device=tensor.device).to(tensor.dtype)
    view = larger[tuple(slice(0, size) for size in tensor.shape)]
    view.copy_(tensor)
    return view


def index_scores(q, keys, weights):
    """q [tokens, heads, channels], keys [tokens or 1, n, channels], weights [tokens, heads]."""
    dots = torch.einsum("thd,tnd->thn", q.double(), keys.double().expand(q.shape[0], -1, -1))
    return torch.einsum("thn,th->tn", dots.relu(), weights.double()).float()


def fp8_keys(x):
    """Codes and scales, amax / 448, as DeepGEMM's callers make them."""
    scale = x.float().abs().amax(-1).clamp_min(1e-4) / 448.0
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4_rows(x):
    """Packed codes [..., channels / 2], a UE8M0 byte per 32 channels as int32 [...], and the values that they stand
    for."""
    groups = x.float().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1).clamp_min(6e-4) / 6.0))
    scaled = groups / torch.exp2(exponent)[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(-1)
    values = (E2M1[codes] * torch.exp2(exponent)[..., None]).flatten(-2)
    codes = codes.flatten(-2).to(torch.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed, (exponent + 127).to(torch.uint8).view(torch.int32).squeeze(-1), values
