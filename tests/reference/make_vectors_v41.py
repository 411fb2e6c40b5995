#!/usr/bin/env python3
"""Writes reference vectors of a model of V4.1: its layers, a draft stage, and its number formats, in float64 NumPy.

    python3 make_vectors_v41.py [DIR]      DIR defaults to vectors_v41/ beside this file; needs NumPy only

Seven layers at small widths: two owners, two readers, a layer that picks the candidates and owns nothing, one that ranks
within them. The files have the names, tensors and metadata of vectors recorded from a real model, at other sizes.
`kv4 golden DIR` reads both. Formats are those of docs/formats.md; no code is shared with the library.
"""
import json
import pathlib
import sys

import numpy as np

import make_vectors as base
from make_vectors import F, as_bf16, bf16, e2m1, e4m3, exponent_above, packed, rotate, save, single, unit_rows

SEED = 20261119
EPS = 1e-20
TOKENS, WIDTH, ROPE, HEADS, WINDOW, DRAFT = 101, 128, 32, 2, 32, 5
INDEX_HEADS, INDEX_WIDTH, TOPK, BLOCK, KEEP = 20, 64, 8, 6, 4
# Ratio, owner, index source, candidate source, file.
SCHEDULE = [(0, -1, -1, -1, "l0_window"), (2, 1, 1, -1, "l1_owner"), (2, 1, 1, -1, "l2_reader"), (1, 3, 3, -1, "l3_owner"),
            (1, 3, 4, 4, "l4_candidates"), (1, 3, 5, 4, "l5_masked"), (1, 3, 5, 4, "l6_reader")]
QUERIES = np.array([0, 1, 2, 5, 8, 23, 24, 31, 32, 40, 57, 63, 64, 77, 96, 99, 100])
DRAFTS = np.array([0, 3, 31, 32, 70, 100])


# ---------------------------------------------------------------- formats

def groups_of(x, size):
    return np.asarray(x, F).reshape(*x.shape[:-1], x.shape[-1] // size, size)


def largest(groups):
    """NaN is passed over, infinity counts as the largest bf16."""
    return np.minimum(np.nan_to_num(np.abs(groups), nan=0, posinf=3.3895314e38), F(3.3895314e38)).max(-1)


def codes_of(encode, x):
    """NaN becomes the code for it, infinity the largest."""
    sign_bit, nan = (7, 0x7F) if encode is e4m3 else (3, 7)
    finite = np.clip(np.nan_to_num(x, nan=0, posinf=1e300, neginf=-1e300), -1e300, 1e300)
    code = encode(finite) | (np.signbit(x).astype(np.uint8) << sign_bit)
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def fp8_tile32(x):
    g = groups_of(x, 32)
    power = exponent_above(np.maximum(largest(g), F(1e-4)) / F(448))
    return codes_of(e4m3, g / np.exp2(power.astype(np.float64))[..., None]).reshape(x.shape), (power + 127).astype(np.uint8)


def mxfp4(x):
    g = groups_of(x, 32)
    power = exponent_above(np.maximum(largest(g), F(6 * 2.0**-126)) / F(6))
    return packed(codes_of(e2m1, g / np.exp2(power.astype(np.float64))[..., None]).reshape(x.shape)), (power + 127).astype(np.uint8)


def nvfp4_row(x):
    g = groups_of(x, 16)
    bad = np.isnan(g).any(-1)
    scale = e4m3(np.maximum(largest(g), 6 * 2.0**-9).astype(np.float64) / 6)
    codes = codes_of(e2m1, g.astype(np.float64) / base.E4M3[scale][..., None])
    return packed(np.where(bad[..., None], 0, codes).reshape(x.shape)), np.where(bad, 0x7F, scale).astype(np.uint8)


def signed(values, codes, sign_bit):
    table = np.append(values, np.nan) if len(values) == 127 else values
    magnitude = table[codes & ((1 << sign_bit) - 1)]
    return np.where(codes >> sign_bit != 0, -magnitude, magnitude)


def nibbles(codes):
    return np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def read_fp8(codes, scales):
    return signed(base.E4M3, codes, 7) * np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, -1)


def read_mxfp4(codes, scales):
    return signed(base.E2M1, nibbles(codes), 3) * np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, -1)


def read_nvfp4(codes, scales):
    return signed(base.E2M1, nibbles(codes), 3) * np.repeat(signed(base.E4M3, scales, 7), 16, -1)


# ---------------------------------------------------------------- layers

def table(kind, positions):
    """The model's own table, fp32, as the angles used here."""
    theta = base.angles(kind, ROPE, positions)
    return np.cos(theta).astype(F), np.sin(theta).astype(F)


def turn(rows, kind, positions):
    """Rotated by the fp32 table, rounded to bf16."""
    cos, sin = (t.astype(np.float64) for t in table(kind, positions))
    tail = rows[..., -ROPE:].reshape(*rows.shape[:-1], ROPE // 2, 2)
    shape = (len(cos), *[1] * (rows.ndim - 2), ROPE // 2)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    out = rows.copy()
    out[..., -ROPE:] = np.stack([tail[..., 0] * cos - tail[..., 1] * sin, tail[..., 1] * cos + tail[..., 0] * sin], -1).reshape(tail.shape[:-2] + (ROPE,))
    return as_bf16(out).astype(np.float64)


def normed(rows, weight):
    return as_bf16(rows / np.sqrt(np.mean(rows**2, -1, keepdims=True) + EPS) * weight).astype(np.float64)


def bits(x):
    return bf16(F(x))


def defined_scores(q, keys, weights):
    """The order of docs/formats.md: four-code groups exact, groups in order, chains of 16 heads; fp32."""
    groups = q.shape[1] // 32
    products = np.einsum("hgc,kgc->hkg", q.reshape(len(q), groups, 32), keys.reshape(len(keys), groups, 32))
    dot = np.zeros(products.shape[:2], F)
    for g in range(products.shape[2]):
        dot = dot + products[:, :, g].astype(F)
    chains = []
    for first in range(0, len(q), 16):
        chain = np.zeros(len(keys), F)
        for h in range(first, min(first + 16, len(q))):
            chain = (np.float64(weights[h]) * np.maximum(dot[h], 0) + chain).astype(F)
        chains.append(chain)
    while len(chains) > 1:
        chains = [a + b for a, b in zip(chains[0::2], chains[1::2])] + chains[len(chains) & ~1:]
    return chains[0]


def best(values, count):
    return np.lexsort((np.arange(len(values)), -values))[:count]


def kept_blocks(scores):
    blocks = [scores[first:first + BLOCK].max() for first in range(0, len(scores), BLOCK)]
    if blocks:
        blocks[-1] = np.inf
    return sorted(best(np.array(blocks), KEEP))


def attend(q, rows, sinks):
    logits = np.hstack([q @ rows.T / np.sqrt(rows.shape[1]), sinks[:, None]])
    shares = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    return shares[:, :-1] @ rows


def make_owner(rng, ratio):
    count = TOKENS // ratio
    norm, key_norm = single(1 + 0.3 * rng.standard_normal(WIDTH)), single(1 + 0.3 * rng.standard_normal(INDEX_WIDTH))
    weight = as_bf16(rng.standard_normal((INDEX_WIDTH, WIDTH)) * WIDTH**-0.5).astype(np.float64)
    tensors = {"comp_norm_weight": F(norm), "idx_norm_weight": F(key_norm), "idx_wk": bits(weight)}
    if ratio == 1:
        pooled = as_bf16(1.5 * rng.standard_normal((TOKENS, WIDTH))).astype(np.float64)
        tensors["comp_kv"] = bits(pooled)
    else:
        kv, gate = single(1.5 * rng.standard_normal((TOKENS, WIDTH))), single(2 * rng.standard_normal((TOKENS, WIDTH)))
        spans = lambda x: x[:count * ratio].reshape(count, ratio, WIDTH)
        pooled = as_bf16(np.array([base.pool(g, v) for g, v in zip(spans(gate), spans(kv))])).astype(np.float64)
        open_rows = slice(count * ratio, TOKENS)
        tensors |= {"comp_kv": F(kv), "comp_gate": F(gate), "comp_tail_kv": F(kv[open_rows]), "comp_tail_gate": F(gate[open_rows])}
    latents = normed(pooled, norm)
    first = ratio * np.arange(count)
    projected = as_bf16(latents @ weight.T).astype(np.float64)
    entry_codes, entry_scales = nvfp4_row(turn(latents, "compress", first))
    key_codes, key_scales = mxfp4(turn(normed(projected, key_norm), "compress", first))
    tensors |= {"comp_latent": bits(latents), "idx_k_proj": bits(projected), "comp_entries.codes": entry_codes,
                "comp_entries.scales": entry_scales, "idx_keys.codes": key_codes, "idx_keys.scales": key_scales}
    return tensors, read_nvfp4(entry_codes, entry_scales), read_mxfp4(key_codes, key_scales)


def rank(rng, ratio, keys, kept, picks):
    """Tensors of a ranker and its lists. `kept`: by query, filled in where this layer picks; None: nothing is masked."""
    q = as_bf16(rotate(unit_rows(rng, len(QUERIES), INDEX_HEADS, INDEX_WIDTH), base.angles("compress", ROPE, QUERIES))).astype(np.float64)
    weights = F(rng.standard_normal((len(QUERIES), INDEX_HEADS)) * INDEX_HEADS**-0.5)
    codes, scales = mxfp4(q)
    values = read_mxfp4(codes, scales)
    scores, chosen = np.full((len(QUERIES), len(keys)), np.nan, F), np.full((len(QUERIES), TOPK), -1, np.int32)
    blocks = np.zeros((len(QUERIES), -(-len(keys) // BLOCK)), np.uint8)
    for i, t in enumerate(QUERIES):
        visible = (t + 1) // ratio
        scores[i, :visible] = defined_scores(values[i], keys[:visible], weights[i])
        inside = np.arange(visible)
        if picks:
            kept[i] = kept_blocks(scores[i, :visible])
            blocks[i, kept[i]] = 1
        elif kept is not None:
            inside = inside[np.isin(inside // BLOCK, kept[i])]
        order = inside[best(scores[i, inside], len(inside))]
        if len(order) > TOPK:  # no list hangs on the last bit of a score
            assert scores[i, order[TOPK - 1]] - scores[i, order[TOPK]] > 1e-5 * np.nanmax(np.abs(scores[i]))
        chosen[i, :min(TOPK, len(order))] = np.sort(order[:TOPK])
    tensors = {"idx_q": bits(q), "idx_q.codes": codes, "idx_q.scales": scales, "idx_weights": weights, "idx_scores": scores, "idx_topk": chosen}
    return tensors | ({"cand_blocks": blocks} if picks else {}), [row[row >= 0] for row in chosen]


def make_model():
    entries, keys, lists, kept, files = {}, {}, {}, {}, {}
    for layer, (ratio, owner, ranker, source, name) in enumerate(SCHEDULE):
        rng = np.random.default_rng([SEED, layer])
        kind = "compress" if ratio else "main"
        rows = turn(unit_rows(rng, TOKENS, WIDTH), kind, np.arange(TOKENS))
        codes, scales = fp8_tile32(rows)
        window = read_fp8(codes, scales)
        q, sinks = 2 * as_bf16(unit_rows(rng, len(QUERIES), HEADS, WIDTH)).astype(np.float64), single(rng.standard_normal(HEADS))
        tensors = {"swa_kv": bits(rows), "swa_kv.codes": codes, "swa_kv.scales": scales, "query_positions": QUERIES.astype(np.int32),
                   "q": bits(q), "sinks": F(sinks)}
        if owner == layer:
            more, entries[layer], keys[layer] = make_owner(rng, ratio)
            tensors |= more
        if ranker == layer:
            more, lists[layer] = rank(rng, ratio, keys[owner], kept if source >= 0 else None, source == layer)
            tensors |= more
        tensors["attn_out"] = F([attend(q[i], np.vstack([window[max(0, t + 1 - WINDOW):t + 1]] + ([entries[owner][lists[ranker][i]]] if ratio else [])), sinks)
                                 for i, t in enumerate(QUERIES)])
        tensors |= dict(zip((f"rope.{kind}.cos", f"rope.{kind}.sin"), table(kind, np.arange(TOKENS + DRAFT + 1))))
        files[name] = tensors
    files["draft"] = make_draft(np.random.default_rng([SEED, len(SCHEDULE)]))
    return files


def make_draft(rng):
    rows = as_bf16(unit_rows(rng, TOKENS, WIDTH)).astype(np.float64)
    block = as_bf16(unit_rows(rng, len(DRAFTS), DRAFT, WIDTH)).astype(np.float64)
    q, sinks = 2 * as_bf16(unit_rows(rng, len(DRAFTS), DRAFT, HEADS, WIDTH)).astype(np.float64), single(rng.standard_normal(HEADS))
    window, (codes, scales) = read_fp8(*fp8_tile32(rows)), fp8_tile32(block)
    own = read_fp8(codes, scales)
    out = F([[attend(q[i, b], np.vstack([window[max(0, t + 1 - WINDOW):t + 1], own[i]]), sinks) for b in range(DRAFT)] for i, t in enumerate(DRAFTS)])
    return {"swa_kv": bits(rows), "draft_positions": DRAFTS.astype(np.int32), "draft_kv": bits(block), "draft_kv.codes": codes,
            "draft_kv.scales": scales, "q": bits(q), "sinks": F(sinks), "attn_out": out}


# ---------------------------------------------------------------- the number formats

def corner_rows(rng, width, tops, codes):
    """bf16 rows: ordinary ones, corners of the scale, every code and tie, NaN and infinity."""
    rows = [unit_rows(rng, width) * scale for scale in (1, 3, 0.01, 250, 1e4, 1e-5, 1e30)]
    rows += [np.zeros(width), np.full(width, -0.0), np.full(width, 1e-40)]
    for top in tops:
        rows.append(np.where(np.arange(width) % 16 == 5, -top, top * rng.uniform(-1, 1, width)))
    ties = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2])
    for power in (-6, 0, 3):
        row = rng.choice(ties, width) * rng.choice([-1, 1], width)
        row[7::16] = codes[-1]
        rows.append(row * 2.0**power)
    out = as_bf16(np.array(rows + [unit_rows(rng, width) * 2] * 3))
    for row, special in enumerate((np.nan, np.inf, -np.inf), len(out) - 3):
        out[row, [3, width // 2 + 1]] = special
    return out


def codec_vectors(rng):
    tensors = {}
    amax = np.unique(np.concatenate([np.arange(0, 0x7F80, 61), [0x43E0, 0x43E1, 0x40CC, 0x40E4, 0x4528, 0x4529, 0x38D1, 0x38D2, 0x7F7F]])).astype(np.int16)
    filled = lambda size: np.repeat((amax.astype(np.uint32) << 16).view(F)[:, None], size, 1)
    tensors["sweep.amax"] = amax
    formats = {"fp8_tile32": (fp8_tile32, read_fp8, WIDTH, 32, (448, 450, 446, 224, 226, 7, 1e-4, 9.97e-5, 1.01e-4, 3.3e38), base.E4M3),
               "nvfp4_row": (nvfp4_row, read_nvfp4, WIDTH, 16, (6, 6.375, 7.125, 2688, 2704, 3e38, 0.0117, 0.0118, 1e-3, 448, 450), base.E2M1),
               "mxfp4": (mxfp4, read_mxfp4, INDEX_WIDTH, 32, (6, 6.03125, 5.96875, 3, 12, 448, 1e-4, 3.3e38), base.E2M1)}
    for name, (encode, read, width, group, tops, codes) in formats.items():
        x = corner_rows(rng, width, tops, codes)
        stored, scales = encode(x)
        with np.errstate(over="ignore"):
            out = read(stored, scales).astype(F)
        tensors |= {f"{name}.in": x, f"{name}.codes": stored, f"{name}.scales": scales, f"{name}.out": out,
                    f"sweep.{name}": encode(filled(group))[1][:, 0]}
    return tensors


def tie_vectors(rng):
    """Keys and queries of a few patterns: many scores are equal."""
    count, heads, positions = 90, 3, np.arange(3, 90, 6)
    patterns = as_bf16(rng.choice([-3.0, -1.0, 0.5, 2.0, 6.0], (5, INDEX_WIDTH))).astype(np.float64)
    key_codes, key_scales = mxfp4(patterns[rng.integers(0, 5, count)])
    q_codes, q_scales = mxfp4(as_bf16(rng.choice([-2.0, 0.0, 1.0, 4.0], (len(positions), heads, INDEX_WIDTH))).astype(np.float64))
    weights = F(rng.choice([0.25, 0.5, 1.0], (len(positions), heads)))
    keys, q = read_mxfp4(key_codes, key_scales), read_mxfp4(q_codes, q_scales)
    blocks = np.zeros((len(positions), -(-count // BLOCK)), np.uint8)
    lists, masked = (np.full((len(positions), TOPK), -1, np.int32) for _ in range(2))
    for i, t in enumerate(positions):
        scores = defined_scores(q[i], keys[:t + 1], weights[i])
        kept = kept_blocks(scores)
        blocks[i, kept] = 1
        inside = np.flatnonzero(np.isin(np.arange(t + 1) // BLOCK, kept))
        chosen, within = best(scores, TOPK), inside[best(scores[inside], TOPK)]
        lists[i, :len(chosen)], masked[i, :len(within)] = np.sort(chosen), np.sort(within)
    return {"ties.idx_keys.codes": key_codes, "ties.idx_keys.scales": key_scales, "ties.idx_q.codes": q_codes, "ties.idx_q.scales": q_scales,
            "ties.idx_weights": weights, "ties.query_positions": positions.astype(np.int32), "ties.idx_topk": lists,
            "ties.idx_topk_masked": masked, "ties.cand_blocks": blocks}


def main():
    where = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "vectors_v41"
    where.mkdir(parents=True, exist_ok=True)
    schedule = [dict(zip(("ratio", "owner", "index_source", "candidate_source", "file"), layer)) for layer in SCHEDULE]
    metadata = {"n_tokens": TOKENS, "head_dim": WIDTH, "rope_dim": ROPE, "heads": HEADS, "sliding_window": WINDOW, "rms_norm_eps": EPS,
                "softmax_scale": WIDTH**-0.5, "index_heads": INDEX_HEADS, "index_head_dim": INDEX_WIDTH, "index_topk": TOPK,
                "candidate_block_size": BLOCK, "candidate_topk_blocks": KEEP, "schedule": json.dumps(schedule), "seed": SEED}
    for name, tensors in make_model().items():
        save(where / f"{name}.safetensors", dict(sorted(tensors.items())), metadata | {"name": name})
    rng = np.random.default_rng([SEED, 100])
    ties = {"ties.index_topk": TOPK, "ties.candidate_block_size": BLOCK, "ties.candidate_topk_blocks": KEEP, "seed": SEED}
    save(where / "codecs41.safetensors", dict(sorted((codec_vectors(rng) | tie_vectors(rng)).items())), ties)


if __name__ == "__main__":
    main()
