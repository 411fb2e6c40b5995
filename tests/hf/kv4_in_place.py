"""A pytest plugin: transformers' own tests of DeepSeek-V4 with a Kv4Cache wherever they would get a DynamicCache.

KV4_HF_WAY      stock: no change; unmodified: a Kv4Cache; accelerated: the same, and attention by kv4
KV4_HF_RESULTS  file for the outcomes, a JSON object {test: "passed", "failed" or "skipped"}

Caches that tests make and pass themselves are not replaced. Rows and keys are bf16, the widest format.
"""
import functools
import json
import os
from types import SimpleNamespace

WAY = os.environ.get("KV4_HF_WAY", "stock")
OPTIONS = dict(max_batch=1, max_context=32, row_format="bf16", index_format="bf16", hadamard=False, grow=True)
outcomes = {}


def pytest_configure(config):
    if WAY != "stock":
        put_in_place()


def pytest_runtest_logreport(report):
    order = ["skipped", "passed", "failed"]  # a test is as bad as its worst part
    if report.when == "call" or report.outcome != "passed":
        worst = max(order.index(report.outcome), order.index(outcomes.get(report.nodeid, "skipped")))
        outcomes[report.nodeid] = order[worst]


def pytest_unconfigure(config):
    path = os.environ.get("KV4_HF_RESULTS")
    if path and not hasattr(config, "workerinput"):
        with open(path, "w") as file:
            json.dump(outcomes, file, indent=1)


def put_in_place():
    from kv4.transformers import attention, cache as kv4_cache, hooks
    from transformers import DynamicCache
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4Model

    strict = kv4_cache.whole_model

    def whole_model(model, call):
        """Tests also run the DeepseekV4Model alone, for which Kv4Cache refuses to be made."""
        return SimpleNamespace(model=model, config=model.config) if isinstance(model, DeepseekV4Model) else strict(model, call)

    kv4_cache.whole_model = attention.whole_model = whole_model

    def new_cache(model):
        if WAY == "accelerated":
            attention.accelerate(model)
        return kv4_cache.Kv4Cache(model.config, model, **OPTIONS)

    call = DeepseekV4Model.__call__

    @functools.wraps(call)
    def call_with_cache(self, *args, **kwargs):
        kwargs.update(zip(hooks.FORWARD_ARGUMENTS, args))
        use_cache = kwargs.get("use_cache")
        checkpoints = self.training and self.is_gradient_checkpointing  # where the model turns caches off itself
        if kwargs.get("past_key_values") is None and not checkpoints and (self.config.use_cache if use_cache is None else use_cache):
            kwargs["past_key_values"] = new_cache(self)
        return call(self, **kwargs)

    prepare = DeepseekV4ForCausalLM._prepare_cache_for_generation

    @functools.wraps(prepare)
    def prepare_cache(self, generation_config, model_kwargs, *args, **kwargs):
        result = prepare(self, generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get("past_key_values")
        if type(made) is DynamicCache and not made.offloading and made.get_seq_length() == 0:
            model_kwargs["past_key_values"] = new_cache(self)
        return result

    DeepseekV4Model.__call__ = call_with_cache
    DeepseekV4ForCausalLM._prepare_cache_for_generation = prepare_cache
