"""Flash kernels in plain torch, behind the dispatch of transformers: which inputs reach which kernel, and how cut.

The kernels themselves need a GPU. What they promise is simple, and stated here: attention, causal or in a window, over
one sample (`flash_attn_func`) or over each stretch between two boundaries (`flash_attn_varlen_func`).
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import modeling_flash_attention_utils as flash


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """(B, L, heads, D) each."""
    assert dropout_p == 0
    heads = q.shape[2] // k.shape[2]
    q, k, v = (part.transpose(1, 2) for part in (q, k.repeat_interleave(heads, 2), v.repeat_interleave(heads, 2)))
    place = torch.arange(q.shape[2], device=q.device)
    back = place[:, None] - place[None, :]
    seen = torch.ones_like(back, dtype=torch.bool)
    if causal:
        seen &= back >= 0
    if window_size[0] >= 0:
        seen &= back <= window_size[0]
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale).transpose(1, 2)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    """(tokens, heads, D) each; boundaries int32, the longest stretch no longer than said, as the kernels ask for."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    bounds = cu_seqlens_q.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(q) == len(k)
    assert max(b - a for a, b in itertools.pairwise(bounds)) <= min(int(max_seqlen_q), int(max_seqlen_k))
    parts = [
        flash_attn_func(q[None, a:b], k[None, a:b], v[None, a:b], dropout_p, softmax_scale, causal, window_size)[0]
        for a, b in itertools.pairwise(bounds)
    ]
    return torch.cat(parts)


@contextmanager
def flash_kernels() -> Iterator[None]:
    """transformers finds these kernels where it looks for those of flash-attn."""
    before, flash._lazy_imports = flash._lazy_imports, lambda *args, **kwargs: _FOUND
    flash._loaded_implementation = None
    try:
        yield
    finally:
        flash._lazy_imports, flash._loaded_implementation = before, None


_FOUND = (flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input)
