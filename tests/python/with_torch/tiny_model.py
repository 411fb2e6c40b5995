"""A small random DeepSeek-V4 with the real head sizes, the same in every process; its cache, and what it says."""
import torch
from kv4.transformers import Kv4Cache
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

VOCABULARY = 96
EXACT = dict(row_format="bf16", index_format="bf16", hadamard=False)  # formats that change nothing


def tiny_model(index_topk=64):
    """All experts take part and few entries are left out: a small change of a row is a small change of the logits."""
    config = DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        head_dim=512, q_lora_rank=64, num_experts_per_tok=4, n_routed_experts=4, o_groups=2, o_lora_rank=32,
        index_n_heads=4, index_head_dim=128, index_topk=index_topk, sliding_window=128, max_position_embeddings=4096,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                     "compressed_sparse_attention"],
        mlp_layer_types=["moe"] * 4, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    torch.manual_seed(5)
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position_bias" in name or "sinks" in name:
                parameter.normal_(std=0.3)
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.normal_(std=0.05)
    return model


def random_tokens(*shape, seed=0, device="cpu"):
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def kv4_cache(model, **options):
    return Kv4Cache(model.config, model, **{"max_context": 512, **EXACT, **options})


def greedy(model, ids, count=4, **arguments):
    return model.generate(ids, max_new_tokens=count, do_sample=False, **arguments)
