"""What model.py, objectives.py and lib/baselines.py promise beyond the equations of test_all.py:
costs, precision, compiling, and what a student's component may do."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import model as model_module
from lib import baselines
from model import SCHEMES, Component, Positions, Relative, offset_scores
from objectives import OBJECTIVES, PPLM, ObjectiveConfig
from test_all import SEP, VOCAB, close, corrupted, pretraining, sequences, slow, tiny
from tests.conftest import refuses


def test_baselines_of_a_sum():
    """A sum has the baselines of each part; a printed loss is compared with those on both sides."""
    corpus = SimpleNamespace(train=np.repeat([3, 7, SEP], [10, 30, 5]), vocab_size=VOCAB)
    model = pretraining("mlm+pplm+tc", mlm_on="all", tc_negatives=3)
    expected = {"mlm.uniform": 2 * math.log(64), "pplm.uniform": math.log(23)}
    expected["mlm.unigram"] = 2 * -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    expected["tc.constant"] = math.log(4)
    of_positions = baselines.position_baselines(12, 0.6)
    expected |= {f"pplm.{x}": of_positions[x] for x in ("prior", "copy")}
    found = baselines.compute_baselines(model, corpus)
    assert found == pytest.approx(expected)
    own = {name[5:]: x for name, x in found.items() if name.startswith("pplm.")}
    ordered = sorted(own, key=own.get)
    for name, lower, higher in zip(ordered, ["", *ordered], [*ordered[1:], ""]):
        for loss, above, below in (
            (own[name] - 1e-4, name, lower),
            (own[name] + 1e-4, higher, name),
        ):
            sides = [f"below {above} {own[above]:.3f}"] if above else []
            sides += [f"above {below} {own[below]:.3f}"] if below else []
            assert baselines.compare("pplm", loss, found) == ", ".join(sides)
    assert baselines.compare("my_objective", 1.0, found) == ""


def test_time_and_memory(monkeypatch):
    """All layers share TUPE's positional term (TUPE sec 3.3); the pair head computes it once more.
    rel needs memory for (L, L) logits and (L, R) sums, but not for a vector per pair."""
    calls, sizes, bias = [], [], model_module.Tupe.bias
    monkeypatch.setattr(model_module.Tupe, "bias", lambda *args: calls.append(1) or bias(*args))
    model, _, batch = corrupted("pplm", "tupe_r", n_layer=3)
    model(batch)
    assert len(calls) == 2
    encoder = tiny("rel", d_model=64)  # D = 32
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, id):
        encoder(sequences(1, 40))
    assert 2 * 40 * 130 <= max(sizes) < 40 * 40 * 32


@pytest.mark.parametrize("pe", "sin rsin rope alibi t5".split())
def test_positions_are_exact_in_16_bits(pe):
    """A model cast to 16 bits keeps its frequencies, slopes and buckets: up to position 512 every
    positional term is right to 16 bits."""
    shape, pos, results = dict(n_layer=1, d_model=96, n_head=6, max_len=512), torch.arange(512), []
    exact, rounded = tiny(pe, **shape).float(), tiny(pe, **shape).float().bfloat16()
    q, k = torch.randn(2, 1, 6, 512, 16, dtype=torch.bfloat16)
    for encoder, x in ((exact, (q.float(), k.float())), (rounded, (q, k))):
        scheme, at = encoder.scheme, Positions(pos)
        terms = [scheme.embed(at), scheme.bias(at), *scheme.terms(*x, at, 0, 0)]
        results.append([torch.as_tensor(term).float() for term in terms])
    for a, b in zip(*results):
        assert ((a - b).abs() <= 0.03 * (1 + a.abs())).all()
    assert rounded(sequences()).dtype == torch.bfloat16


COMPILED = [("tupe_r", "mlm+pplm"), ("rel", "taco"), ("alibi", "pmlm")]
COMPILED += [slow(pe, "mlm+pplm") for pe in ("deberta", "lsin+rlsin", "rope", "tupe_a_free")]


@pytest.mark.parametrize("pe, objective", COMPILED)
def test_one_graph(pe, objective):
    """torch.compile makes one graph of encoder and objectives, without breaks."""
    model, _, batch = corrupted(objective, pe)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(batch)[0], model(batch)[0], 1e-6)


def test_what_follows_from_positions_is_computed_once(monkeypatch):
    """All layers and the pair head share the angles of rope and the rows of offsets."""
    calls, (net, _, batch) = Counter(), corrupted("pplm", "rope+rel+t5", n_layer=3)
    for owner, name in ((torch, "eye"), (model_module, "frequencies")):  # eye: masked_pairs
        function = getattr(owner, name)
        counted = lambda *a, f=function, n=name, **k: calls.update([n]) or f(*a, **k)  # noqa: E731
        monkeypatch.setattr(owner, name, counted)
    net(batch)
    assert calls == {"eye": 1, "frequencies": 1}


class Stacked(Component):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.slopes = torch.nn.Parameter(torch.ones(cfg.n_layer, cfg.n_head))


class PerLayer(Relative):  # rel_k with a tensor per layer; numbers do not matter
    def __init__(self, cfg):
        super().__init__(cfg)
        self.layers = torch.nn.ParameterList(self.table.weight * n for n in range(cfg.n_layer))
        del self.table

    def scores(self, q, k, pos, layer):
        return offset_scores(q, self.layers[layer], pos)

    def values(self, A, pos, layer):
        return 0

    def bias(self, pos):
        return 3


def test_hooks_may_return_numbers_and_layers_may_be_tensors(monkeypatch):
    """A hook may return a number. Weights of each layer may be a ParameterList, which gets one more
    entry for the pair head; an error says so of weights that cannot."""
    monkeypatch.setitem(SCHEMES, "mine", [PerLayer])
    mine, rel_k, tokens = tiny("mine"), tiny("rel_k"), sequences()
    rel_k.load_state_dict(mine.state_dict(), strict=False)
    for table, own in zip(
        rel_k.scheme.parts["RelativeKeys"].layers, mine.scheme.parts["PerLayer"].layers
    ):
        table.weight.data = own.data
    pad = torch.arange(12).expand(6, 12) > 8
    close(mine(tokens, pad=pad), rel_k(tokens, pad=pad))
    close(mine(tokens), rel_k(tokens))
    q, pos = torch.randn(1, 2, 12, 8, dtype=torch.double), torch.arange(12)
    close(mine.logits(q, q, pos, 0), rel_k.logits(q, q, pos, 0) + 3)
    net, _, batch = corrupted("pplm", "mine", n_layer=2)
    net(batch)
    assert len(net.encoder.scheme.parts["PerLayer"].layers) == 3
    monkeypatch.setitem(SCHEMES, "mine", [Stacked])
    with pytest.raises(TypeError, match="Stacked.__init__ .* belong in self.layers"):
        pretraining("pplm", "mine")


def test_attention_restores_modes():
    """Encoder.attention leaves every submodule in its mode, also if it raises."""
    encoder = tiny()
    encoder.blocks[0].eval()
    encoder.attention(sequences())
    refuses("longer than", encoder.attention, sequences(2, 13))
    assert encoder.training and encoder.blocks[1].training and not encoder.blocks[0].training


def test_names_of_objectives_are_expanded(monkeypatch):
    """A name may stand for a sum, which may have such a name in it, and be part of another one."""
    monkeypatch.setitem(OBJECTIVES, "rpp", "mlm+pplm")
    monkeypatch.setitem(OBJECTIVES, "all", "rpp+tc")
    monkeypatch.setitem(OBJECTIVES, "taco_x", type("X", (PPLM,), {}))
    assert ObjectiveConfig("rpp").objective == "mlm+pplm"
    assert ObjectiveConfig("nsp+all").objective == "nsp+mlm+pplm+tc"
    assert ObjectiveConfig("taco_x+taco").objective == "mlm+taco_x+tc"
