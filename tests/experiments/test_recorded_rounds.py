"""A file of rounds, in full or sampled, gives back what was written, in any parts; one that does not fit is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch as safetensors
import torch
from torch import Tensor

from experiments.convert import ConfigError
from experiments.drafter.checkpoint import COMMITTED
from experiments.logits_sample import filled, sampled
from experiments.recorded_rounds import Rounds, read, recording, write

COUNT, STEPS, VOCAB, TOP = 7, 3, 400, 50


def rounds() -> Rounds:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(COUNT, STEPS, VOCAB, generator=generator).bfloat16()
    anchor, tokens = (torch.randint(VOCAB, shape, generator=generator) for shape in ((COUNT,), (COUNT, STEPS)))
    return Rounds(base, anchor, tokens, torch.arange(COUNT) % (STEPS + 1))


@pytest.mark.parametrize("top", [0, TOP])
def test_rounds_come_back_in_any_parts(tmp_path: Path, top: int) -> None:
    path, given = tmp_path / "new" / "r.safetensors", rounds()
    write(path, given, {"pair": "some"}, top)
    expected = filled(sampled(given.base_logits, top), VOCAB) if top else given.base_logits
    with recording(str(path), "inputs.rounds", VOCAB, VOCAB) as found:
        assert (found.count, found.steps, found.facts["pair"]) == (COUNT, STEPS, "some")
        for start, end in ((0, COUNT), (2, 3), (5, 7)):
            part = found.part(start, end)
            assert torch.equal(part.base_logits, expected[start:end])
            assert torch.equal(part.anchor, given.anchor[start:end])
            assert torch.equal(part.tokens, given.tokens[start:end])
            assert part.accepted is not None
            assert part.accepted.tolist() == [place % 4 for place in range(start, end)]
    assert torch.equal(torch.cat([part.base_logits for part in read(str(path), VOCAB, VOCAB, 2 * STEPS)]), expected)
    assert [file.name for file in path.parent.iterdir()] == ["r.safetensors"]


def test_a_sample_is_small(tmp_path: Path) -> None:
    write(tmp_path / "full", rounds(), {})
    write(tmp_path / "sample", rounds(), {}, TOP)
    full, sample = ((tmp_path / name).stat().st_size for name in ("full", "sample"))
    assert full - sample == pytest.approx(COUNT * STEPS * (2 * VOCAB - 5 * TOP - 8), abs=400)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"top_ids": torch.zeros(COUNT, STEPS, TOP, 4, dtype=torch.uint8)}, r"top_ids must be \[rounds, steps, top, 3\] U8.*got top_ids \[7, 3, 50, 4\] U8"),
        ({"top_values": torch.zeros(COUNT, STEPS, TOP - 1, dtype=torch.bfloat16)}, r"got .*top_values \[7, 3, 49\] BF16"),
        ({"moments": torch.zeros(COUNT, STEPS, 2).double()}, r"moments \[7, 3, 2\] F64"),
        ({"accepted": torch.zeros(COUNT - 1, dtype=torch.int64)}, r"accepted \[6\] I64"),
        ({"tokens": torch.zeros(0, STEPS, dtype=torch.int64)}, r"tokens \[0, 3\] I64"),
        ({"tokens": torch.zeros(COUNT, dtype=torch.int64)}, r"tokens \[7\] I64"),
        ({"anchor": torch.full((COUNT,), VOCAB)}, "tokens lie between .* and 400, but W1 has the rows 0 to 399"),
    ],
)  # fmt: skip
def test_a_sample_that_does_not_fit_is_one_sentence(tmp_path: Path, changed: dict[str, Tensor], words: str) -> None:
    path = tmp_path / "r.safetensors"
    write(path, rounds(), {}, TOP)
    safetensors.save_file(safetensors.load_file(path) | changed, path)
    with pytest.raises(ConfigError, match=rf"^inputs.rounds: {path}.*{words}"), recording(str(path), "inputs.rounds", VOCAB, VOCAB):
        pass


def test_rounds_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    write(path, rounds(), {}, TOP)
    with pytest.raises(ConfigError, match="has rounds of 400 logits and the head has 401"), recording(str(path), "k", VOCAB + 1, VOCAB + 1):
        pass
    kept = safetensors.load_file(path)
    kept["top_ids"][4] = 255
    safetensors.save_file(kept, path)
    with recording(str(path), "k", VOCAB, VOCAB) as found:
        found.part(0, 4)
        with pytest.raises(ConfigError, match=rf"^k: {path}: a kept token is 16777215, and there are 400; record it again"):
            found.part(4, 5)


def test_the_committed_sample_of_the_large_pair_is_whole() -> None:
    """56 rounds of pair=qwen_vocab. Of the first: 4,096 logits of a step are recorded ones, and the tail lies below them."""
    with recording(str(COMMITTED / "qwen_vocab" / "rounds.safetensors"), "k", 151_936, 151_936) as found:
        first = found.part(0, 1)
        assert (found.count, found.steps, found.facts["pair"]) == (56, 16, "qwen_vocab")
    best = first.base_logits.float().topk(4_097, dim=2).values
    assert first.base_logits.isfinite().all()
    assert (best[..., 4_095] > best[..., 4_096]).all()
    drafted = first.base_logits.float().gather(2, first.tokens[:, :, None])
    assert (drafted >= best[..., 4_095:4_096]).all(), "what was drafted is of those that were kept"
