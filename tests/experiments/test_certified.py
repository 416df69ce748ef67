from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from experiments import certified, record
from experiments.compose import compose
from experiments.convert import ConfigError
from experiments.execute import execute
from experiments.plan import Plan
from experiments.schema import Certified, Config, HeadConfig, Variant
from experiments.workload import Arm, Workload, create
from kernels.device import load
from kernels.walk import Draft, Limits, NoiseRule, PreparedWalk, Resources, SampledWalk, WalkInputs
from tests.experiments.test_inputs import COUNT
from tests.experiments.test_inputs import trained as trained  # a fixture: a head and nine rounds in files

SETS = 5
CELLS = [(steps, batch, temperature) for steps in (2, 3) for batch in (1, 2) for temperature in (0.0, 1.0)]
ASK = Certified(
    (Variant("bits", "reference"), Variant("certified", "certified_sm80")),
    steps=(2, 3),
    batches=(1, 2),
    temperatures=(0.0, 1.0),
    sets=SETS,
    candidates=(4, 16),
    listed=(2, 8),
    warmup=1,
)


@pytest.fixture
def asked(plan: Plan) -> Plan:
    return replace(plan, config=replace(plan.config, experiment=ASK))


def _with(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, config=replace(plan.config, experiment=replace(ASK, **changes)))


def _place(row: Mapping[str, Any]) -> tuple[int, int, float]:
    return row["steps"], row["batch"], row["temperature"]


def test_every_set_of_every_cell_is_checked_and_timed_and_who_cannot_serve_is_a_row(asked: Plan) -> None:
    run = record.load(execute(asked).folder)
    ended = {(*_place(row), row["variant"], row["status"], row["tokens"]) for row in run.tables["cells"].to_pylist()}
    right = {(steps, batch, t, "bits", "ok", SETS * steps * batch) for steps, batch, t in CELLS}
    assert ended == right | {(*cell, "certified", "unsupported", 0) for cell in CELLS}
    rows = run.tables["certified_rounds"].to_pylist()
    assert Counter((*_place(row), row["variant"], row["set"], row["l2"]) for row in rows) == {
        (*cell, "bits", which, l2): 1 for cell in CELLS for which in range(SETS) for l2 in ("cold", "hot")
    }
    assert {(row["again"], row["searched"], row["valid"], row["inputs"]) for row in rows} == {(-1, -1, True, "synthetic")}
    assert all(row["time_us"] > 0 for row in rows)
    assert run.meta["protocol"]["sets"] == {"1": SETS, "2": SETS}
    assert set(run.meta["resources"]) == {f"bits.{certified.Cell(*cell)}" for cell in CELLS}


def test_the_shares_are_of_one_request_and_the_longest_walk(asked: Plan) -> None:
    rows = record.load(execute(asked).folder).tables["certified_shares"].to_pylist()
    keys = ("steps", "temperature", "candidates", "listed", "set", "step")
    assert Counter(tuple(row[key] for key in keys) for row in rows) == {
        (3, t, m, j, which, step): 1 for t in (0.0, 1.0) for m in (4, 16) for j in (2, 8) for which in range(SETS) for step in range(3)
    }
    assert {(row["device"], row["head"], row["vocab"], row["rank"]) for row in rows} == {("cpu", "test", 64, 8)}
    assert {bool(row["survivors"]) for row in rows if not row["proved"]} == {True}
    assert {row["survivors"] for row in rows if row["proved"]} == {0}
    other = record.load(execute(_with(asked, batches=(2,))).folder)
    assert other.tables["certified_shares"].to_pylist() == [{**row, "run_id": other.meta["run_id"]} for row in rows]
    assert {row["batch"] for row in other.tables["certified_rounds"].to_pylist()} == {2}


@dataclass
class Planted:
    """The oracle, but for `spoil`, which is told the set, how often that set was walked before, and the draft."""

    workload: Workload
    inner: PreparedWalk
    spoil: Callable[[int, int, Draft], None]
    asked: Counter[int] = field(default_factory=Counter)
    resources: Resources = field(default_factory=Resources)

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        self.inner.launch(inputs, out)
        batch, steps = inputs.batch, inputs.steps
        which = next(n for n, one in enumerate(self.workload.sets) if torch.equal(one.base_logits[:batch, :steps], inputs.base_logits))
        self.spoil(which, self.asked[which], out)
        self.asked[which] += 1


class PlantedSampled(Planted):
    """The same of a walk whose draws can be repeated."""

    @property
    def noise(self) -> NoiseRule:
        assert isinstance(self.inner, SampledWalk)
        return self.inner.noise

    def round(self) -> int:
        assert isinstance(self.inner, SampledWalk)
        return self.inner.round()


def _plant(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[int, int, Draft], None], make: type[Planted] = Planted) -> None:
    """The arm `certified` is the oracle with `spoil`."""

    def prepare(self: Workload, label: str, backend: str, options: Mapping[str, Any], limits: Limits | None = None) -> Arm:
        made = create("reference", {})
        inner = made.prepare(self.head, limits or self.limits, self.config.device)
        kind = PlantedSampled if limits and limits.sampling else make
        return Arm(label, made, inner if label == "bits" else kind(self, inner, spoil))

    monkeypatch.setattr(Workload, "prepare", prepare)


def _wrong_on(*sets: int, after: int = 0) -> Callable[[int, int, Draft], None]:
    def spoil(which: int, before: int, draft: Draft) -> None:
        if which in sets and before >= after:
            draft.tokens[-1, -1] = (draft.tokens[-1, -1] + 1) % 64

    return spoil


def _stale() -> Callable[[int, int, Draft], None]:
    """Gives the answer to the set before."""
    answers: dict[int, torch.Tensor] = {}

    def spoil(which: int, before: int, draft: Draft) -> None:
        answers.setdefault(which, draft.tokens.clone())
        draft.tokens.copy_(answers.get(which - 1, draft.tokens))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda: _wrong_on(*range(SETS)), "input set 0: request 0 step 1"),
        (lambda: _wrong_on(3), "input set 3: request 0 step 1"),
        (lambda: _wrong_on(SETS - 1, after=1), f"under timing, input set {SETS - 1}, request 0 step 1"),
        (_stale, "input set 1: request 0 step"),
        (lambda: lambda which, before, draft: draft.tokens.fill_(-1), "input set 0: request 0 step 0: token -1"),
    ],
)
def test_an_arm_that_is_wrong_for_one_set_is_incorrect_and_has_no_samples(
    asked: Plan, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[], Any], reason: str
) -> None:
    _plant(monkeypatch, spoil())
    run = record.load(execute(_with(asked, steps=(2,), batches=(1,), temperatures=(0.0,))).folder)
    cells = {row["variant"]: row for row in run.tables["cells"].to_pylist()}
    assert (cells["bits"]["status"], cells["certified"]["status"]) == ("ok", "incorrect")
    assert cells["certified"]["reason"].startswith(reason)
    rows = run.tables["certified_rounds"].to_pylist()
    assert Counter((row["variant"], row["set"]) for row in rows) == {("bits", which): 2 for which in range(SETS)}


def test_a_wrong_draw_of_one_set_is_seen_too(asked: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, _wrong_on(3))
    run = record.load(execute(_with(asked, steps=(2,), batches=(2,), temperatures=(1.0,))).folder)
    cells = {row["variant"]: row for row in run.tables["cells"].to_pylist()}
    assert (cells["bits"]["status"], cells["certified"]["status"]) == ("ok", "incorrect")
    assert cells["certified"]["reason"].startswith("input set 3: request 1 step 1")
    assert {row["variant"] for row in run.tables["certified_rounds"].to_pylist()} == {"bits"}


@dataclass
class Tallying(Planted):
    """Two requests count, in every launch: one more than which set it was, and one search."""

    tally: torch.Tensor = field(default_factory=lambda: torch.zeros(2, 2, dtype=torch.int64))

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        super().launch(inputs, out)
        self.tally[0, 0] += 1 + next(
            n for n, one in enumerate(self.workload.sets) if torch.equal(one.base_logits[:, :2], inputs.base_logits)
        )
        self.tally[1, 1] += 1


def test_the_tally_of_a_set_is_what_one_launch_adds(asked: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, lambda *_: None, Tallying)
    found = certified.run(_with(asked, steps=(2,), batches=(2,), temperatures=(0.0,)))
    counted = {(row["variant"], row["set"], row["again"], row["searched"]) for row in found.tables["certified_rounds"]}
    assert counted == {("certified", which, which + 1, 1) for which in range(SETS)} | {("bits", which, -1, -1) for which in range(SETS)}


def test_the_arms_of_a_set_are_interleaved_in_an_order_of_the_seed(asked: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, lambda *_: None)

    def order(seed: int) -> list[tuple[int, int, str, str]]:
        plan = _with(asked, steps=(2,), batches=(1,), temperatures=(0.0,))
        rows = certified.run(replace(plan, config=replace(plan.config, seed=seed))).tables["certified_rounds"]
        for which in range(SETS):
            assert sorted(row["order"] for row in rows if row["set"] == which) == [0, 1, 2, 3]
        return sorted((row["set"], row["order"], row["variant"], row["l2"]) for row in rows)

    assert order(0) == order(0) != order(1)


def test_the_sets_are_the_rounds_of_a_file_as_far_as_they_go(plan: Plan, trained: Config) -> None:
    """Nine rounds are nine sets of one request, and seven of two, which share rounds."""
    config = replace(trained, experiment=replace(ASK, variants=(Variant("bits", "reference"),), sets=50))
    run = record.load(execute(replace(plan, config=config)).folder)
    assert run.meta["protocol"]["sets"] == {"1": COUNT, "2": COUNT - 2}
    assert run.meta["protocol"]["inputs"]["rounds"] == COUNT
    rows = run.tables["certified_rounds"].to_pylist()
    assert {(row["head"], row["inputs"]) for row in rows} == {("h", "trained")}
    assert Counter((row["batch"], row["set"]) for row in rows) == {
        (batch, which): 2 * 2 * 2 for batch, count in ((1, COUNT), (2, COUNT - 2)) for which in range(count)
    }
    assert {row["set"] for row in run.tables["certified_shares"].to_pylist()} == set(range(COUNT))


def test_lists_longer_than_the_vocabulary_are_refused_before_anything_is_timed(asked: Plan) -> None:
    with pytest.raises(ConfigError, match=r"^experiment\.listed: a list has at most the 64 rows .* got \[2, 65\], so list fewer"):
        certified.run(_with(asked, listed=(2, 65)))
    with pytest.raises(ConfigError, match=r"^experiment\.variants\[0\]\.options\.lister: unknown key"):
        certified.run(_with(asked, variants=(Variant("x", "certified_sm80", {"lister": 3}),)))


def test_a_sample_of_a_cell_that_is_not_ok_is_no_record(asked: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    found = certified.run(_with(asked, steps=(2,), batches=(1,), temperatures=(0.0,)))
    found.tables["certified_rounds"][0]["variant"] = "certified"
    monkeypatch.setattr(certified, "run", lambda plan: found)
    with pytest.raises(record.RecordError, match="a sample of certified at 2 steps, .* whose cell is not ok"):
        execute(asked)


def test_the_yaml_says_what_the_dataclass_says() -> None:
    made = compose(["experiment=certified", "device=h200"])
    ask = made.experiment
    assert isinstance(ask, Certified)
    assert ask == Certified(ask.variants)
    assert made.head.vocab == 151_936
    for variant in ask.variants:
        create(variant.backend, variant.options)
    assert [variant.label for variant in ask.variants][:3] == ["certified_sm80", "resident", "fixed_point_sm90"]
    trained = compose(["experiment=certified", "inputs=trained", "pair=qwen_vocab"])
    assert trained.inputs.family == "trained"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sets=1", r"experiment\.sets: a stale answer is seen by the next set, so there must be at least 2; got 1"),
        ("candidates=[]", r"experiment\.candidates: needs different ones of at least 1; got \[\]"),
        ("candidates=[64,64]", r"experiment\.candidates: needs different ones"),
        ("listed=[0]", r"experiment\.listed: needs different ones of at least 1; got \[0\]"),
        ("batches=[1,1]", r"experiment\.batches: needs different ones"),
        ("temperatures=[-1]", r"experiment\.temperatures: needs different finite ones"),
        ("steps=[]", r"experiment\.steps: needs different lengths"),
        ("warmup=0", r"experiment\.warmup: must be at least 1"),
        ("setz=3", r"experiment\.setz: .*did you mean 'sets'"),
    ],
)
def test_a_question_that_makes_no_sense_is_one_sentence(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        compose(["experiment=certified", f"experiment.{override}"])


@pytest.mark.gpu
def test_on_a_gpu_all_arms_are_checked_and_timed_on_every_set(asked: Plan) -> None:
    """A small vocabulary at the rank that the kernels have."""
    live = torch.cuda.get_device_name(0)
    device = next((spec for spec in map(load, ("h100", "h200")) if spec.product in live), None)
    if device is None:
        pytest.skip(f"the resident walk needs an H100 or H200; this is {live}")
    made = compose(["experiment=certified"]).experiment
    assert isinstance(made, Certified)
    ask = replace(made, steps=(4,), batches=(1, 4), temperatures=(0.0, 1.0), sets=6)
    config = replace(asked.config, device=device, head=HeadConfig("small", 4096, 256), experiment=ask)
    found = certified.run(replace(asked, config=config))
    failed = [row for row in found.tables["cells"] if row["status"] != "ok"]
    assert {(row["variant"], row["temperature"], row["status"]) for row in failed} == {
        (arm, 1.0, "unsupported") for arm in ("sglang_greedy", "vllm_addmm")
    }, failed
    rows = found.tables["certified_rounds"]
    assert all((row["again"] >= row["searched"] >= 0) == (row["variant"] == "certified") for row in rows)
    assert Counter(row["variant"] for row in rows)["certified"] == 2 * 2 * 6 * 2
