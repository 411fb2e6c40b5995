#!/usr/bin/env python3
"""Greedy generation by a random DeepSeek-V4 of transformers after a long prompt: stock cache, Kv4Cache, and accelerated.

    python examples/transformers_generate.py --device cuda --dtype bfloat16 --context 32768

Prints milliseconds per generated token and, on a GPU, the peak of memory beside the weights.
"""
import argparse
import time

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from kv4.transformers import Kv4Cache, accelerate


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


class Memory:
    """The peak beside what was there before; kv4 allocates outside of torch, so it is asked of the device."""

    def __init__(self, device):
        self.on_gpu = device == "cuda"
        self.before = self.used()
        self.peak = 0

    def used(self):
        if not self.on_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def look(self):
        self.peak = max(self.peak, self.used() - self.before)


@torch.no_grad()
def generate(model, cache, prompt, options, memory):
    """The tokens chosen and milliseconds per token, prefill not counted."""
    for part in torch.split(prompt, options.chunk, dim=1):
        logits = model(part, past_key_values=cache, logits_to_keep=1).logits
        memory.look()
    tokens, start = [], time.monotonic()
    for _ in range(options.tokens):
        following = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(following.item())
        logits = model(following, past_key_values=cache).logits
    memory.look()
    logits.sum().item()  # waits
    return tokens, 1000 * (time.monotonic() - start) / options.tokens


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
    ways = {
        "stock": lambda: DynamicCache(config=model.config),
        "kv4": lambda: Kv4Cache(model.config, model, max_context=options.context + options.tokens, max_step_tokens=options.chunk),
    }
    ways["accelerated"] = ways["kv4"]
    print(f"{'cache':<12} {'ms/token':>9} {'peak MB':>9}  same tokens as the stock cache")
    expected = None
    for name, make_cache in ways.items():
        if name == "accelerated":
            accelerate(model)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        memory = Memory(options.device)
        cache = make_cache()
        tokens, milliseconds = generate(model, cache, prompt, options, memory)
        expected = expected or tokens
        same = sum(a == b for a, b in zip(tokens, expected))
        print(f"{name:<12} {milliseconds:9.2f} {memory.peak / 1e6:9.1f}  {same} of {options.tokens}")
        del cache


if __name__ == "__main__":
    main()
