"""The groups of cells, and one cell's run."""
from .attention_cells import CHUNKS, DECODES, AttendShape, Chunk, decode_attend, prefill_attend
from .index_cells import index_cell
from .public_kernels import in_words
from .report import Cell, finish
from .timing import measure

BATCHES = (1, 16, 64, 128)


def small_cells(group):
    """For a rehearsal without a GPU."""
    return {"decode_attend": [(f"{s.name}, b = 2", lambda b, s=s: decode_attend(b, s, 2, sets=2)) for s in (
                AttendShape("SWA", 64, 0, 0), AttendShape("CSA", 64, 128, 4, 256), AttendShape("HCA", 8, 64, 128))],
            "prefill_attend": [(c.name, lambda b, c=c: prefill_attend(b, c)) for c in (
                Chunk("SWA", 64, 128, 0, 0), Chunk("CSA", 64, 128, 4, 256, 128), Chunk("HCA", 64, 128, 128, 4))],
            "decode_index": [("2 x 1024 keys", lambda b: index_cell(b, 2, 1024, False))],
            "prefill_index": [("8 tokens x 1024 keys", lambda b: index_cell(b, 8, 1024, True))]}[group]


def cells_of(group, quick):
    """[(name, make(bench))]"""
    batches = BATCHES[:2] if quick else BATCHES
    if group == "decode_attend":
        return [(f"{s.name}, b = {b}", lambda bench, s=s, b=b: decode_attend(bench, s, b))
                for s in DECODES for b in batches]
    if group == "prefill_attend":
        return [(f"{c.name}, {c.tokens} tokens", lambda bench, c=c: prefill_attend(bench, c))
                for c in CHUNKS if not quick or c.tokens <= 1024]
    if group == "decode_index":
        return [(f"{keys} keys, b = {b}", lambda bench, keys=keys, b=b: index_cell(bench, b, keys, False))
                for keys in (8192, 32768, 262144) for b in batches if not quick or keys <= 32768]
    return [(f"{tokens} tokens x {keys} keys", lambda bench, keys=keys, t=tokens: index_cell(bench, t, keys, True))
            for keys in (8192, 32768, 131072, 262144) for tokens in (256, 1024, 4096)
            if not quick or (keys <= 32768 and tokens <= 1024)]


GROUPS = {"decode_attend": "attention of a decode", "prefill_attend": "attention of a chunk, its gather counted",
          "decode_index": "index scores and top-512 of a decode", "prefill_index": "index scores and top-512 of a chunk"}


def run_cell(bench, group, name, make):
    """Raises only for a lost GPU: the other cells still run."""
    cell = Cell(group, name)
    try:
        contenders, cell.missing, agree, ordinary = make(bench)
        working = []
        for c in contenders:
            try:
                c.queue(0)
                bench.clock.synchronize()
                working.append(c)
            except Exception as error:
                if c.is_kv4:
                    raise
                cell.missing.append(f"{c.name}: {in_words(error)}")
        reference = None
        for c in working:
            if c.is_kv4 and c.result and reference is None:
                c.queue(0)
                reference = c.result()
        for c in [c for c in working if not c.is_kv4]:
            c.queue(0)
            difference = agree(bench.torch, reference, c.result())
            if difference:
                working.remove(c)
                cell.missing.append(f"{c.name}: {difference}")
                cell.failure = f"kv4 and {c.name}: {difference}"
        cell.times = measure(bench.clock, working, ordinary)
        finish(cell, working)
    except Exception as error:
        cell.failure = cell.failure or in_words(error)
    return cell
