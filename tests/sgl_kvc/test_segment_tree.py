"""Segments in SGLang's radix tree against a plain model: who owns which block, and who goes first.

The model is a list of entries, each with its blocks, its parent, how many hold it and when it was
last used. The tree's own nodes are not looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from array import array

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.segments import Namespace
from sgl_kvc.pool.segment import Segment
from sgl_kvc.spec import chained_digests, parse
from tests import tiny_models
from tests.sgl_kvc.lives import HEADS, LAYERS, PAGE, World

BLOCKS = 48
SPECS = [parse({"rate": rate, "min_tokens": 0}) for rate in (2, 4)]
TENANTS = [None, "tenant"]


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


@dataclasses.dataclass(eq=False)
class Entry:
    """What the tree should have: `blocks` behind those of `parent`."""

    blocks: list[int]
    parent: Entry | None
    used: int = 0
    held: int = 0

    def path(self) -> list[Entry]:
        """From the root on."""
        return [*(self.parent.path() if self.parent else ()), self]


class Trees(RuleBasedStateMachine):
    """Documents `family`, of one to five blocks, each the beginning of the longer ones.

    Entries are named: ("head", tenant, family) is the first block as it is, ("body", ...) the rest;
    ("segment", namespace, family, blocks) and ("tail", ..., first token) are what is stored of it.
    """

    @initialize()
    def build(self):
        self.world = World(BLOCKS)
        self.cache = self.world.cache
        self.entries: dict[tuple, Entry] = {}
        self.holders: list[tuple] = []  # (tree node, entry)
        self.time = 0

    # ----------------------------------------------------------------------- the model

    def touch(self, entry: Entry) -> None:
        self.time += 1
        for each in entry.path():
            each.used = self.time

    def goes_first(self) -> list[Entry]:
        """Entries that may be evicted, the first one first."""
        parents = {id(entry.parent) for entry in self.entries.values()}
        free = [e for e in self.entries.values() if not e.held and id(e) not in parents]
        return sorted(free, key=lambda entry: entry.used)

    def model_evicts(self, blocks: int) -> None:
        freed = 0
        while freed < blocks and (free := self.goes_first()):
            freed += len(free[0].blocks)
            name = next(name for name, entry in self.entries.items() if entry is free[0])
            del self.entries[name]

    def blocks(self, number: int) -> torch.Tensor | None:
        """Slots of new blocks; what has to go for them goes from the model too."""
        short = number - self.world.allocator.available_size() // PAGE
        slots = self.cache.allocate(number * PAGE)
        if slots is not None:
            self.model_evicts(short)
        return slots

    def add(self, name: tuple, slots: torch.Tensor, parent: Entry | None) -> Entry:
        found = self.entries.get(name)
        if found is None:
            found = self.entries[name] = Entry((slots[::PAGE] // PAGE).tolist(), parent)
        self.touch(found)
        return found

    def hold(self, node, entry: Entry) -> None:
        self.cache.inc_lock_ref(node)
        self.holders.append((node, entry))
        for each in entry.path():
            each.held += 1

    # ------------------------------------------------------------------ what can happen

    def document(self, family: int, blocks: int) -> array:
        return array("q", range(1000 * family, 1000 * family + blocks * PAGE))

    @rule(family=st.integers(1, 2), tenant=st.sampled_from(TENANTS), body=st.booleans())
    def plain(self, family, tenant, body):
        """Somebody has read a document as it is: its first block, or five."""
        parent = self.entries.get(("head", tenant, family))
        parts = [("head", 1)] + [("body", 5)] * body
        for kind, blocks in parts:
            name = (kind, tenant, family)
            key = RadixKey(self.document(family, blocks), tenant)
            known = self.cache.match_prefix(MatchPrefixParams(key=key)).device_indices
            for each in ("head", "body"):
                if (each, tenant, family) in self.entries and (each == "head" or kind == "body"):
                    self.touch(self.entries[each, tenant, family])
            if name in self.entries:
                assert len(known) == blocks * PAGE
                continue
            new = blocks - len(known) // PAGE
            with self.held(parent, key, len(known)):
                slots = self.blocks(new)
            if slots is None:
                return
            value = torch.cat([known, slots])
            assert self.cache.insert(InsertParams(key=key, value=value)).prefix_len == len(known)
            parent = self.add(name, slots, parent if kind == "body" else None)

    @rule(
        family=st.integers(1, 2),
        blocks=st.integers(2, 5),
        tenant=st.sampled_from(TENANTS),
        spec=st.sampled_from(SPECS),
        whole=st.booleans(),
        hold=st.booleans(),
    )
    def store(self, family, blocks, tenant, spec, whole, hold):
        """Somebody has compressed a document, its first block kept as it is (`whole`) or not."""
        begin = PAGE if whole else 0
        namespace, tokens = Namespace(tenant, begin, spec.shape), self.document(family, blocks)
        name, digests = ("segment", namespace, family, blocks), chained_digests(tokens, None, PAGE)
        if name in self.entries:
            return
        if whole:
            self.plain(family, tenant, body=False)
        parent = self.entries.get(("head", tenant, family)) if whole else None
        if whole and parent is None:
            return
        size = spec.blocks_for(blocks - whole, PAGE)
        with self.held(parent, RadixKey(tokens, tenant), begin):
            slots = self.blocks(size)
            if slots is None:
                return
            pages = torch.full((LAYERS * HEADS,), size)
            segment = Segment(begin, blocks * PAGE, slots, pages, PAGE, spec)
            prefix = torch.tensor(parent.blocks if parent else [], dtype=torch.int64) * PAGE
            prefix = (prefix[:, None] + torch.arange(PAGE)).flatten()
            stored = self.cache.put_segment(namespace, tokens, digests, segment, prefix)
        entry = self.add(name, slots, parent)
        if hold:
            self.hold(self.cache.match_behind(stored, RadixKey(tokens)).last_device_node, entry)
            self.touch(entry)

    @rule(
        family=st.integers(1, 3),
        blocks=st.integers(1, 6),
        limit=st.integers(0, 7),
        tenant=st.sampled_from(TENANTS),
        spec=st.sampled_from(SPECS),
        begin=st.sampled_from([0, PAGE]),
        tail=st.integers(0, 2),
        question=st.integers(7001, 7003),
        insert=st.booleans(),
        hold=st.booleans(),
    )
    def ask(self, family, blocks, limit, tenant, spec, begin, tail, question, insert, hold):
        """Somebody comes with a document and `tail` blocks of a question."""
        namespace, document = Namespace(tenant, begin, spec.shape), self.document(family, blocks)
        tokens = document + array("q", [10 * question + tail] * (tail * PAGE))
        found = self.cache.segments.find(
            namespace, tokens, chained_digests(tokens, None, PAGE), limit * PAGE
        )
        expected = [
            name for name in self.entries
            if name[:3] == ("segment", namespace, family) and name[3] <= min(blocks, limit)
        ]
        assert (found is None) == (not expected)
        if found is None:
            return
        name = max(expected, key=lambda each: each[3])
        entry = self.entries[name]
        assert found.segment.end == name[3] * PAGE
        assert found.tokens == tokens[: found.segment.end]
        rest = tokens[found.segment.end :]
        behind = self.entries.get(("tail", name, tuple(rest)))
        match = self.cache.match_behind(found, RadixKey(tokens, tenant))
        last = behind or entry
        self.touch(last)
        row = match.device_indices
        assert len(row) == found.segment.end + (len(rest) if behind else 0)
        held = [block for each in last.path() for block in each.blocks]
        assert found.to_tree(row)[::PAGE].tolist() == [block * PAGE for block in held]
        assert not row[found.segment.begin : found.segment.row_begin].any()
        node = match.last_device_node
        # Questions begin with a token of their own, so that no node is split.
        if insert and rest and behind is None and blocks == name[3]:
            with self.locked(node, last):
                slots = self.blocks(len(rest) // PAGE)
            if slots is not None:
                value = found.to_tree(torch.cat([row, slots]))
                done = self.cache.insert(InsertParams(key=found.key(tokens), value=value))
                assert done.prefix_len == found.segment.end - found.gap
                node = done.last_device_node
                last = self.add(("tail", name, tuple(rest)), slots, entry)
        if hold:
            self.hold(node, last)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 100))
    def let_go(self, which):
        node, entry = self.holders.pop(which % len(self.holders))
        self.cache.dec_lock_ref(node)
        for each in entry.path():
            each.held -= 1

    @rule(blocks=st.integers(1, 6))
    def evict(self, blocks):
        self.cache.evict(EvictParams(num_tokens=blocks * PAGE))
        self.model_evicts(blocks)

    @rule()
    def flush(self):
        if not self.holders:
            self.cache.reset()
            self.world.allocator.clear()
            self.entries.clear()

    # ----------------------------------------------------------------- what always holds

    @invariant()
    def sizes(self):
        if not hasattr(self, "world"):
            return
        cache, entries = self.cache, self.entries.values()
        blocks = {held: [e for e in entries if bool(e.held) is held] for held in (True, False)}
        size = {held: sum(len(e.blocks) for e in each) * PAGE for held, each in blocks.items()}
        assert cache.protected_size() == size[True]
        assert cache.evictable_size() == size[False]
        assert cache.total_size() == size[True] + size[False]
        free = self.world.allocator.available_size()
        assert free + size[True] + size[False] == self.world.tokens

    @invariant()
    def blocks_have_one_owner(self):
        if not hasattr(self, "world"):
            return
        tree = self.cache.all_values_flatten().tolist()[::PAGE] if self.entries else []
        expected = [block * PAGE for entry in self.entries.values() for block in entry.blocks]
        assert sorted(tree) == sorted(expected)
        free = [block * PAGE for block in self.world.allocator.free_pages.tolist()]
        assert len({*free, *tree}) == len(free) + len(tree) == BLOCKS
        stored = [name for name in self.entries if name[0] == "segment"]
        assert len(self.cache.segments) == len(stored)

    @contextlib.contextmanager
    def held(self, entry: Entry | None, key: RadixKey, tokens: int):
        """Hold what the tree has of the first `tokens` of `key` for a while: `entry`."""
        short = RadixKey(key.token_ids[:tokens], key.extra_key)
        node = self.cache.match_prefix(MatchPrefixParams(key=short)).last_device_node
        if entry is not None:
            self.touch(entry)
        with self.locked(node, entry):
            yield

    @contextlib.contextmanager
    def locked(self, node, entry: Entry | None):
        self.cache.inc_lock_ref(node)
        for each in entry.path() if entry else ():
            each.held += 1
        yield
        self.cache.dec_lock_ref(node)
        for each in entry.path() if entry else ():
            each.held -= 1


Trees.TestCase.settings = settings(
    max_examples=int(os.environ.get("KVC_LIVES", "100")), stateful_step_count=40, deadline=None
)
TestTrees = Trees.TestCase
