"""Checksums of tensors, the same as `skyrl_engine_vllm_server.checksums` computes beside vLLM."""

import torch

_CHUNK = 1 << 22
_MULTIPLIER = 2654435761
_MASK = (1 << 64) - 1


def checksum_of(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's bytes, shape and dtype: two sums, of its words and of its words times their places, modulo 2^64."""
    data = tensor.detach().contiguous()
    words = data.view(-1).view(
        torch.int32 if data.element_size() % 4 == 0 else torch.int16 if data.element_size() == 2 else torch.uint8
    )
    plain, placed = 0, 0
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64)
        plain += int(part.sum())
        placed += int((part * (places * _MULTIPLIER + 1)).sum())
    return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}:{plain & _MASK:016x}{placed & _MASK:016x}"
