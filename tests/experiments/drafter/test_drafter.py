"""What a block may see, the serial heads step by step, and the loss by its formula."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from experiments.drafter.checkpoint import Pair
from experiments.drafter.drafter import Drafter, drafter_loss
from experiments.drafter.pair import HEADS
from experiments.drafter.serial_heads import DominoHead, GatedHead, RnnHead, serial_head
from experiments.drafter.target import Read
from kernels.heads.markov import MarkovHead as KernelHead
from kernels.walk import Rounding
from tests.experiments.drafter.conftest import config
from tests.experiments.drafter.test_target import tokens


def base(pair: Pair, text: torch.Tensor, at: list[int], taps: torch.Tensor | None = None) -> torch.Tensor:
    """[1, anchors, block, vocab]."""
    places = torch.tensor([at])
    return pair.drafter.base_logits(pair.target, pair.target(text).taps if taps is None else taps, text.gather(1, places), places)


def test_a_block_sees_the_context_before_its_anchor_and_no_other_block(pair: Pair) -> None:
    text = tokens(1, 16)
    alone, together = base(pair, text, [6]), base(pair, text, [6, 9])
    assert_close(alone[:, 0], together[:, 0])
    taps = pair.target(text).taps
    later, earlier = taps.clone(), taps.clone()
    later[:, 6:] += 1
    earlier[:, 5] += 1
    assert_close(base(pair, text, [6], later), alone)
    assert not torch.allclose(base(pair, text, [6], earlier), alone)


def test_a_block_sees_its_anchor_and_all_of_itself(pair: Pair) -> None:
    text, other = tokens(1, 16), tokens(1, 16)
    other[0, 6] = (other[0, 6] + 1) % 300
    taps = pair.target(text).taps
    differs = (base(pair, text, [6], taps) - base(pair, other, [6], taps)).abs().amax(dim=(0, 1, 3))
    assert (differs > 1e-4).all(), "every slot depends on the anchor"
    shorter = base(pair, text[:, :7], [6], taps[:, :7])
    assert_close(shorter, base(pair, text, [6], taps))


def test_the_markov_head_is_the_one_that_kernels_know(pair: Pair) -> None:
    state = {name: weight.bfloat16() for name, weight in pair.drafter.state_dict().items()}
    head = KernelHead.from_tensors(state)
    previous, hidden = torch.tensor([3, 299]), torch.zeros(2, 16)
    own = deepcopy(pair.drafter.markov_head).bfloat16()
    bias = own.markov_w2(own(previous[:, None], hidden[:, None]))[:, 0]
    assert_close(head.step_logits(previous, torch.zeros(2, 300), Rounding.NEVER), bias.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["gated", "rnn", "domino"])
def test_a_recurrent_head_follows_its_formula(kind: str) -> None:
    torch.manual_seed(1)
    head = serial_head(config(head=kind))
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    previous, hidden = tokens(2, 4), torch.randn(2, 4, 16)
    found, state, wide = head(previous, hidden), torch.zeros(2, 8), torch.zeros(2, 16)
    for step in range(4):
        e, h = head.markov_w1.weight[previous[:, step]], hidden[:, step]
        if isinstance(head, GatedHead):
            gate = torch.sigmoid(torch.cat([h, e], 1) @ head.gate_proj.weight.T + head.gate_proj.bias)
            assert_close(found[:, step], gate * e)
        elif isinstance(head, RnnHead):
            a, c, o = (torch.cat([state, e, h], 1) @ head.joint_proj.weight.T + head.joint_proj.bias).chunk(3, 1)
            assert_close(found[:, step], torch.tanh(o))
            state = torch.sigmoid(a) * state + (1 - torch.sigmoid(a)) * torch.tanh(c)
        elif isinstance(head, DominoHead):
            gru = dict(head.prefix_gru.named_parameters())
            ir, iz, inew = (e @ gru["weight_ih_l0"].T).chunk(3, 1)
            sr, sz, snew = (wide @ gru["weight_hh_l0"].T).chunk(3, 1)
            reset, update = torch.sigmoid(ir + sr), torch.sigmoid(iz + sz)
            wide = (1 - update) * torch.tanh(inew + reset * snew) + update * wide
            projected = torch.cat([h, wide], 1) @ head.embed_proj.weight.T
            assert_close(found[:, step], projected * torch.sigmoid(projected) if step else torch.zeros(2, 8))


def test_the_loss_follows_its_formula_whatever_the_chunks(pair: Pair) -> None:
    text, anchors = tokens(2, 24), torch.tensor([[3, 9, 15], [1, 8, 19]])
    read = pair.target(text)
    found = drafter_loss(pair.drafter, pair.target, text, anchors, read, cross_entropy=0.5)
    totals, norm = torch.zeros(3), 0.0
    distances = torch.zeros(4)
    for row in range(2):
        for anchor in anchors[row].tolist():
            own = Read(read.hidden[row : row + 1], read.taps[row : row + 1])
            hidden = pair.drafter.backbone(
                own.taps, text[row : row + 1, anchor : anchor + 1], torch.tensor([[anchor]]), pair.target.embedding.weight
            )
            for step in range(4):
                before = text[row, anchor + step]
                e = pair.drafter.markov_head.markov_w1.weight[before]
                logits = pair.target.lm_head.weight @ hidden[0, 0, step] + pair.drafter.markov_head.markov_w2.weight @ e
                p, t = logits.softmax(0), pair.target.logits(read.hidden[row, anchor + step]).softmax(0)
                distance = (p - t).abs().sum()
                sure = pair.drafter.confidence(torch.cat([hidden[0, 0, step], e]))
                parts = torch.stack(
                    [
                        -p[text[row, anchor + step + 1]].log(),
                        distance,
                        functional.binary_cross_entropy_with_logits(sure[0], 1 - distance / 2),
                    ]
                )
                totals += math.exp(-step / 4) * parts
                norm += math.exp(-step / 4)
                distances[step] += distance / 6
    assert_close(torch.stack([found.cross_entropy, found.distance, found.confidence]), totals / norm)
    assert_close(found.total, 0.5 * totals[0] / norm + 0.9 * totals[1] / norm + totals[2] / norm)
    assert_close(found.accepted, 1 - distances / 2)


@pytest.mark.parametrize("kind", HEADS)
def test_the_gradient_goes_through_the_chunks(pair: Pair, kind: str) -> None:
    torch.manual_seed(0)
    drafter = Drafter(config(head=kind), 1)
    text = tokens(2, 24)
    loss = drafter_loss(drafter, pair.target, text, torch.tensor([[3, 9, 15], [1, 8, 19]]), pair.target(text))
    loss.total.backward()
    grads = {name: weight.grad for name, weight in drafter.named_parameters()}
    assert all(grad is not None and bool(grad.abs().sum() > 0) for name, grad in grads.items() if "markov" in name or "confidence" in name)
    assert all(weight.grad is None for weight in pair.target.parameters())
