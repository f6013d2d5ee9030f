"""A plain model of who owns which block, and who has locked which entry of the prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sglang.srt.mem_cache.radix_cache import TreeNode

from sgl_kvc.cache.request import Request
from tests.sgl_kvc.lives import PAGE, World


def check(world: World) -> None:
    """Every block is free, the tree's, or one request's own; what is read of the tree is locked.

    By nothing but lists: the rows, the tree's nodes and the free list are compared with each other,
    and with what SGLang counts.
    """
    cache = world.cache
    nodes = list(_below(cache.root_node))
    slots = {node.id: node.value.tolist() for node in nodes}
    blocks = [slot // PAGE for mine in slots.values() for slot in mine[::PAGE]]
    locks, readers, own_tokens = Counter[int](), Counter[int](), 0
    rows = world.requests.req_to_token.tolist()
    for req in world.live:
        row, segment = rows[req.req_pool_idx], Request.of(req).segment
        path = list(_up_to_root(req.last_node))
        locks.update(node.id for node in path)
        locked = [slot for node in reversed(path) for slot in slots[node.id]]
        read = row[: req.cache_protected_len]
        if segment is not None:
            read = row[: segment.begin] + row[segment.row_begin : req.cache_protected_len]
        assert read == locked, "what it reads of the tree is not what it has locked"
        own = row[req.cache_protected_len : req.kv.kv_allocated_len]
        blocks += [slot // PAGE for slot in own[::PAGE]]
        own_tokens += -(-len(own) // PAGE) * PAGE
        if Request.of(req).stored is not None:
            readers[Request.of(req).stored.marker] += 1
    for pin in cache.pins._pins.values():
        locks.update(node.id for node in _up_to_root(pin.node))
    blocks += world.allocator.free_pages.tolist()
    assert sorted(blocks) == list(range(1, world.tokens // PAGE + 1)), "of two, or of nobody"
    assert {node.id: node.lock_ref for node in nodes if node.lock_ref} == locks
    sizes = Counter[bool]()
    for node in nodes:
        sizes[locks[node.id] > 0] += len(node.value)
    assert (cache.protected_size(), cache.evictable_size()) == (sizes[True], sizes[False])
    free = world.allocator.available_size()
    assert free + sizes[True] + sizes[False] + own_tokens == world.tokens
    assert {each.marker: each.readers for each in cache.segments if each.readers} == readers
    holders = Counter[object]()
    for req in world.live:
        holders.update(Request.of(req).block_digests)
    assert cache.sharing.holders == holders


def _below(node: TreeNode) -> Iterator[TreeNode]:
    for child in node.children.values():
        yield child
        yield from _below(child)


def _up_to_root(node: TreeNode) -> Iterator[TreeNode]:
    """`node` and all above it but the root."""
    while node.parent is not None:
        yield node
        node = node.parent
