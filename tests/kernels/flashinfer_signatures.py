"""Signatures of `BatchPrefillWithPagedKVCacheWrapper` in each FlashInfer that was read."""

import inspect
from dataclasses import dataclass

_INIT = (
    "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
    "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, "
    "custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None"
)
_PLAN_START = (
    "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, "
    "head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, "
    "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, "
    "logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None"
)
_PLAN_END = (
    "non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, "
    "max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, "
    "max_sequence_kv=None"
)
_RUN_START = (
    "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, "
    "return_lse=False"
)
RESET = "self, float_workspace_buffer, int_workspace_buffer"
"""`reset_workspace_buffer`, the same in all."""


@dataclass(frozen=True, slots=True)
class Recorded:
    name: str
    version: str
    init: str
    plan: str
    run: str
    refused: tuple[str, ...] = ()
    """Arguments of `plan` that are declared, but raise NotImplementedError unless left at their defaults."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


UPSTREAM = Recorded(
    name="flashinfer-python",
    version="0.7.2.post1",
    init=f"{_INIT}, variant_owns_mask=False",
    plan=(
        f"{_PLAN_START}, o_data_type=None, {_PLAN_END}, fixed_split_size=None, disable_split_kv=False, "
        "uniform_q_len=None"
    ),
    run=(
        f"{_RUN_START}, lse_base='log2', lse_layout='NH', enable_pdl=None, window_left=None, sinks=None, "
        "kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, "
        "uses_spcompress=None"
    ),
)
PORT = Recorded(
    name="amd-flashinfer",
    version="0.5.3+amd.2",
    init=_INIT,
    plan=f"{_PLAN_START}, {_PLAN_END}",
    run=f"{_RUN_START}, enable_pdl=None, window_left=None, sinks=None",
)
PORT_MAIN = Recorded(
    name="amd-flashinfer",
    version="0.5.3.post1",  # the main branch at 05005763; it has no release
    init=_INIT,
    plan=f"{_PLAN_START}, o_data_type=None, {_PLAN_END}, fixed_split_size=None, disable_split_kv=False",
    run=f"{_RUN_START}, enable_pdl=None, window_left=None, sinks=None",
    refused=("fixed_split_size", "disable_split_kv"),
)
ALL = (UPSTREAM, PORT, PORT_MAIN)


def signature(text: str) -> inspect.Signature:
    """The signature that Python would write like this."""
    return inspect.signature(eval(f"lambda {text}: None"))
