"""The study against plain loops over whole matrices, on heads whose answers are known, and against broken files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import quantization, record
from experiments.convert import ConfigError
from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.quantized_bias import FORMATS, Latents, exact_bias, linear_biases, quantized_biases
from experiments.recorded_rounds import Rounds
from experiments.schema import HeadConfig, Quantization
from kernels.float8 import E4M3, E5M2, quantize_float8
from kernels.heads.markov import W1_NAME, W2_NAME, MarkovHead
from kernels.quantize import int8_bias, quantize_rows, two_planes
from kernels.reference import walk
from kernels.walk import Rounding, Unsupported, WalkInputs

safetensors = pytest.importorskip("safetensors.torch")
VOCAB, RANK, STEPS, ROUNDS = 700, 16, 3, 40
Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that matrices and rounds of tests have seams."""
    monkeypatch.setattr(quantization, "_CHUNK_ROWS", 256)
    monkeypatch.setattr(quantization, "_POSITIONS", 10)


@pytest.fixture
def run(plan: Plan) -> Run:
    def of(**asked: Any) -> Outcome:
        size = HeadConfig("test", VOCAB, RANK, seed=3, w2_std=0.5)
        return quantization.run(replace(plan, config=replace(plan.config, head=size, experiment=Quantization(**asked))))

    return of


def head() -> MarkovHead:
    return MarkovHead.synthetic(VOCAB, RANK, 3, "cpu", 1.0, 0.5)


def save(path: Path, **tensors: Tensor) -> str:
    safetensors.save_file(tensors, path)
    return str(path)


def save_head(path: Path, of: MarkovHead, **more: Tensor) -> str:
    return save(path, **{W1_NAME: of.w1, W2_NAME: of.w2}, **more)


def save_rounds(path: Path, **changed: Tensor) -> str:
    return save(path, **{name: getattr(rounds(), name) for name in ("base_logits", "anchor", "tokens")} | changed)


def rounds() -> Rounds:
    generator = torch.Generator().manual_seed(5)
    base = (2 * torch.randn(ROUNDS, STEPS, VOCAB, generator=generator)).bfloat16()
    anchor, tokens = (torch.randint(VOCAB, shape, generator=generator) for shape in ((ROUNDS,), (ROUNDS, STEPS)))
    return Rounds(base, anchor, tokens)


def error(rows: list[Row], matrix: str, form: str, tokens: str = "") -> float:
    (found,) = (row["relative_error"] for row in rows if (row["matrix"], row["format"], row["tokens"]) == (matrix, form, tokens))
    return found


def relative(found: Tensor, truth: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - truth) / torch.linalg.vector_norm(truth))


def whole_biases(of: MarkovHead, u: Tensor) -> dict[str, Tensor]:
    """Every format's bias without chunks, folding or generators."""
    w2, rows = of.w2, quantize_rows(of.w2)
    return {
        "int8": u.double() @ rows.dequantized().T,
        "e4m3": u.double() @ quantize_float8(w2, E4M3).dequantized().T,
        "e5m2": u.double() @ quantize_float8(w2, E5M2).dequantized().T,
        "int8_one_plane": quantize_rows(u).dequantized() @ rows.dequantized().T,
        "int8_two_planes": int8_bias(rows, two_planes(u)).double(),
    }


def test_every_error_is_that_of_the_whole_matrix(run: Run) -> None:
    rows, of = run(tokens=VOCAB).tables["quantization"], head()
    for matrix, weights in (("w1", of.w1), ("w2", of.w2)):
        exact = weights.double()
        assert error(rows, matrix, "int8") == pytest.approx(relative(quantize_rows(weights).dequantized(), exact), rel=1e-12)
        for form, dtype in (("e4m3", E4M3), ("e5m2", E5M2)):
            assert error(rows, matrix, form) == pytest.approx(relative(quantize_float8(weights, dtype).dequantized(), exact), rel=1e-12)
    u = of.w1  # as many tokens as there are, in any order
    assert error(rows, "latent", "int8_one_plane", "random") == pytest.approx(relative(quantize_rows(u).dequantized(), u.double()))
    assert error(rows, "latent", "int8_two_planes", "random") == pytest.approx(relative(two_planes(u).dequantized(), u.double()))
    truth = u.double() @ of.w2.double().T
    for form, bias in whole_biases(of, u).items():
        assert error(rows, "bias", form, "random") == pytest.approx(relative(bias, truth), rel=1e-9), form
    assert {row["count"] for row in rows} == {VOCAB}
    assert {(row["head"], row["weights"], row["vocab"], row["rank"]) for row in rows} == {("test", "synthetic", VOCAB, RANK)}


def test_errors_have_the_sizes_that_the_formats_imply(run: Run) -> None:
    rows = run().tables["quantization"]
    assert error(rows, "latent", "int8_two_planes", "random") < 1e-4 < 0.003 < error(rows, "latent", "int8_one_plane", "random") < 0.009
    for matrix, tokens in (("w1", ""), ("w2", ""), ("bias", "random")):
        int8, e4m3, e5m2 = (error(rows, matrix, form, tokens) for form in ("int8", "e4m3", "e5m2"))
        assert 0.003 < int8 < 0.009
        assert 0.018 < e4m3 < 0.032
        assert e5m2 == pytest.approx(2 * e4m3, rel=0.05)
    one, two, w2 = (error(rows, "bias", form, "random") for form in ("int8_one_plane", "int8_two_planes", "int8"))
    assert two == pytest.approx(w2, rel=1e-3)
    assert one == pytest.approx((w2**2 + error(rows, "latent", "int8_one_plane", "random") ** 2) ** 0.5, rel=0.05)


def test_folded_latents_keep_every_norm() -> None:
    of = head()
    for tokens in (5, VOCAB):  # fewer and more than 2 rank
        latents = Latents.of(of.w1[:tokens])
        exact, one_plane = latents.folded()
        assert len(exact) == len(one_plane) == min(tokens, 2 * RANK)
        whole, short = exact_bias(of.w2, latents.exact), exact_bias(of.w2, exact)
        assert float(short.norm()) == pytest.approx(float(whole.norm()), rel=1e-12)
        for (form, bias), (_, folded) in zip(quantized_biases(of.w2, latents), linear_biases(of.w2, exact, one_plane), strict=False):
            assert float((folded - short).norm()) == pytest.approx(float((bias - whole).norm()), rel=1e-9), form


def test_the_biases_come_in_the_order_of_their_names() -> None:
    of = head()
    found = dict(quantized_biases(of.w2, Latents.of(of.w1[:7])))
    assert tuple(found) == FORMATS
    for form, bias in whole_biases(of, of.w1[:7]).items():
        assert torch.equal(found[form], bias), form


def test_magnitudes_are_shares_of_elements_at_or_below(run: Run) -> None:
    rows, w = run().tables["magnitudes"], head().w2.double().abs()
    ratio = w / w.amax(dim=1, keepdim=True)
    assert [row["magnitude"] for row in rows] == [k / 448 for k in range(449)]
    for row in rows[::7]:
        assert row["share"] == pytest.approx(float((ratio <= row["magnitude"]).double().mean()), abs=1e-12)
    assert rows[-1]["share"] == 1.0


def test_a_magnitude_on_the_grid_counts_there_and_a_zero_row_at_zero(run: Run, tmp_path: Path) -> None:
    w2 = torch.zeros(3, 4, dtype=torch.bfloat16)
    w2[0] = torch.tensor([7.0, 0.5, -0.4980, 0.5020])  # 1/14, which no binary fraction is, and its neighbours in bf16
    w2[1] = torch.tensor([3.0, 1.0, 0.0, -3.0])
    of = MarkovHead(head().w1[:3, :4].contiguous(), w2)
    shares = {row["magnitude"]: row["share"] for row in run(checkpoints=(save_head(tmp_path / "x.safetensors", of),)).tables["magnitudes"]}
    assert shares[0.0] * 12 == pytest.approx(5)  # the zero row and one zero
    assert shares[31 / 448] * 12 == pytest.approx(5)
    assert shares[32 / 448] * 12 == pytest.approx(7)
    assert shares[33 / 448] * 12 == pytest.approx(8)
    assert shares[447 / 448] * 12 == pytest.approx(9)


def test_used_tokens_are_those_that_were_counted(run: Run, tmp_path: Path) -> None:
    of, counts = head(), torch.zeros(VOCAB, dtype=torch.int64)
    counts[[3, 50, 600]] = torch.tensor([9, 1, 4])
    path = save_head(tmp_path / "trained.safetensors", of, token_counts=counts, something_else=torch.zeros(3))
    rows = run(checkpoints=(path,), tokens=100).tables["quantization"]
    assert {(row["tokens"], row["count"]) for row in rows if row["tokens"]} == {("random", 100), ("used", 3)}
    assert {(row["head"], row["weights"]) for row in rows} == {("trained", "checkpoint")}
    u = of.w1[[3, 50, 600]]
    for form, bias in whole_biases(of, u).items():
        assert error(rows, "bias", form, "used") == pytest.approx(relative(bias, exact_bias(of.w2, u.double())), rel=1e-9), form


def test_random_tokens_are_different_ones_and_follow_the_seed(run: Run) -> None:
    found = quantization._tokens(quantization.Checkpoint("x", head(), torch.ones(VOCAB, dtype=torch.int64)), Quantization(tokens=300))
    for ids in found.values():
        assert len(set(ids.tolist())) == 300
    drawn = [error(run(tokens=20, seed=seed).tables["quantization"], "bias", "e4m3", "random") for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_flips_and_gaps_are_those_of_a_teacher_forced_walk(run: Run, tmp_path: Path) -> None:
    of, given = head(), rounds()
    tables = run(checkpoints=(save_head(tmp_path / "h.safetensors", of),), rounds=(save_rounds(tmp_path / "r.safetensors"),)).tables
    inputs = WalkInputs(given.base_logits, given.anchor, torch.zeros(ROUNDS), torch.zeros(ROUNDS, dtype=torch.int64))
    exact = walk(of, inputs, Rounding.TWICE, teacher=given.tokens, keep_logits=True)
    assert exact.logits is not None
    previous = torch.cat([given.anchor[:, None], given.tokens[:, :-1]], dim=1)
    total = 0
    for form in FORMATS:
        rows = [row for row in tables["argmax_flips"] if row["format"] == form]
        assert [row["step"] for row in rows] == list(range(STEPS))
        for row in rows:
            bias = whole_biases(of, of.w1[previous[:, row["step"]]])[form]
            logits = (given.base_logits[:, row["step"]].float() + bias.float().bfloat16().float()).bfloat16()
            flips = int((logits.argmax(dim=1) != exact.tokens[:, row["step"]]).sum())
            assert (row["walks"], row["flips"], row["inputs"], row["head"]) == (ROUNDS, flips, "rounds", "h"), (form, row["step"])
            total += flips
    assert total > 5, "the inputs must be hard enough to flip"
    top = exact.logits.topk(2, dim=2).values
    for step in range(STEPS):
        bins = [row for row in tables["top2_gaps"] if row["step"] == step]
        gaps = top[:, step, 0] - top[:, step, 1]
        assert [row["count"] for row in bins] == [int(((gaps >= row["low"]) & (gaps < row["high"])).sum()) for row in bins]
        assert sum(row["count"] for row in bins) == ROUNDS
        assert [row["high"] for row in bins[:-1]] == [row["low"] for row in bins[1:]]


def test_ties_go_to_the_lowest_token_across_chunks_and_infinities_have_gaps(run: Run, tmp_path: Path) -> None:
    base = torch.full((2, 1, VOCAB), -torch.inf, dtype=torch.bfloat16)
    base[0, 0, [300, 301, 699]] = 64.0  # the bias is rounded away: a tie over two chunks
    base[0, 0, 10] = torch.nan
    of = MarkovHead(head().w1, (head().w2.float() / 4096).bfloat16())
    leads = quantization._leads(of, base[:, 0], of.w1[:2])
    assert {name: lead.token.tolist() for name, lead in leads.items()} == {name: [300, 0] for name in ("bf16", *FORMATS)}
    assert leads["bf16"].gap.tolist() == [0.0, 0.0]
    base[1, 0, 5] = 1.0
    assert quantization._leads(of, base[:, 0], of.w1[:2])["bf16"].gap[1] == torch.inf
    paths = (
        save_head(tmp_path / "h.safetensors", of),
        save_rounds(
            tmp_path / "r.safetensors",
            base_logits=base,
            anchor=torch.zeros(2, dtype=torch.int64),
            tokens=torch.zeros(2, 1, dtype=torch.int64),
        ),
    )
    outcome = run(checkpoints=paths[:1], rounds=paths[1:])
    assert [row["count"] for row in outcome.tables["top2_gaps"]] == [1] + [0] * 63 + [1]


def test_the_synthetic_head_and_its_rounds_can_be_recorded(run: Run) -> None:
    tables = run().tables
    assert {name: record.table(name, rows, "r").num_rows for name, rows in tables.items()} == {
        "quantization": 6 + 7,
        "argmax_flips": 5 * quantization.SYNTHETIC_STEPS,
        "top2_gaps": 65 * quantization.SYNTHETIC_STEPS,
        "magnitudes": 449,
    }
    assert {row["walks"] for row in tables["argmax_flips"]} == {quantization.SYNTHETIC_ROUNDS}
    assert {row["inputs"] for row in tables["argmax_flips"]} == {"synthetic"}


def test_two_checkpoints_are_two_heads(run: Run, tmp_path: Path) -> None:
    paths = tuple(save_head(tmp_path / f"{name}.safetensors", head()) for name in ("a", "b"))
    for rows in run(checkpoints=paths).tables.values():
        assert list(dict.fromkeys(row["head"] for row in rows)) == ["a", "b"]
        a, b = ([{**row, "head": ""} for row in rows if row["head"] == name] for name in ("a", "b"))
        assert a == b


def test_a_head_is_called_as_its_pair_is(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / name / "drafter.safetensors" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        save_head(path, head())
    with pytest.raises(ConfigError, match=r"which need different names; got \['drafter', 'drafter'\]"):
        run(checkpoints=tuple(map(str, paths)))
    paths[0].with_name("pair.json").write_text('{"config": {"name": "small", "head": "markov"}}')
    rows = run(checkpoints=tuple(map(str, paths)), rounds=tuple(save_rounds(path.with_name("r.safetensors")) for path in paths)).tables[
        "argmax_flips"
    ]
    assert list(dict.fromkeys(row["head"] for row in rows)) == ["small_markov", "drafter"]


COUNTS = torch.ones(VOCAB, dtype=torch.int64)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({W1_NAME: torch.zeros(3, 2)}, f"the checkpoint lacks {W2_NAME}"),
        ({W1_NAME: torch.zeros(3, 2), W2_NAME: torch.zeros(3, 2)}, "w1 must be a non-empty .* bf16 matrix"),
        ({W1_NAME: head().w1, W2_NAME: head().w2, "markov_head.gate": torch.zeros(2)}, "the checkpoint also has markov_head.gate"),
        ({W1_NAME: head().w1, W2_NAME: head().w2, "token_counts": COUNTS[1:]}, r"token_counts must be \[700\] torch.int64"),
        ({W1_NAME: head().w1, W2_NAME: head().w2, "token_counts": COUNTS.int()}, "got .* torch.int32"),
        ({W1_NAME: head().w1, W2_NAME: head().w2, "token_counts": 0 * COUNTS}, "they lie between 0 and 0"),
    ],
)
def test_a_checkpoint_that_is_none_is_one_sentence(run: Run, tmp_path: Path, tensors: dict[str, Tensor], words: str) -> None:
    path = save(tmp_path / "x.safetensors", **tensors)
    with pytest.raises(ConfigError, match=rf"^experiment.checkpoints\[0\]: {path}: .*{words}"):
        run(checkpoints=(path,))


def test_a_file_that_cannot_be_read_is_one_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no such thing")
    for path in (tmp_path / "x.safetensors", tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(ConfigError, match=rf"^experiment.checkpoints\[0\]: {path} cannot be read as a safetensors file"):
            run(checkpoints=(str(path),))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"base_logits": rounds().base_logits[:, :, 1:].contiguous()}, r"base_logits must be \[rounds, steps, 700\] BF16"),
        ({"base_logits": rounds().base_logits.float()}, r"got base_logits \[40, 3, 700\] F32"),
        ({"tokens": rounds().tokens[:, 1:].contiguous()}, r"tokens \[40, 2\] I64"),
        ({"anchor": rounds().anchor - VOCAB}, "tokens lie between -"),
        ({"tokens": rounds().tokens + VOCAB}, "but W1 has the rows 0 to 699"),
    ],
)
def test_rounds_that_do_not_fit_are_one_sentence(run: Run, tmp_path: Path, changed: dict[str, Tensor], words: str) -> None:
    paths = save_head(tmp_path / "h.safetensors", head()), save_rounds(tmp_path / "r.safetensors", **changed)
    with pytest.raises(ConfigError, match=rf"^experiment.rounds: {paths[1]}: .*{words}"):
        run(checkpoints=paths[:1], rounds=paths[1:])


def test_rounds_without_a_tensor_name_it(run: Run, tmp_path: Path) -> None:
    paths = save_head(tmp_path / "h.safetensors", head()), save(tmp_path / "r.safetensors", anchor=rounds().anchor)
    with pytest.raises(ConfigError, match=r"r.safetensors lacks base_logits, tokens; it has: anchor"):
        run(checkpoints=paths[:1], rounds=paths[1:])


@pytest.mark.parametrize(("value", "words"), [(torch.nan, "W2 of x has 1 values that are not finite"), (0.0, "W2 of x has only zeros")])
def test_a_head_without_meaning_is_refused(run: Run, tmp_path: Path, value: float, words: str) -> None:
    w2 = head().w2.clone() if value else torch.zeros_like(head().w2)
    w2[3, 4] = value
    with pytest.raises(Unsupported, match=words):
        run(checkpoints=(save_head(tmp_path / "x.safetensors", MarkovHead(head().w1, w2)),))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tokens": 0}, "tokens: must be at least 1; got 0"),
        ({"checkpoints": ("a", "a")}, "checkpoints: needs different ones"),
        ({"rounds": ("r.safetensors",)}, "rounds: .* as many as checkpoints, or none; got 1 and 0"),
        ({"rounds": ("r",), "checkpoints": ("a", "b")}, "got 1 and 2"),
    ],
)
def test_a_wrong_config_is_one_sentence(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Quantization(**wrong)
