#!/usr/bin/env python3
"""Greedy generation by a random DeepSeek-V4 of transformers after a long prompt: stock cache, Kv4Cache, and accelerated.

    python examples/transformers_generate.py --device cuda --dtype bfloat16 --context 32768 --layers 12 \\
        --hidden 2048 --heads 32

Prints for each the milliseconds per generated token and the megabytes beside the weights: torch's peak during the
generation and the prefill (on a GPU), and kv4's own memory. The three take turns, so that other work on the machine
affects all of them alike. The stock cache chooses the tokens; the last column counts the tokens that the others would
choose too.
"""
import argparse
import contextlib
import statistics
import time

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from kv4.transformers import Kv4Cache, accelerate

WARM_UP = 3  # tokens
TURNS = 4
COLUMNS = ["ms/token", "torch MB", "kv4 MB", "prefill s", "prefill MB"]


def random_model(options):
    """Real head sizes, few layers: a window, then CSA and HCA in turn."""
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    config = DeepseekV4Config(
        vocab_size=1024, hidden_size=options.hidden, moe_intermediate_size=options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, q_lora_rank=options.hidden, num_experts_per_tok=2, n_routed_experts=4,
        o_groups=2, o_lora_rank=64, mlp_layer_types=["moe"] * options.layers,
        layer_types=["sliding_attention"] + [kinds[i % 2] for i in range(options.layers - 1)],
        pad_token_id=0, bos_token_id=1, eos_token_id=None)
    torch.manual_seed(0)
    return DeepseekV4ForCausalLM(config).to(options.device, getattr(torch, options.dtype)).eval()


def unmodified(model):
    """Undoes accelerate()."""
    for layer in model.model.layers:
        vars(layer.self_attn).pop("forward", None)


class Way:
    """A cache, the way the model uses it, and its time and memory."""

    def __init__(self, model, prepare, make_cache, device):
        self.model, self.prepare, self.on_gpu = model, prepare, device == "cuda"
        self.held, self.peak, self.ms, self.chosen = 0, 0, [], []
        with self.counting():
            self.cache = make_cache()

    @contextlib.contextmanager
    def counting(self):
        """Measures torch's peak in MB without memory that others hold. On the CPU torch does not count."""
        if not self.on_gpu:
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        self.peak = max(self.peak, (self.held + torch.cuda.max_memory_allocated() - before) / 1e6)
        self.held += torch.cuda.memory_allocated() - before

    @torch.no_grad()
    def prefill(self, prompt, chunk):
        self.prepare(self.model)
        start = time.monotonic()
        with self.counting():
            for part in torch.split(prompt, chunk, dim=1):
                logits = self.model(part, past_key_values=self.cache, logits_to_keep=1).logits
            self.chosen.append(logits[:, -1].argmax(-1).item())  # waits
        self.prefill_s, self.prefill_mb, self.peak = time.monotonic() - start, self.peak, 0

    @torch.no_grad()
    def generate(self, count, tokens, device):
        """Runs `count` steps. Each takes the next of `tokens`, or its own last choice where `tokens` ends."""
        self.prepare(self.model)
        start = time.monotonic()
        with self.counting():
            for _ in range(count):
                at = len(self.chosen) - 1
                token = tokens[at] if at < len(tokens) else self.chosen[-1]
                logits = self.model(torch.tensor([[token]], device=device), past_key_values=self.cache).logits
                self.chosen.append(logits[:, -1].argmax(-1).item())
        self.ms.append(1000 * (time.monotonic() - start) / count)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", default="fp8_tile64", help="kv4's row format")
    parser.add_argument("--index-keys", default="mxfp4", help="kv4's format of index keys")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prefill step")
    parser.add_argument("--tokens", type=int, default=32, help="to generate")
    options = parser.parse_args()

    model = random_model(options)
    prompt = torch.randint(2, 1024, (1, options.context), device=options.device)
    each = max(1, options.tokens // TURNS)
    longest = options.context + WARM_UP + TURNS * each
    stock_cache = lambda: DynamicCache(config=model.config)
    kv4_cache = lambda: Kv4Cache(model.config, model, max_context=longest, max_step_tokens=options.chunk,
                                 row_format=options.rows, index_format=options.index_keys)
    ways = {name: Way(model, prepare, make_cache, options.device) for name, prepare, make_cache in (
        ("stock", unmodified, stock_cache), ("kv4", unmodified, kv4_cache), ("accelerated", accelerate, kv4_cache))}
    stock = ways["stock"]
    for way in ways.values():
        way.prefill(prompt, options.chunk)
        way.generate(WARM_UP, stock.chosen, options.device)
        way.ms.clear()
    for _ in range(TURNS):
        for way in ways.values():
            way.generate(each, stock.chosen, options.device)

    print(f"{'cache':<12}", *(f"{column:>10}" for column in COLUMNS), " tokens as the stock cache chooses them")
    for name, way in ways.items():
        kv4_mb = way.cache.manager.memory_bytes() / 1e6 if isinstance(way.cache, Kv4Cache) else 0
        on_gpu = lambda figure: figure if way.on_gpu else None
        figures = [statistics.median(way.ms), on_gpu(way.peak), kv4_mb, way.prefill_s, on_gpu(way.prefill_mb)]
        same = sum(a == b for a, b in zip(way.chosen, stock.chosen))
        print(f"{name:<12}", *(f"{'-' if f is None else format(f, '.2f'):>10}" for f in figures), f" {same} of {len(way.chosen)}")


if __name__ == "__main__":
    main()
