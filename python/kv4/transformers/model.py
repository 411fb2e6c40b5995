"""What kv4 reads of a model: which one it is, where its layers are, the constants of its compressors."""
from __future__ import annotations

import json
from typing import Any

import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4Model

import kv4

#: What a config and the model's own must agree in.
SHAPE = ("num_hidden_layers", "layer_types", "head_dim", "sliding_window", "index_head_dim", "compress_rates")


def whole_model(model: Any, call: str) -> DeepseekV4ForCausalLM:
    """The DeepseekV4ForCausalLM that a caller means, which torch.compile may have wrapped."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DeepseekV4ForCausalLM):
        return model
    hint = ": give the whole model, not its .model" if isinstance(model, DeepseekV4Model) else ""
    raise kv4.ArgumentError(f"{call} takes a DeepseekV4ForCausalLM; got a {type(model).__name__}{hint}")


def check_config(config: Any, model: DeepseekV4ForCausalLM) -> None:
    """`config` may be a copy, but of this model."""
    for name in SHAPE:
        told, own = getattr(config, name, None), getattr(model.config, name)
        if told != own:
            raise kv4.ArgumentError(f"the config has {name} = {told}, the model {own}: give model.config")


def model_config(config: Any) -> kv4.ModelConfig:
    """kv4's ModelConfig from a DeepseekV4Config."""
    return kv4.parse_model_config(json.dumps(config.to_dict(), default=str))


def layer_devices(backbone: DeepseekV4Model) -> list[torch.device]:
    """By layer: where its attention is."""
    devices = [layer.self_attn.sinks.device for layer in backbone.layers]
    offloaded = [index for index, device in enumerate(devices) if device.type == "meta"]
    if offloaded:
        raise kv4.ArgumentError(
            f"the weights of layers {offloaded} are offloaded (on the meta device), where kv4 cannot read their compressors' "
            "constants: load the model with a device_map that puts every layer on a CPU or a GPU, without 'disk' and without "
            "offloading from a GPU to the CPU")
    return devices


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32).contiguous()


def layer_constants(backbone: DeepseekV4Model) -> dict[int, list[torch.Tensor]]:
    """By layer with a compressor: bind_weights' arguments."""
    constants = {}
    for layer in backbone.layers:
        compressor = layer.self_attn.compressor
        if compressor is None:
            continue
        weights = [compressor.position_bias, compressor.kv_norm.weight]
        if hasattr(compressor, "indexer"):
            weights += [compressor.indexer.position_bias, compressor.indexer.kv_norm.weight]
        constants[layer.self_attn.layer_idx] = [_constant(weight) for weight in weights]
    return constants


def rope_table(backbone: DeepseekV4Model, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own cos and sin of CSA and HCA layers, float32 [length, rope_dim / 2]."""
    rotary = backbone.rotary_emb
    home = rotary.compress_inv_freq.device
    like = torch.empty(0, dtype=backbone.dtype, device=home)
    cos, sin = rotary(like, position_ids=torch.arange(length, device=home)[None], layer_type="compress")
    return _constant(cos[0].to(device)), _constant(sin[0].to(device))
