"""The facts that kv4 reads of a model: its kind, the devices of its layers, the constants of its compressors."""
from __future__ import annotations

import json
from typing import Any

import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4Model

import kv4

#: Fields in which a config and the model's own must agree.
SHAPE = ("num_hidden_layers", "layer_types", "head_dim", "sliding_window", "index_head_dim", "compress_rates")


#: Of tensors without a value, and where those with one come from.
NO_VALUES = "on the meta device, and no hook of accelerate knows their values"
LOADED = "Load the model with from_pretrained(..., device_map=...)"


def whole_model(model: Any, call: str) -> DeepseekV4ForCausalLM:
    """The caller's DeepseekV4ForCausalLM, which torch.compile may have wrapped."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DeepseekV4ForCausalLM):
        return model
    hint = ": give the whole model, not its .model" if isinstance(model, DeepseekV4Model) else ""
    raise kv4.ArgumentError(f"{call} takes a DeepseekV4ForCausalLM; got a {type(model).__name__}{hint}")


def check_config(config: Any, model: DeepseekV4ForCausalLM) -> None:
    """Refuses a `config` that is not this model's or a copy of it."""
    for name in SHAPE:
        told, own = getattr(config, name, None), getattr(model.config, name)
        if told != own:
            raise kv4.ArgumentError(f"the config has {name} = {told}, the model {own}: give model.config")


def model_config(config: Any) -> kv4.ModelConfig:
    """kv4's ModelConfig from a DeepseekV4Config."""
    return kv4.parse_model_config(json.dumps(config.to_dict(), default=str))


def _read(module: Any, name: str) -> torch.Tensor:
    """The parameter, even if accelerate offloads it until its module runs."""
    tensor: torch.Tensor = getattr(module, name)
    kept = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    return kept[name] if tensor.is_meta and kept is not None else tensor


def _device_of(attention: Any) -> torch.device:
    """The device of its computation."""
    if attention.sinks.is_meta and getattr(attention, "_hf_hook", None) is not None:
        place = attention._hf_hook.execution_device
        return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return torch.device(attention.sinks.device)


def layer_devices(backbone: DeepseekV4Model) -> list[torch.device]:
    """The device of each layer's attention."""
    devices = [_device_of(layer.self_attn) for layer in backbone.layers]
    unread = [index for index, device in enumerate(devices)
              if device.type == "meta" or any(weight.is_meta for weight in _constants(backbone.layers[index].self_attn))]
    if unread:
        raise kv4.ArgumentError(f"the weights of layers {unread} are offloaded: they are {NO_VALUES}, of which kv4 needs the "
                                f"compressors' constants. {LOADED}")
    return devices


def _constant(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, torch.float32).contiguous()


def _constants(attention: Any) -> list[torch.Tensor]:
    """Constants of its compressor and indexer, if it has them."""
    compressor = attention.compressor
    parts = [part for part in (compressor, getattr(compressor, "indexer", None)) if part is not None]
    return [weight for part in parts for weight in (_read(part, "position_bias"), _read(part.kv_norm, "weight"))]


def layer_constants(attention: Any) -> list[torch.Tensor]:
    """bind_weights' arguments; none where the layer has no compressor."""
    device = _device_of(attention)
    return [_constant(weight, device) for weight in _constants(attention)]


def rope_table(backbone: DeepseekV4Model, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own cos and sin of CSA and HCA layers, float32 [length, rope_dim / 2]."""
    rotary = backbone.rotary_emb
    home = rotary.compress_inv_freq.device
    if home.type == "meta":
        if getattr(rotary, "_hf_hook", None) is None:
            raise kv4.ArgumentError(f"the model's rotary_emb is {NO_VALUES}. {LOADED}")
        home = device
    like = torch.empty(0, dtype=backbone.dtype, device=home)
    cos, sin = rotary(like, position_ids=torch.arange(length, device=home)[None], layer_type="compress")
    return _constant(cos[0], device), _constant(sin[0], device)
