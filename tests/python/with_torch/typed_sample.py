"""Checked by mypy --strict in test_typing.py; never run."""
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import kv4
import kv4.deep_gemm
import kv4.flash_mla
import kv4.torch
from kv4.transformers import Kv4Cache, accelerate, rewindable


def talk(path: Path, ids: torch.Tensor) -> int:
    model = accelerate(AutoModelForCausalLM.from_pretrained("deepseek-ai/DeepSeek-V4-Flash"))
    cache: Kv4Cache = Kv4Cache.for_generate(model, ids, {"max_new_tokens": 8}, row_format="bf16")
    other = Kv4Cache(model.config, model, max_batch=2, max_context=64, backend=kv4.make_cpu_backend(2))
    with rewindable(model) as same:
        print(same)
    cache.crop(-1)
    cache.save(path, kv4.SessionIdentity("weights"))
    tokens: torch.Tensor = other.token_ids()
    return len(tokens) + cache.get_seq_length() + cache.manager.num_requests() + sum(cache.requests)


def step(ids: list[int]) -> int:
    manager = kv4.KVCacheManager(kv4.model_preset("v4-flash"), kv4.CacheOptions(layers=[2, 3], max_requests=4))
    try:
        made = manager.prepare_forward([kv4.StepItem(manager.admit(), ids)])
    except kv4.ShortageError as error:
        print(error.shortage == kv4.Shortage.requests, error.code)
        raise
    manager.acquire(2).append(np.zeros((4, 512), np.float32))
    manager.commit(made)
    print(made)
    return kv4.NO_REQUEST


def kernels(q: torch.Tensor, pool: torch.Tensor, lists: torch.Tensor) -> int:
    out, lse = kv4.torch.attend(q, pool, lists, 0.1, lse_mode="rows")
    plan, none = kv4.flash_mla.get_mla_metadata()
    out, lse = kv4.flash_mla.flash_mla_with_kvcache(q, pool, None, None, 512, plan, none, indices=lists, out=out)
    scores: torch.Tensor = kv4.deep_gemm.fp8_paged_mqa_logits(q, pool, lse, lists, lists, None, 64)
    return len(out) + len(scores)
