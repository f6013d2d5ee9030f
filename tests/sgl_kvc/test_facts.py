"""Facts read from SGLang's own model classes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from transformers import AutoConfig, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sgl_kvc.attention.facts import (
    PROFILE_VARIABLE,
    _is_punctuation,
    _plain_weight,
    read_facts,
)
from sgl_kvc.policy.facts import FactsError, ModelFacts
from sgl_kvc.profile import FILE_NAME
from sgl_kvc.spec.catalogue import FAMILIES, methods
from tests import tiny_models

LAYERS, HEADS = 2, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model's folder, its tokenizer with some punctuation."""
    folder = tiny_models.write(tmp_path_factory.mktemp("model"), layers=LAYERS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([".", "?!", "«", "$", "'s", "5."])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "***"]})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runner(folder):
    """What of SGLang's model runner the facts are read from."""
    args = ServerArgs(model_path=str(folder), device="cpu")
    set_global_server_args_for_scheduler(args)
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo",
        distributed_init_method=f"file://{folder / 'rendezvous'}",
    )  # fmt: skip
    initialize_model_parallel()
    try:
        yield SimpleNamespace(
            model=LlamaForCausalLM(AutoConfig.from_pretrained(folder)),
            server_args=args,
            token_to_kv_pool=SimpleNamespace(layer_num=LAYERS, head_num=HEADS),
            model_config=ModelConfig(str(folder)),
            ps=SimpleNamespace(attn_tp_rank=0, attn_tp_size=1),
            device="cpu",
        )
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


def at_rank(runner, rank: int, ranks: int) -> SimpleNamespace:
    """The runner of one of several tensor-parallel ranks."""
    one = SimpleNamespace(**vars(runner))
    one.ps = SimpleNamespace(attn_tp_rank=rank, attn_tp_size=ranks)
    held = one.model_config.get_num_kv_heads(ranks)
    one.token_to_kv_pool = SimpleNamespace(layer_num=LAYERS, head_num=held)
    return one


def test_what_methods_need_are_facts():
    named = {need for family in FAMILIES for m in methods(family).values() for need in m.needs}
    assert named
    assert named <= set(ModelFacts.__dataclass_fields__)


def test_rotation_is_the_models(runner, folder):
    facts = read_facts(runner)
    config = AutoConfig.from_pretrained(folder)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(100)[None])
    half = config.head_dim // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)
    torch.testing.assert_close(facts.cos_sin[:100].float(), expected, atol=1e-5, rtol=1e-5)
    assert facts.neox


def test_output_projections_are_references(runner):
    facts = read_facts(runner)
    assert len(facts.output_projection) == LAYERS
    for weight, layer in zip(facts.output_projection, runner.model.model.layers, strict=True):
        assert weight.data_ptr() == layer.self_attn.o_proj.weight.data_ptr()
        assert weight.shape == (256, 8 * 32)


def test_no_output_projection_where_one_is_packed(runner, monkeypatch):
    packed = runner.model.model.layers[1].self_attn.o_proj
    monkeypatch.setattr(packed, "use_intel_amx_backend", True, raising=False)
    assert read_facts(runner).output_projection is None


def test_kinds_of_tokens(runner, folder):
    facts, tokenizer = read_facts(runner), AutoTokenizer.from_pretrained(folder)
    special = tokenizer.convert_ids_to_tokens(facts.special_tokens.tolist())
    assert set(special) == {"<unk>", "<s>", "</s>", "<pad>", "<answer>", "***"}
    marks = tokenizer.convert_ids_to_tokens(facts.punctuation.tolist())
    assert set(marks) == {".", "?!", "«", "$"}


def test_nothing_is_loaded_before_it_is_asked_for(runner):
    facts = read_facts(runner)
    assert "cos_sin" not in repr(facts)
    assert set(vars(facts)) == {"_runner", "head_profile"}
    assert facts.head_profile is None


def test_head_profile(runner, folder, tmp_path, monkeypatch):
    heads = [[0.25 * head for head in range(HEADS)] for _ in range(LAYERS)]
    beside = folder / FILE_NAME
    beside.write_text(json.dumps({"heads": heads}))
    try:
        assert read_facts(runner).head_profile.tolist() == heads
        assert read_facts(at_rank(runner, 1, 2)).head_profile.tolist() == [row[2:] for row in heads]
    finally:
        beside.unlink()
    named = tmp_path / "profile.json"
    monkeypatch.setenv(PROFILE_VARIABLE, str(named))
    with pytest.raises(FactsError, match=r"profile\.json"):
        read_facts(runner)
    named.write_text(json.dumps({"heads": heads[:1]}))
    with pytest.raises(FactsError, match="1 layers of 4 KV heads; the model has 2 layers of 4"):
        read_facts(runner)


@pytest.mark.parametrize("rank", range(8))
def test_a_profile_at_more_ranks_than_heads(runner, tmp_path, monkeypatch, rank):
    """SGLang has every KV head on several ranks then; its own layers say which holds which."""
    named = tmp_path / "profile.json"
    named.write_text(json.dumps({"heads": [[0.25 * head for head in range(HEADS)]] * LAYERS}))
    monkeypatch.setenv(PROFILE_VARIABLE, str(named))
    found = read_facts(at_rank(runner, rank, 8)).head_profile

    size = 32
    projection = QKVParallelLinear(
        256, size, 8, HEADS, bias=False, params_dtype=torch.float32, tp_rank=rank, tp_size=8
    )
    number = 0.25 * torch.arange(HEADS).repeat_interleave(size)
    keys = number[:, None].expand(-1, 256).contiguous()
    projection.weight.weight_loader(projection.weight, keys, "k")
    held = projection.weight[size : 2 * size].unique()
    assert found.tolist() == [held.tolist()] * LAYERS


def test_output_projections_at_more_ranks_than_heads(runner):
    """A rank's columns are those of its own query heads, which all read the head it holds."""
    rank, size = 5, 32
    whole = torch.randn(256, 8 * size)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList()})
    for _ in range(LAYERS):
        projection = RowParallelLinear(
            8 * size, 256, bias=False, params_dtype=torch.float32, tp_rank=rank, tp_size=8
        )
        projection.weight.weight_loader(projection.weight, whole)
        attention = torch.nn.ModuleDict({"o_proj": projection})
        model["layers"].append(torch.nn.ModuleDict({"self_attn": attention}))
    one = at_rank(runner, rank, 8)
    one.model = model
    for weight in read_facts(one).output_projection:
        assert torch.equal(weight, whole[:, rank * size : (rank + 1) * size])


def linear(dtype: torch.dtype = torch.float32, **attributes) -> torch.nn.Module:
    """A layer of 8 inputs and 4 outputs, in SGLang's words."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(4, 8).to(dtype), requires_grad=False)
    module.input_size_per_partition, module.output_size = 8, 4
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_plain_weight_is_used(dtype):
    module = linear(dtype)
    assert _plain_weight(module).data_ptr() == module.weight.data_ptr()


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Module(),
        linear(torch.float8_e4m3fn),
        linear(torch.int32),
        linear(use_intel_amx_backend=True),
        linear(input_size_per_partition=16),  # two numbers in one
        linear(output_size=8),
        torch.nn.Linear(8, 4),  # not one of SGLang's
    ],
    ids=["none", "fp8", "int32", "amx", "packed in", "packed out", "torch"],
)
def test_a_weight_stored_otherwise_is_not(module):
    assert _plain_weight(module) is None


@pytest.mark.parametrize(
    ("text", "whether"),
    [("", False), (".", True), ("?!", True), ("«", True), ("a.", False), (".5", False)]
    + [(mark, True) for mark in "$+<=>^`|~"] + [("€", False), ("X", False), (" ", False)],
)  # fmt: skip
def test_marks(text, whether):
    assert _is_punctuation(text) == whether
