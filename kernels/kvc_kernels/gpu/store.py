"""Write new keys and values into their slots, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Elements of keys (or values) that a program writes: heads of one token.
_TILE = 2048


@triton.jit
def _write_heads(
    target, source, head_stride, head,
    H: tl.constexpr, P: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy one token's rows of D from `source`, `head_stride` apart, to its head pages."""
    dim = tl.arange(0, WIDTH)
    valid = (head < H)[:, None] & (dim < D)[None, :]
    new = tl.load(source + head[:, None] * head_stride + dim[None, :], mask=valid)
    tl.store(
        target + head[:, None] * (P * D) + dim[None, :], new.to(target.dtype.element_ty), mask=valid
    )


# Slices of the engine's slots begin anywhere: their alignment must not choose among binaries.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kernel(
    layer_k, layer_v, layer_metric, slots, keys, values,
    k_block, v_block, metric_block, key_token, key_head, value_token, value_head,
    H: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """One program writes `HEADS` heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots + token).to(tl.int64)
    block, offset = slot // P, slot % P
    into_k, into_v = layer_k + block * k_block + offset * D, layer_v + block * v_block + offset * DV
    _write_heads(into_k, keys + token * key_token, key_head, head, H, P, D, WIDTH)
    _write_heads(into_v, values + token * value_token, value_head, head, H, P, DV, WIDTH_V)
    if layer_metric is not None:
        begin = layer_metric + block * metric_block + offset
        tl.store(begin + head * P, tl.zeros([HEADS], tl.float32), mask=head < H)


def store(
    layer_k: torch.Tensor,
    layer_v: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer_metric: torch.Tensor | None = None,
) -> None:
    """Write one layer's new keys and values at `slots`; the metric of a new KV begins at zero.

    Parameters
    ----------
    layer_k, layer_v : [num_blocks, H, P, D] and [num_blocks, H, P, Dv], views of the arenas
        (``arena.unbind(1)``); written. Values are cast to their type; one too large for fp8
        becomes the largest there is (from sm_89 on), where torch makes it NaN or infinite.
    slots : int64 or int32 [n], each a slot that there is; of equal ones any wins.
    keys, values : [n, H, D] and [n, H, Dv], of any float type, or of the arena's own type if that
        is an integer's (fp8 held as bytes); the last dimension is contiguous.
    layer_metric : float32 [num_blocks, H, P], a view likewise; zeroed at `slots`.

    Raises
    ------
    ValueError : on shapes, strides or types that do not fit together.
    """
    _check(layer_k, keys, slots, "keys")
    _check(layer_v, values, slots, "values")
    heads, page_size, dim = layer_k.shape[1:]
    dim_v = layer_v.shape[-1]
    if layer_v.shape[:-1] != layer_k.shape[:-1]:
        raise ValueError("layer_k and layer_v differ in blocks, heads or page size")
    if layer_metric is not None and (
        layer_metric.shape != layer_k.shape[:-1]
        or layer_metric.stride()[1:] != (page_size, 1)
        or layer_metric.dtype != torch.float32
    ):
        raise ValueError("layer_metric is not a layer of a float32 [num_blocks, L, H, P]")
    if len(slots) == 0:
        return
    width, width_v = triton.next_power_of_2(dim), triton.next_power_of_2(dim_v)
    at_once = min(triton.next_power_of_2(heads), max(1, _TILE // max(width, width_v)))
    _store_kernel[(len(slots), triton.cdiv(heads, at_once))](
        layer_k, layer_v, layer_metric, slots, keys, values,
        layer_k.stride(0), layer_v.stride(0),
        0 if layer_metric is None else layer_metric.stride(0),
        *keys.stride()[:2], *values.stride()[:2],
        H=heads, P=page_size, D=dim, DV=dim_v, HEADS=at_once, WIDTH=width, WIDTH_V=width_v,
    )  # fmt: skip


def _check(layer: torch.Tensor, new: torch.Tensor, slots: torch.Tensor, name: str) -> None:
    """Raise ValueError unless `new` can be written to `layer` at `slots`."""
    _, heads, page_size, dim = layer.shape
    if layer.stride()[1:] != (page_size * dim, dim, 1):
        raise ValueError(f"{name}: not written to a layer of a contiguous [num_blocks, L, H, P, D]")
    if slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
        raise ValueError(f"slots are {slots.dtype}; contiguous int64 or int32 is needed")
    if new.shape != (len(slots), heads, dim):
        raise ValueError(f"{name} are {list(new.shape)}, not {[len(slots), heads, dim]}")
    if new.stride(-1) != 1 and dim > 1:
        raise ValueError(f"{name} are not contiguous in their last dimension")
    if new.dtype != layer.dtype and not (
        new.dtype.is_floating_point and layer.dtype.is_floating_point
    ):
        raise ValueError(f"{name} of {new.dtype} cannot be cast to a cache of {layer.dtype}")
