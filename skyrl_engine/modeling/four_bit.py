"""Frozen linear layers whose weights are held in 4 bits, as QLoRA trains adapters over (Dettmers et al. 2023, arXiv 2305.14314, section 3).

Blocks of 64 numbers share a scale, their largest magnitude; each number is the nearest of 16 quantiles of a normal distribution, NF4
(appendix E). With double quantization the scales are held in 8 bits, less their mean, with a scale in float32 for 256 of them. A layer computes
with the weights that these codes stand for, in forward and backward alike; they are made anew each time and kept nowhere.
"""

import logging
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.model_facts.memory import FOUR_BIT_BLOCK, FOUR_BIT_SCALES
from skyrl_engine.modeling.low_bits import import_functional, list_code_values

logger = logging.getLogger(__name__)

_KIND: Final = "nf4"


class FourBitLinear(nn.Linear):
    """A frozen linear layer over codes of 4 bits. Its buffers are no part of a state dictionary: whoever loads the base model makes them again.

    `codes` uint8 [32 blocks], the last block filled up with zeros, `scales` float32 [blocks]; with double quantization `scales` are uint8
    [blocks], `scale_scales` float32 [blocks / 256] and `scale_mean` float32 []. `weight` [out, in] is made from them at each reading,
    float32, with the values of `computes_in`.
    """

    codes: Tensor
    scales: Tensor
    scale_scales: Tensor | None
    scale_mean: Tensor | None
    # in place of the parameter of nn.Linear
    weight = property(lambda self: self.dequantize().float())

    def __init__(self, linear: nn.Linear, computes_in: torch.dtype, *, double: bool) -> None:
        """Take the weights of `linear`, on its device; on the meta device only their shapes."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.computes_in = computes_in
        self.register_parameter("bias", linear.bias)
        made = (
            _shape_codes(linear.weight, double=double)
            if linear.weight.is_meta
            else _quantize(linear.weight.detach(), double=double)
        )
        for name in ("codes", "scales", "scale_scales", "scale_mean"):
            self.register_buffer(name, made.get(name), persistent=False)

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """Return the weights [out, in] that the layer computes with, in `computes_in`."""
        shape = (self.out_features, self.in_features)
        if self.codes.is_meta:
            return torch.empty(shape, dtype=self.computes_in, device="meta")
        library, nested = _import(), None
        if self.scale_scales is not None:
            values = list_code_values(self.codes.device, signed=True)
            nested = library.QuantState(absmax=self.scale_scales, code=values, blocksize=FOUR_BIT_SCALES, dtype=torch.float32)
        # as one row of numbers: on CPUs bitsandbytes 0.50 reads other numbers from a matrix whose rows are no whole blocks
        state = library.QuantState(
            absmax=self.scales,
            shape=torch.Size((2 * self.codes.numel(),)),
            dtype=self.computes_in,
            blocksize=FOUR_BIT_BLOCK,
            quant_type=_KIND,
            offset=self.scale_mean,
            state2=nested,
        )
        numbers: Tensor = library.dequantize_4bit(self.codes.view(-1, 1), state).view(-1)
        return numbers[: self.out_features * self.in_features].view(shape)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product [..., out] of `inputs` [..., in], in their dtype."""
        product: Tensor = _Product.apply(inputs, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """A product with weights that are made from their codes in both passes: none of them waits for the backward pass."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, layer: FourBitLinear) -> Tensor:
        context.layer = layer
        return functional.linear(inputs, layer.dequantize().to(inputs.dtype))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ context.layer.dequantize().to(gradient.dtype), None


def quantize_layers(model: Any, decoder: nn.Module, spec: ModelConfig) -> None:
    """Hold the linear layers of `decoder`, a part of `model`, in 4 bits, in place and one after the other; on the meta device their shapes.

    Embeddings, heads, routers, experts that are one tensor, and layers of other classes stay as they are. Raises ModelError for a decoder
    without linear layers, and UnsupportedError without bitsandbytes or in float64, which it does not know.
    """
    assert spec.lora is not None
    check_four_bit_settings(spec)
    _import()
    inside = {id(module) for module in decoder.modules()}
    names = [name for name, module in model.named_modules() if id(module) in inside and _is_plain_linear(module)]
    found = 0
    for name in names:
        owner, _, key = name.rpartition(".")
        layer = FourBitLinear(model.get_submodule(name), getattr(torch, spec.dtype), double=spec.lora.double_quantization)
        setattr(model.get_submodule(owner), key, layer)
        found += layer.in_features * layer.out_features
    if not found:
        raise ModelError(
            f"model.lora.load_in_4bit is set, and the decoder of {spec.path} ({type(model).__name__}) has no linear layers to hold in 4 bits",
            remedy="Remove model.lora.load_in_4bit",
        )
    rest = sum(parameter.numel() for parameter in model.parameters())
    logger.info("%s: %d of %d numbers are held in 4 bits", spec.path, found, found + rest)


def check_four_bit_settings(spec: ModelConfig) -> None:
    """Raises UnsupportedError for settings that do not go with weights in 4 bits."""
    if spec.lora is None or not spec.lora.load_in_4bit:
        return
    if spec.dtype == "float64":
        raise UnsupportedError(
            'model.lora.load_in_4bit computes in float32 or bfloat16, and model.dtype is "float64"',
            remedy='Set model.dtype = "float32" or "bfloat16", or remove model.lora.load_in_4bit',
        )
    if spec.compile:
        raise UnsupportedError(
            "model.compile = true, and layers that are held in 4 bits (model.lora.load_in_4bit) are not compiled",
            remedy="Set model.compile = false, or remove model.lora.load_in_4bit",
        )


def refuse_four_bit_layers(spec: ModelConfig, backend: str) -> None:
    """Raises UnsupportedError for layers in 4 bits, on behalf of a backend that does not hold them."""
    if spec.lora is not None and spec.lora.load_in_4bit:
        raise UnsupportedError(
            f"the {backend} backend does not hold linear layers in 4 bits (model.lora.load_in_4bit)",
            remedy='Remove model.lora.load_in_4bit, or set backend.use = "fsdp"',
        )


def list_four_bit_layers(model: nn.Module) -> list[tuple[str, FourBitLinear]]:
    """List the layers in 4 bits by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FourBitLinear)]


def _is_plain_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _quantize(weight: Tensor, *, double: bool) -> dict[str, Tensor]:
    # whole blocks: bitsandbytes compiles a program of its own for each odd count of numbers
    numbers = functional.pad(weight.float().reshape(-1), (0, -weight.numel() % FOUR_BIT_BLOCK))
    codes, state = _import().quantize_4bit(numbers, blocksize=FOUR_BIT_BLOCK, quant_type=_KIND, compress_statistics=double)
    made = {"codes": codes.view(-1), "scales": state.absmax}
    return made | ({"scale_scales": state.state2.absmax, "scale_mean": state.offset} if double else {})


def _shape_codes(weight: Tensor, *, double: bool) -> dict[str, Tensor]:
    blocks = -(-weight.numel() // FOUR_BIT_BLOCK)
    made = {
        "codes": torch.empty(blocks * FOUR_BIT_BLOCK // 2, dtype=torch.uint8, device="meta"),
        "scales": torch.empty(blocks, dtype=torch.uint8 if double else torch.float32, device="meta"),
    }
    if double:
        made["scale_scales"] = torch.empty(-(-blocks // FOUR_BIT_SCALES), dtype=torch.float32, device="meta")
        made["scale_mean"] = torch.empty((), dtype=torch.float32, device="meta")
    return made


def _import() -> Any:
    return import_functional("model.lora.load_in_4bit", "remove model.lora.load_in_4bit")
