#!/usr/bin/env python3
"""Writes the reference vectors beside it: one layer of each kind and every number format, in float64 NumPy.

    python3 make_vectors.py [DIR]      DIR defaults to vectors/ beside this file; needs NumPy only

The files have the names, tensors and metadata of vectors recorded from a real model, at other sizes. `kv4 golden DIR`
reads both.
Formats are those of docs/formats.md; no code is shared with the library.
"""
import json
import pathlib
import struct
import sys

import numpy as np

SEED = 20260418
TYPE_NAMES = {"float32": "F32", "int32": "I32", "int16": "I16", "uint8": "U8", "uint16": "BF16"}


def save(path, tensors, metadata):
    """8-byte header length, JSON header padded with blanks to 8, data."""
    header, data, at = {"__metadata__": {k: str(v) for k, v in metadata.items()}}, [], 0
    for name, value in tensors.items():
        value = np.ascontiguousarray(value)
        header[name] = {"dtype": TYPE_NAMES[value.dtype.name], "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        data.append(value.tobytes())
        at += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


# ---------------------------------------------------------------- the layers

ROPE = {"main": (10000.0, None), "compress": (160000.0, (16.0, 65536.0, 32.0, 1.0))}
EPS = 1e-6


def angles(kind, rope_dim, positions):
    """[positions, rope_dim / 2]"""
    theta, yarn = ROPE[kind]
    pair = np.arange(rope_dim // 2, dtype=np.float64)
    frequency = np.exp(-np.log(theta) * 2 * pair / rope_dim)
    if yarn is not None:
        factor, length, fast, slow = yarn
        turn = lambda rotations: rope_dim * np.log(length / (2 * np.pi * rotations)) / (2 * np.log(theta))
        low, high = max(np.floor(turn(fast)), 0), min(np.ceil(turn(slow)), rope_dim - 1)
        blend = np.minimum(np.maximum((pair - low) / (high - low), 0), 1)
        frequency = frequency * ((1 - blend) + blend / factor)
    return np.multiply.outer(np.asarray(positions, np.float64), frequency)


def rotate(rows, theta):
    """The last channels are complex numbers (even, odd), turned by `theta` [rows, pairs]; rows [rows, ..., width]."""
    pairs = theta.shape[1]
    tail = rows[..., -2 * pairs:].reshape(*rows.shape[:-1], pairs, 2)
    turned = (tail[..., 0] + 1j * tail[..., 1]) * np.exp(1j * theta).reshape(len(theta), *[1] * (rows.ndim - 2), pairs)
    out = rows.copy()
    out[..., -2 * pairs:] = np.stack([turned.real, turned.imag], -1).reshape(*rows.shape[:-1], 2 * pairs)
    return out


def single(x):
    """The contents of a file. Inputs are rounded before use, so that the outputs belong to the stored inputs."""
    return np.asarray(x, np.float32).astype(np.float64)


def unit_rows(rng, *shape):
    x = rng.standard_normal(shape)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True))


def pool(gates, values):
    """Softmax over the first axis, per channel."""
    shifted = np.exp(gates - np.max(gates, axis=0))
    return np.einsum("rc,rc->c", shifted / shifted.sum(0), values)


class Compressor:
    """Random projections of one compressor and all that follows from them."""

    def __init__(self, rng, tokens, ratio, width, overlap):
        self.tokens, self.ratio, self.width, self.overlap = tokens, ratio, width, overlap
        columns = width * (2 if overlap else 1)
        self.kv, self.gate = single(1.5 * rng.standard_normal((tokens, columns))), single(2 * rng.standard_normal((tokens, columns)))
        self.bias = single(rng.standard_normal((ratio, columns)))
        self.norm = single(1 + 0.3 * rng.standard_normal(width))

    def pooled(self, j):
        r, w = self.ratio, self.width
        gate = self.gate + self.bias[np.arange(self.tokens) % r]
        own = np.arange(j * r, j * r + r)
        if not self.overlap:
            return pool(gate[own], self.kv[own])
        before = own - r
        before = before[before >= 0]
        return pool(np.concatenate([gate[before, :w], gate[own, w:]]), np.concatenate([self.kv[before, :w], self.kv[own, w:]]))

    def entries(self, rope_dim):
        count = self.tokens // self.ratio
        rows = np.array([self.pooled(j) for j in range(count)]).reshape(count, self.width)
        rows = rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + EPS) * self.norm
        return rotate(rows, angles("compress", rope_dim, self.ratio * np.arange(count)))

    def tensors(self, prefix, rope_dim):
        closed = self.tokens // self.ratio * self.ratio
        out = {"kv": self.kv, "gate": self.gate, "position_bias": self.bias, "norm_weight": self.norm,
               "entries": self.entries(rope_dim), "tail_kv": self.kv[closed:], "tail_gate": self.gate[closed:]}
        if self.overlap:
            previous = slice(max(closed - self.ratio, 0), closed)
            out["overlap_kv"] = self.kv[previous, :self.width]
            out["overlap_gate_biased"] = self.gate[previous, :self.width] + self.bias[:closed, :self.width]
        return {f"{prefix}_{name}": value.astype(np.float32) for name, value in out.items()}


def steps(tokens):
    """End of the step each token was in: half of them at once, then a few, then one by one."""
    ends, end = [], 0
    for count in [tokens // 2, 1, 5] + [1] * tokens:
        end = min(end + count, tokens)
        ends += [end] * (end - len(ends))
    return np.array(ends)


def indexer(rng, index, heads, topk, rope_dim):
    tokens, ratio, width = index.tokens, index.ratio, index.width
    keys = index.entries(rope_dim)
    q = single(rotate(unit_rows(rng, tokens, heads, width), angles("compress", rope_dim, np.arange(tokens))))
    weights = single(rng.standard_normal((tokens, heads)) * heads**-0.5)
    hits = np.maximum(np.tensordot(q, keys, axes=(2, 1)), 0)
    scores = np.matmul(weights[:, None, :], hits)[:, 0, :] * width**-0.5
    chosen = np.full((tokens, topk), -1, np.int32)
    for t in range(tokens):
        order = np.lexsort((np.arange((t + 1) // ratio), -scores[t, :(t + 1) // ratio]))[:topk]
        chosen[t, :len(order)] = order
    known = np.where(np.arange(len(keys)) < (steps(tokens) // ratio)[:, None], scores, np.nan)
    floats = {"idx_q": q, "idx_weights": weights, "idx_scores": known}
    return {name: value.astype(np.float32) for name, value in floats.items()} | {"idx_topk": chosen}


def attention(q, window, entries, chosen, sinks, size):
    out = np.zeros_like(q)
    for t in range(len(q)):
        rows = np.vstack([window[max(0, t + 1 - size):t + 1], entries[chosen[t]]])
        logits = np.hstack([q[t] @ rows.T / np.sqrt(rows.shape[1]), sinks[:, None]])
        shares = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
        out[t] = shares[:, :-1] @ rows
    return out


LAYERS = {
    "swa": dict(kind="sliding_attention", tokens=45, head_dim=192, rope_dim=64, heads=2, window=16, ratio=0),
    "csa": dict(kind="compressed_sparse_attention", tokens=54, head_dim=512, rope_dim=64, heads=2, window=24, ratio=4),
    "hca": dict(kind="heavily_compressed_attention", tokens=141, head_dim=192, rope_dim=64, heads=1, window=128, ratio=128),
}
INDEX = dict(heads=3, head_dim=128, topk=5)


def make_layer(rng, name):
    size = LAYERS[name]
    tokens, width, rope_dim, heads = size["tokens"], size["head_dim"], size["rope_dim"], size["heads"]
    own = angles("main" if name == "swa" else "compress", rope_dim, np.arange(tokens))
    window = single(rotate(unit_rows(rng, tokens, width), own))
    q = single(2 * rotate(unit_rows(rng, tokens, heads, width), own))
    sinks = single(rng.standard_normal(heads))
    entries, chosen, tensors = np.zeros((0, width)), [[]] * tokens, {}
    if name != "swa":
        main = Compressor(rng, tokens, size["ratio"], width, name == "csa")
        entries, tensors = main.entries(rope_dim), main.tensors("comp", rope_dim)
        chosen = [list(range((t + 1) // size["ratio"])) for t in range(tokens)]
    if name == "csa":
        index = Compressor(rng, tokens, size["ratio"], INDEX["head_dim"], True)
        tensors |= index.tensors("idx", rope_dim) | indexer(rng, index, INDEX["heads"], INDEX["topk"], rope_dim)
        chosen = [[j for j in row if j >= 0] for row in tensors["idx_topk"]]
    out = attention(q, window, entries, chosen, sinks, size["window"])
    floats = {"swa_kv": window, "q": q, "sinks": sinks, "attn_out": out}
    tensors |= {key: value.astype(np.float32) for key, value in floats.items()}

    far = np.array([1000, 65535, 524288, 1048575], np.int32)
    tensors["rope_far.positions"] = far
    for series in ROPE:
        for prefix, positions in (("rope", np.arange(tokens)), ("rope_far", far)):
            turn = angles(series, rope_dim, positions)
            tensors[f"{prefix}.{series}.cos"] = np.cos(turn).astype(np.float32)
            tensors[f"{prefix}.{series}.sin"] = np.sin(turn).astype(np.float32)
    metadata = {
        "layer_kind": size["kind"], "n_tokens": tokens, "head_dim": width, "rope_dim": rope_dim, "heads": heads,
        "sliding_window": size["window"], "rms_norm_eps": EPS, "softmax_scale": width**-0.5, "index_heads": INDEX["heads"],
        "index_head_dim": INDEX["head_dim"], "index_topk": INDEX["topk"], "index_softmax_scale": INDEX["head_dim"]**-0.5, "seed": SEED,
    }
    return dict(sorted(tensors.items())), metadata


# ---------------------------------------------------------------- the number formats

F = np.float32
BF16_CODES = np.arange(0x7F80)  # positive and finite
BF16 = (BF16_CODES.astype(np.uint32) << 16).view(F).astype(np.float64)
E4M3 = np.array([(m * 2.0**-9 if e == 0 else (8 + m) * 2.0**(e - 10)) for e in range(16) for m in range(8)][:127])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(x, codes, sign_bit):
    """Index of the nearest value, ties to the even index, clamped to the last; the sign as a bit above."""
    magnitude = np.abs(np.asarray(x, np.float64))
    above = np.minimum(np.searchsorted(codes, magnitude, "left"), len(codes) - 1)
    below = np.maximum(above - 1, 0)
    up, down = codes[above] - magnitude, magnitude - codes[below]
    take_up = (up < down) | ((up == down) & (above % 2 == 0))
    return np.where(take_up | (magnitude >= codes[-1]), above, below) | (np.signbit(x).astype(int) << sign_bit)


def e4m3(x):
    return nearest(x, E4M3, 7).astype(np.uint8)


def e2m1(x):
    return nearest(x, E2M1, 3).astype(np.uint8)


def packed(codes):
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def bf16(x):
    """Beyond the midpoint above the largest finite number: infinity."""
    code = nearest(x, BF16, 15)
    past = np.abs(np.asarray(x, np.float64)) >= (2 - 2.0**-8) * 2.0**127
    return np.where(past, 0x7F80 | (code & 0x8000), code).astype(np.uint16)


def as_bf16(x):
    return (bf16(F(x)).astype(np.uint32) << 16).view(F)


def exponent_above(x):
    """k of the smallest 2^k >= x, for floats above 0."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def edges(codes):
    """Every value, every midpoint, and the floats next to the midpoints; both signs."""
    middle = F((codes[1:] + codes[:-1]) / 2)
    x = np.concatenate([F(codes), middle, np.nextafter(middle, F(0)), np.nextafter(middle, F(np.inf))])
    return np.concatenate([x, -x])


def scalar_vectors(rng):
    bits = rng.integers(0, 0x7F80, 600).astype(np.uint32) << 16  # exact, tie, just below and above a tie
    inputs = np.concatenate([(bits | low).view(F) for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    special = np.array([0, -0.0, 1e-45, -1e-45, 1e-40, 5.8e-39, 1.1754944e-38, 3.3895314e38, 3.3961775e38, 3.4028235e38, -3.4028235e38,
                        np.inf, -np.inf], F)
    inputs = np.concatenate([special, inputs, -inputs])
    wide = F(rng.standard_normal(800) * np.exp2(rng.integers(-12, 10, 800)))
    eights = np.concatenate([edges(E4M3), wide, F([449, 464, 465, 480, 1e6, -1e30, np.inf, -np.inf, 1e-45, -1e-45, 2**-10, -2**-10])])
    fours = np.concatenate([edges(E2M1), wide, F([5.0, 5.000001, 6.5, 7, -100, np.inf, -np.inf, 1e-45, -1e-45])])
    return {
        "bf16.in": inputs, "bf16.out": bf16(inputs).view(np.int16), "e4m3.in": eights, "e4m3.out": e4m3(eights),
        "e2m1.in": fours, "e2m1.out": e2m1(fours), "e4m3.decode": F(np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]])),
    }


def entry_rows(rng):
    """[rows, 512], all exact in bf16."""
    rows = [unit_rows(rng, 512) * scale for scale in (1, 3, 0.01, 250, 1e4, 1e-5, 1e30)]
    rows += [np.zeros(512), np.full(512, -0.0), np.full(512, 448.0), np.full(512, -449.0)]
    # The largest channel on and beside what a power of two can hold, at the floor, and at both ends of the range.
    for top in (448, 450, 446, 224, 226, 7, 1e-4, 9.97e-5, 1.01e-4, 3.3e38, 1e-38, 1e-40):
        rows.append(np.where(np.arange(512) % 64 == 5, top, top * rng.uniform(-1, 1, 512)))
    ties = np.concatenate([E4M3, (E4M3[1:] + E4M3[:-1]) / 2])
    for power in (-6, 0, 3):  # every code and every tie at scale 2^power; channel 63 of each tile sets the scale
        row = rng.choice(ties, 512) * rng.choice([-1, 1], 512)
        row[63::64] = 448
        rows.append(row * 2.0**power)
    outlier = unit_rows(rng, 512)
    outlier[[70, 200]] = 20000, -3
    return as_bf16(np.array(rows + [outlier]))


def index_rows(rng):
    """[rows, 128], all exact in bf16."""
    rows = [unit_rows(rng, 128) * scale for scale in (1, 1, 4, 0.02, 1e3, 1e-6, 1e25)]
    rows += [np.zeros(128), np.full(128, -0.0), np.full(128, 6.0), np.full(128, -6.03125), np.full(128, 2.0**-126), np.full(128, 1e-40)]
    for top in (6, 6.03125, 5.96875, 3, 12, 448, 2688, 3000, 1e-4, 0.0117, 0.0058, 0.0059, 3.3e38, 1e-37):
        rows.append(np.where(np.arange(128) % 16 == 9, -top, top * rng.uniform(-1, 1, 128)))
    ties = np.concatenate([E2M1, (E2M1[1:] + E2M1[:-1]) / 2])
    for power in (-3, 0, 2):
        row = rng.choice(ties, 128) * rng.choice([-1, 1], 128)
        row[7::16] = 6
        rows.append(row * 2.0**power)
    return as_bf16(np.array(rows))


def entry_vectors(x):
    body = x[:, :448]
    tiles = body.reshape(len(x), 7, 64)
    power = exponent_above(np.maximum(np.abs(tiles).max(2), F(1e-4)) / F(448))
    largest = np.abs(body).max(1)
    inverse = np.where(largest > 0, largest / F(448), F(1)).astype(F)
    return {
        "entry.in": x, "entry.rope": bf16(x[:, 448:]).view(np.int16), "entry_ue8m0.scales": (power + 127).astype(np.uint8),
        "entry_ue8m0.bytes": e4m3(tiles / np.exp2(power)[..., None]).reshape(len(x), 448),
        "entry_fp32scale.inv_scale": inverse, "entry_fp32scale.bytes": e4m3(body / inverse[:, None]),
    }


def index_vectors(x):
    n = len(x)
    largest = lambda groups: np.abs(groups).max(2)
    by32, by16 = x.reshape(n, 4, 32), x.reshape(n, 8, 16)
    power = exponent_above(np.maximum(largest(by32), F(6 * 2.0**-126)) / F(6))
    scale = e4m3(largest(by16) / F(6))
    step = F(E4M3[scale])[..., None]
    fours = np.where(step > 0, e2m1(by16 / np.where(step > 0, step, F(1))), 0)
    row_power = exponent_above(np.maximum(np.abs(x).max(1), F(1e-4)) / F(448))
    return {
        "index.in": x, "index_mxfp4.scales": (power + 127).astype(np.uint8),
        "index_mxfp4.bytes": packed(e2m1(by32 / np.exp2(power)[..., None]).reshape(n, 128)),
        "index_nvfp4.scales": scale, "index_nvfp4.bytes": packed(fours.reshape(n, 128)),
        "index_fp8.scale": F(np.exp2(row_power)), "index_fp8.bytes": e4m3(x / np.exp2(row_power)[:, None]),
    }


def main():
    where = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "vectors"
    where.mkdir(parents=True, exist_ok=True)
    for salt, name in enumerate(LAYERS):
        tensors, metadata = make_layer(np.random.default_rng([SEED, salt]), name)
        save(where / f"hf_{name}.safetensors", tensors, metadata)
    rng = np.random.default_rng([SEED, len(LAYERS)])
    tensors = scalar_vectors(rng) | entry_vectors(entry_rows(rng)) | index_vectors(index_rows(rng))
    save(where / "codecs.safetensors", dict(sorted(tensors.items())), {"seed": SEED})


if __name__ == "__main__":
    main()
