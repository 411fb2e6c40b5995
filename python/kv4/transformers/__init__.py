"""transformers' DeepSeek-V4 with its cache in kv4.

    cache = Kv4Cache.for_generate(model, input_ids, generation_config)
    model.generate(input_ids, generation_config, past_key_values=cache)    # the model is unchanged

    accelerate(model)                 # the same, with attention by kv4's append, index_topk and attend

A row of the batch is a request. Windows, compressor rows, entries and index keys live in kv4. A forward is a step, and
is committed after the last layer. Needs torch, and transformers from 5.17 on.
"""
from . import requirements  # noqa: F401  first: it reports missing or old packages
from .attention import accelerate
from .cache import Kv4Cache, rewindable

__all__ = ["Kv4Cache", "accelerate", "rewindable"]
