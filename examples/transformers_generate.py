#!/usr/bin/env python3
"""Greedy generation by a random DeepSeek-V4 of transformers after a long prompt: stock cache, Kv4Cache, and accelerated.

    python examples/transformers_generate.py --device cuda --dtype bfloat16 --context 32768 --layers 12 --hidden 2048 --heads 32

Prints, for each, milliseconds per generated token and megabytes beside the weights: torch's peak while tokens are
generated and during the prefill (on a GPU), and what kv4 holds.
"""
import argparse
import time

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from kv4.transformers import Kv4Cache, accelerate

WARM_UP = 3  # tokens
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


class TorchPeak:
    """Megabytes that torch takes at most beside what it held at first; None on the CPU, where torch does not count."""

    def __init__(self, device):
        self.on_gpu = device == "cuda"
        self.before = torch.cuda.memory_allocated() if self.on_gpu else 0
        self.take()

    def take(self):
        """The peak since the last call."""
        if not self.on_gpu:
            return None
        peak = torch.cuda.max_memory_allocated() - self.before
        torch.cuda.reset_peak_memory_stats()
        return peak / 1e6


@torch.no_grad()
def generate(model, cache, prompt, options, torch_peak):
    """The tokens chosen and a row of figures. The first tokens only warm up."""
    result, start = {}, time.monotonic()
    for part in torch.split(prompt, options.chunk, dim=1):
        logits = model(part, past_key_values=cache, logits_to_keep=1).logits
    tokens = [logits[:, -1].argmax(-1).item()]  # waits
    result["prefill s"], result["prefill MB"] = time.monotonic() - start, torch_peak.take()
    for count in range(WARM_UP + options.tokens):
        if count == WARM_UP:
            start = time.monotonic()
        logits = model(torch.tensor([tokens[-1:]], device=prompt.device), past_key_values=cache).logits
        tokens.append(logits[:, -1].argmax(-1).item())
    result["ms/token"], result["torch MB"] = 1000 * (time.monotonic() - start) / options.tokens, torch_peak.take()
    return tokens, result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prefill step")
    parser.add_argument("--tokens", type=int, default=32, help="to generate")
    options = parser.parse_args()

    model = random_model(options)
    prompt = torch.randint(2, 1024, (1, options.context), device=options.device)
    longest = options.context + WARM_UP + options.tokens
    ways = {
        "stock": lambda: DynamicCache(config=model.config),
        "kv4": lambda: Kv4Cache(model.config, model, max_context=longest, max_step_tokens=options.chunk),
    }
    ways["accelerated"] = ways["kv4"]
    print(f"{'cache':<12}", *(f"{column:>10}" for column in COLUMNS), " tokens as with the stock cache")
    expected = None
    for name, make_cache in ways.items():
        if name == "accelerated":
            accelerate(model)
        torch_peak = TorchPeak(options.device)
        cache = make_cache()
        tokens, result = generate(model, cache, prompt, options, torch_peak)
        result["kv4 MB"] = cache.manager.memory_bytes() / 1e6 if isinstance(cache, Kv4Cache) else 0
        expected = expected or tokens
        same = sum(a == b for a, b in zip(tokens, expected))
        figures = ("-" if result[column] is None else f"{result[column]:.2f}" for column in COLUMNS)
        print(f"{name:<12}", *(f"{figure:>10}" for figure in figures), f" {same} of {len(tokens)}", flush=True)
        del cache


if __name__ == "__main__":
    main()
