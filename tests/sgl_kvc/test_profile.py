"""Retrieval heads: the measure, against attention in full, and on models of known heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from kvc_recall import model_path
from kvc_server.cli import main
from transformers import AutoModel, AutoTokenizer

from sgl_kvc import profile
from sgl_kvc.profile import FILE_NAME, ProfileError, measure, ordinary_tokens, read, retrieval
from tests import tiny_models

LENGTH, COPIES = 12, 3


def test_retrieval_tells_echo_and_induction_heads_from_others():
    """Heads that look for the token itself, for what followed it, for what stands just before."""
    torch.manual_seed(0)
    total = 1 + LENGTH * COPIES
    words = torch.eye(LENGTH, total)[torch.randperm(LENGTH)].repeat(COPIES, 1)
    tokens = torch.cat([torch.zeros(1, total), words])
    before = torch.cat([torch.zeros(1, total), tokens[:-1]])
    places, nothing = torch.eye(total), torch.zeros(total, total)
    keys = torch.stack([tokens, before, places])
    local = places.roll(1, 0)
    queries = torch.stack([nothing, tokens, tokens, nothing, local, local]) * 50
    found = retrieval(queries, keys, 1.0, LENGTH, 1)
    # The echo head sees the token itself as well: 1 of 2 copies, then 2 of 3.
    assert found.tolist() == pytest.approx([(1 / 2 + 2 / 3) / 2, 1, 0], abs=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_measure_is_attention_in_full(architecture, tmp_path, monkeypatch):
    """Against the attention that transformers gives out, with its own masks, position by position.

    Blocks of few rows, so that there are several.
    """
    monkeypatch.setattr(profile, "_BLOCK", 6 * 7 * (LENGTH * COPIES + 1))
    folder = tiny_models.write(tmp_path, architecture, query_heads=6, kv_heads=3, layers=2)
    found = measure(str(folder), tokens=LENGTH, copies=COPIES, seed=3)
    words = ordinary_tokens(AutoTokenizer.from_pretrained(folder), 512)
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(3))[:LENGTH]
    ids = [1, *torch.tensor(words)[order].tolist() * COPIES]
    model = AutoModel.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        layers = model(torch.tensor([ids]), output_attentions=True).attentions
    for heads, attention in zip(found["heads"], layers, strict=True):
        masses = []
        for head in attention[0]:
            echo = induction = 0.0
            for i in range(1 + LENGTH, len(ids)):
                earlier = range(i - LENGTH, 0, -LENGTH)
                echo += float(sum(head[i, j] for j in earlier))
                induction += float(sum(head[i, j + 1] for j in earlier))
            masses.append(max(echo, induction) / (LENGTH * (COPIES - 1)))
        expected = [max(masses[2 * head], masses[2 * head + 1]) for head in range(3)]
        assert heads == pytest.approx(expected, abs=1e-4)


def test_only_ordinary_tokens_are_used(tmp_path):
    folder = tiny_models.write(tmp_path, layers=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert ordinary_tokens(tokenizer, 512) == list(range(4, 512)), "<unk>, <s>, </s> and <pad>"
    tokenizer.add_tokens(["word"])
    assert ordinary_tokens(tokenizer, 600) == list(range(4, 512)), "nothing added either"
    assert ordinary_tokens(tokenizer, 10) == list(range(4, 10)), "nothing the model has not"


def test_the_embedded_models_profile_is_of_its_weights():
    """If this fails, the weights are new: ``sgl-kvc profile --model models/recall``."""
    folder = Path(model_path())
    kept = read(folder / FILE_NAME)
    found = torch.tensor(measure(str(folder))["heads"])
    assert torch.allclose(kept, found, atol=0.005)
    best = found.flatten().sort(descending=True).values
    assert best[0] > 5 * best.median(), "some heads retrieve, most do not"


def test_the_command_writes_what_read_reads(tmp_path, capsys):
    folder = tiny_models.write(tmp_path / "tiny", layers=2)
    assert main(["profile", "--model", str(folder), "--tokens", "16", "--copies", "2"]) == 0
    written = json.loads((folder / FILE_NAME).read_text())
    assert written == measure(str(folder), tokens=16, copies=2)
    assert written["model"] == "tiny"
    assert "16 random tokens x 2, seed 0" in written["method"]
    assert read(folder / FILE_NAME).tolist() == torch.tensor(written["heads"]).tolist()
    assert str(folder / FILE_NAME) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--out", "{tmp}/no/such/folder/file.json"], "is no folder"),
        (["--copies", "1"], "at least 2"),
        (["--tokens", "1"], "at least 2"),
        (["--copies", "0"], "at least 2"),
        (["--copies", "4000"], "at least 2"),
    ],
)
def test_bad_options_end_in_one_sentence(options, reason, tmp_path, capsys):
    folder = tiny_models.write(tmp_path / "tiny", layers=1)
    options = [option.format(tmp=tmp_path) for option in options]
    assert main(["profile", "--model", str(folder), *options]) == 2
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].startswith("sgl-kvc profile: ")
    assert reason in printed.splitlines()[-1]
    assert not (folder / FILE_NAME).exists()


def test_no_model(tmp_path, capsys):
    assert main(["profile", "--model", str(tmp_path)]) == 2
    assert f"cannot load {tmp_path}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"heads": 3}', '{"heads": [0.5]}', '{"heads": [[1.5]]}',
             '{"heads": [[0.1], [0.1, 0.2]]}', '{"heads": [["a"]]}', '{"heads": [[NaN]]}'],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_refused(text, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ProfileError, match="file"):
        read(tmp_path / "file")
