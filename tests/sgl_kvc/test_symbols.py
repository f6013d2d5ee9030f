"""The list of what we use of SGLang's, held against our own source."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import sgl_kvc
from sgl_kvc.compat.check import check_symbols, has
from sgl_kvc.compat.hook import IncompatibleError
from sgl_kvc.compat.symbols import FRONTEND, SYMBOLS
from sgl_kvc.compat.uses import Uses

ROOT = Path(sgl_kvc.__file__).parent
MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages([str(ROOT)], "sgl_kvc.")
]

_COMPONENTS = "sglang.srt.managers.scheduler_components"
#: What our code calls the objects of SGLang's that it is handed, as a variable or an attribute.
NAMED = {
    "adder": "sglang.srt.managers.schedule_policy.PrefillAdder",
    "args": "sglang.srt.server_args.ServerArgs",
    "allocator": "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator",
    "config": "sglang.srt.configs.model_config.ModelConfig",
    "batch": "sglang.srt.managers.schedule_batch.ScheduleBatch",
    "cache": "sgl_kvc.cache.radix.CompressingRadixCache",
    "forward_batch": "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
    "forward_mode": "sglang.srt.model_executor.forward_batch_info.ForwardMode",
    "configurator": "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator",
    "layer": "sglang.srt.layers.radix_attention.RadixAttention",
    "manager": "sglang.srt.managers.tokenizer_manager.TokenizerManager",
    "model_runner": "sglang.srt.model_executor.model_runner.ModelRunner",
    "model_config": "sglang.srt.configs.model_config.ModelConfig",
    "params": "sglang.srt.sampling.sampling_params.SamplingParams",
    "pool": "sgl_kvc.pool.arena.ArenaKVPool",
    "ps": "sglang.srt.distributed.parallel_state_wrapper.ParallelState",
    "reporter": f"{_COMPONENTS}.metrics_reporter.SchedulerMetricsReporter",
    "req": "sglang.srt.managers.schedule_batch.Req",
    "req_to_token_pool": "sglang.srt.mem_cache.memory_pool.ReqToTokenPool",
    "_request_dispatcher": "sglang.utils.TypeBasedDispatcher",
    "_runner": "sglang.srt.model_executor.model_runner.ModelRunner",
    "runner": "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner",
    "running_batch": "sglang.srt.managers.schedule_batch.ScheduleBatch",
    "sampling_params": "sglang.srt.sampling.sampling_params.SamplingParams",
    "scheduler": "sglang.srt.managers.scheduler.Scheduler",
    "server_args": "sglang.srt.server_args.ServerArgs",
    "token_to_kv_pool": "sgl_kvc.pool.arena.ArenaKVPool",
    "token_to_kv_pool_allocator": "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator",
    "tree_cache": "sgl_kvc.cache.radix.CompressingRadixCache",
}
#: Where such a name means something else.
NOT_SGLANG = {"profile.py", "policy", "releases.py"}


def is_theirs(cls: type) -> bool:
    return cls.__module__.startswith("sglang.")


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def imported() -> set[tuple[str, str]]:
    """(module, name) of every ``from sglang... import name``."""
    return {
        (node.module, alias.name)
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang")
        for alias in node.names
    }


@functools.cache
def subclasses() -> list[type]:
    """Our classes that have a class of SGLang's above them."""
    return [
        cls
        for module in MODULES
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__ and any(map(is_theirs, cls.__mro__))
    ]


@functools.cache
def ours(cls: type) -> set[str]:
    """Attributes that our classes among the MRO define or assign."""
    found = set()
    for each in cls.__mro__:
        if each.__module__.startswith("sgl_kvc"):
            found |= set(vars(each)) | set(inspect.get_annotations(each))
            for node in ast.walk(ast.parse(inspect.getsource(each))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
    return found


def overridden() -> set[tuple[type, str]]:
    """(the class of SGLang's, method) of everything that a class of ours overrides."""
    return {
        (base, name)
        for cls in subclasses()
        for mine in cls.__mro__
        if mine.__module__.startswith("sgl_kvc")
        for name in vars(mine)
        for base in mine.__mro__
        if is_theirs(base) and name in vars(base) and not inherent(name)
    }


def inherent(name: str) -> bool:
    """Names that every class has."""
    return name.startswith("__") or name in ("_abc_impl", "_is_protocol")


def read() -> set[tuple[type, str, str]]:
    """(class, attribute, file) of what is read of SGLang's objects, by variables' names."""
    found = set()
    for path, tree in sources():
        if not NOT_SGLANG & {*path.parts}:
            for part in tree.body:
                found |= {(*each, str(path)) for each in read_in(part, imports_of(tree))}
    return found


def read_in(part: ast.stmt, imports: dict[str, type]) -> Iterator[tuple[type, str]]:
    """(class, attribute) of what one class or function of a module reads."""
    classes = {cls.__name__: cls for cls in subclasses()}
    mine = classes.get(getattr(part, "name", ""))
    annotated = {
        (argument.arg, argument.annotation.id)
        for node in ast.walk(part) if isinstance(node, ast.arguments)
        for argument in node.args if isinstance(argument.annotation, ast.Name)
    }
    for node in ast.walk(part):
        if not isinstance(node, ast.Attribute) or inherent(node.attr):
            continue
        found: set[type | None] = set()
        if isinstance(node.value, ast.Attribute) and node.value.attr != "cache":
            found = {named(node.value.attr)}
        elif isinstance(node.value, ast.Name):
            variable = node.value.id
            found = {imports.get(kind) for name, kind in annotated if name == variable}
            variable_of_ours = mine if variable in ("self", "cls") else named(variable)
            found = found - {None} or {imports.get(variable, variable_of_ours)}
        elif ast.unparse(node.value) == "super()" and mine is not None:
            above = next(each for each in mine.__mro__ if is_theirs(each))
            ours_between = (c for c in mine.__mro__[1:] if not is_theirs(c))
            if not any(node.attr in vars(each) for each in ours_between):
                found = {above}
        found.discard(None)
        if found and not any(belongs_to_us(cls, node.attr) for cls in found):
            # A name may stand for several classes in one file: one that has it.
            yield min(found, key=lambda cls: (not has(cls, node.attr), cls.__name__)), node.attr


@functools.cache
def named(variable: str) -> type | None:
    return pkgutil.resolve_name(NAMED[variable]) if variable in NAMED else None


@functools.cache
def belongs_to_us(cls: type, name: str) -> bool:
    """An attribute that we put there, and that no class of SGLang's above has."""
    if name.startswith("kvc"):
        return True
    theirs = any(has(each, name) for each in cls.__mro__ if is_theirs(each))
    return not theirs and name in ours(cls)


def imports_of(tree: ast.Module) -> dict[str, type]:
    """Classes of SGLang's that a module imports, also those only for annotations."""
    found = {
        alias.asname or alias.name: pkgutil.resolve_name(f"{node.module}.{alias.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang")
        for alias in node.names
    }
    return {name: cls for name, cls in found.items() if isinstance(cls, type)}


@pytest.fixture(scope="module")
def listed() -> dict[str, set[str]]:
    """Owner -> names, parameters left off."""
    found: dict[str, set[str]] = {}
    for uses in (*SYMBOLS, *FRONTEND):
        names = {name.partition("(")[0] for name in uses.names.split()}
        found.setdefault(uses.owner, set()).update(names)
    return found


def names_of(cls: type, listed: dict[str, set[str]]) -> set[str]:
    """What the list has of a class, its bases included."""
    resolved = {pkgutil.resolve_name(owner): names for owner, names in listed.items()}
    written = (f"{each.__module__}.{each.__qualname__}" for each in cls.__mro__)
    # By name too: `sgl_kvc.lang` puts a class of ours where one of SGLang's was.
    found = [*(resolved.get(each, set()) for each in cls.__mro__), *map(listed.get, written)]
    return set().union(*filter(None, found))


def test_symbols_are_there():
    check_symbols((*SYMBOLS, *FRONTEND))


def test_owners_are_listed_once():
    owners = [uses.owner for uses in (*SYMBOLS, *FRONTEND)]
    assert len(owners) == len(set(owners))
    assert all(uses.reason for uses in (*SYMBOLS, *FRONTEND))


def test_imports_are_listed(listed):
    assert imported()
    missing = {
        f"{module}.{name}"
        for module, name in imported()
        if f"{module}.{name}" not in listed and name not in listed.get(module, ())
    }
    assert not missing


def test_overridden_methods_are_listed(listed):
    assert overridden()
    missing = {
        f"{cls.__module__}.{cls.__qualname__}.{name}"
        for cls, name in overridden()
        if name not in names_of(cls, listed) and not in_a_subclass(cls, name, listed)
    }
    assert not missing


def in_a_subclass(cls: type, name: str, listed: dict[str, set[str]]) -> bool:
    """Whether the list has it of a class below, which is what we use."""
    below = (each for owner in listed if isinstance(each := pkgutil.resolve_name(owner), type))
    return any(issubclass(each, cls) and name in names_of(each, listed) for each in below)


def test_attributes_that_are_read_are_listed(listed):
    assert read()
    missing = {
        f"{cls.__module__}.{cls.__qualname__}.{name}, read in {path}"
        for cls, name, path in read()
        if name not in names_of(cls, listed)
    }
    assert not missing


class Theirs:
    declared: int

    def __init__(self, kept):
        self.assigned = kept
        kept.of_another = 1

    def method(self, known): ...


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("declared", None),
        ("assigned", None),
        ("method(known)", None),
        ("__init__(kept)", None),
        ("of_another", "Theirs.of_another"),
        ("renamed", "Theirs.renamed"),
        ("method(known,new)", r"Theirs.method\(new\)"),
    ],
)
def test_a_missing_symbol_is_named(name, gone):
    symbols = [Uses(f"{__name__}.Theirs", name, "the reason")]
    if gone is None:
        check_symbols(symbols)
        return
    with pytest.raises(IncompatibleError, match=rf"{gone}, which sgl-kvc needs \(the reason\)"):
        check_symbols(symbols)


def test_a_missing_module_is_named():
    with pytest.raises(IncompatibleError, match=r"SGLang has no sglang\.srt\.nowhere"):
        check_symbols([Uses("sglang.srt.nowhere", "anything", "the reason")])
