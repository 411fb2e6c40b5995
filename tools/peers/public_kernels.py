"""The public kernels that can be imported here, or the reasons why not."""
import importlib
import sys
from dataclasses import dataclass


class NotHere(Exception):
    """A public kernel that cannot be imported or refuses this GPU."""


# The wanted names and their possible modules: the first module with the name is used.
WANTED = {
    "flash_mla_with_kvcache": ("flash_mla", "sgl_flash_mla", "sgl_kernel.flash_mla",
                               "vllm.third_party.flashmla.flash_mla_interface"),
    "flash_mla_sparse_fwd": ("flash_mla", "sgl_flash_mla", "sgl_kernel.flash_mla",
                             "vllm.third_party.flashmla.flash_mla_interface"),
    "fp8_paged_mqa_logits": ("deep_gemm", "sgl_deep_gemm", "vllm.third_party.deep_gemm"),
    "fp8_mqa_logits": ("deep_gemm", "sgl_deep_gemm", "vllm.third_party.deep_gemm"),
    "topk_transform_512_v2": ("sglang.kernels.ops.attention.dsv4.topk",),
    "topk_transform_ragged_v2": ("sglang.kernels.ops.attention.dsv4.topk",),
    "topk_transform_512": ("sglang.kernels.ops.attention.dsv4.topk",),
    "top_k_per_row_decode": ("vllm._custom_ops",),
    "top_k_per_row_prefill": ("vllm._custom_ops",),
    "cp_gather_indexer_k_quant_cache": ("vllm._custom_ops",),
    "dequantize_and_gather_k_cache": ("vllm.models.deepseek_v4.common.ops.cache_utils",
                                      "vllm.v1.attention.ops.deepseek_v4_ops.cache_utils"),
}
# Replacements in newer packages.
ALIASES = {"fp8_paged_mqa_logits": "fp8_fp4_paged_mqa_logits", "fp8_mqa_logits": "fp8_fp4_mqa_logits"}


@dataclass
class Peer:
    """A public function, or the reason why it is missing."""

    name: str
    module: object = None
    call: object = None
    why: str = ""

    @property
    def label(self):
        return f"{self.module.__name__.split('.')[0]}.{self.call.__name__}" if self.call else self.name

    def need(self):
        if self.call is None:
            raise NotHere(f"{self.name}: {self.why}")
        return self.call


def find_peer(name):
    reasons = []
    for module_name in WANTED[name]:
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # without its GPU or library, a package may fail in any way
            reasons.append(f"{module_name}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        for attribute in (name, ALIASES.get(name)):
            call = getattr(module, attribute, None) if attribute else None
            if callable(call):
                return Peer(name, module, call)
        reasons.append(f"{module_name} has no {name}")
    return Peer(name, why="; ".join(reasons))


def find_peers():
    return {name: find_peer(name) for name in WANTED}


def version_of(module):
    package = sys.modules.get(module.__name__.split(".")[0], module)
    return str(getattr(package, "__version__", "of unknown version"))


def first_that_works(name, attempts):
    """The first of several ways to call a function whose arguments differ between versions."""
    errors = []
    for attempt in attempts:
        try:
            return attempt, attempt()
        except (TypeError, RuntimeError, AssertionError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    raise NotHere(f"{name}: no known way to call it works: " + "; ".join(dict.fromkeys(errors)))


def in_words(error):
    return (str(error) if isinstance(error, NotHere) else f"{type(error).__name__}: {error}").splitlines()[0]
