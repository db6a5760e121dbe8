"""Attention over 2 and 4 context ranks, each kind, against one rank's attention in float64."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from megatron_rl.models.layers.context_parallel import zigzag_indices
from megatron_rl.models.layers.head_exchange import head_problem

KINDS = ("all_gather", "p2p", "a2a")
RAGGED = [8, 8, 24, 16, 8]
CASES = {
    "ragged": {"heads": 8, "groups": 4},
    "fewer-groups-than-ranks": {"heads": 8, "groups": 2},
    "one-group": {"heads": 4, "groups": 1},
    "narrow-values": {"heads": 4, "groups": 4, "key_width": 12, "value_width": 8},
    "wide-values": {"heads": 4, "groups": 4, "key_width": 4, "value_width": 64},
    "unpacked": {"heads": 4, "groups": 4, "lengths": [32], "batch": 2},
    "float32": {"heads": 8, "groups": 4, "dtype": torch.float32},
    "bfloat16": {"heads": 8, "groups": 4, "dtype": torch.bfloat16},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}


def _inputs(
    heads: int,
    groups: int,
    lengths: list[int] = RAGGED,
    key_width: int = 8,
    value_width: int = 8,
    batch: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * groups + key_width)
    lead = (sum(lengths),) if batch is None else (sum(lengths), batch)
    shapes = {"query": (heads, key_width), "key": (groups, key_width), "value": (groups, value_width), "grad": (heads, value_width)}
    data = {name: torch.randn(*lead, *shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    return data | {"offsets": torch.tensor([0, *lengths]).cumsum(0).int()}


def _reference(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The formula in float64, document by document: softmax(q k^T / sqrt(d) over positions up to the query's own) v."""
    query, key, value = leaves = [data[name].double().requires_grad_() for name in ("query", "key", "value")]
    copies = query.shape[-2] // key.shape[-2]
    outputs = []
    for start, end in zip(data["offsets"][:-1].tolist(), data["offsets"][1:].tolist(), strict=True):
        q, k, v = query[start:end], key[start:end].repeat_interleave(copies, -2), value[start:end].repeat_interleave(copies, -2)
        scores = torch.einsum("q...d,k...d->...qk", q, k) / q.shape[-1] ** 0.5
        future = torch.arange(end - start) > torch.arange(end - start)[:, None]
        outputs.append(torch.einsum("...qk,k...d->q...d", scores.masked_fill(future, -torch.inf).softmax(-1), v))
    output = torch.cat(outputs)
    output.backward(data["grad"].double())
    return {"output": output.detach(), **{name: leaf.grad for name, leaf in zip(("query", "key", "value"), leaves, strict=True)}}


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """(output folder, each rank's answer) by number of ranks; one launch each, when first asked for (a failed one is not tried again)."""
    cases = tmp_path_factory.mktemp("cases")
    for name, sizes in CASES.items():
        save_file(_inputs(**sizes), cases / f"{name}.safetensors")
    made = {}

    def launch(ranks: int) -> tuple[Path, list[dict[str, int]]]:
        if ranks not in made:
            out = tmp_path_factory.mktemp(f"ranks{ranks}")
            target = f"{Path(__file__).parent}/context_parallel_cases.py:main"
            made[ranks] = None
            made[ranks] = out, run_ranks(target, ranks, [str(ranks), str(cases), str(out)])
        assert made[ranks] is not None, f"the launch of {ranks} ranks failed before"
        return made[ranks]

    return launch


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_one_rank_in_float64(launches, ranks, kind, case):
    folder, _ = launches(ranks)
    data = _inputs(**CASES[case])
    tolerance = TOLERANCE[data["query"].dtype]
    for name, expected in _reference(data).items():
        ours = torch.full_like(expected, torch.nan)
        for rank in range(ranks):
            part = load_file(folder / f"{case}.{kind}.{rank}.safetensors")[name]
            share = zigzag_indices(data["offsets"], rank, ranks)
            ours[share] = part.double().view(ours[share].shape)
            assert part.dtype == data["query"].dtype
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ring_never_holds_all_keys_and_values(launches, ranks):
    # Keys and values are 17 times as wide as the queries here, so that the largest tensor of all holds them.
    _, largest = launches(ranks)
    data = _inputs(**CASES["wide-values"])
    whole = sum(data[name].nbytes for name in ("key", "value"))
    assert [rank["wide-values.p2p"] for rank in largest] == [whole // ranks] * ranks
    assert all(rank["wide-values.all_gather"] >= whole for rank in largest)


def test_heads_that_cannot_be_exchanged_are_named():
    assert [head_problem(8, groups, 4) for groups in (8, 4, 2, 1)] == [None] * 4
    for heads, groups in ((6, 6), (12, 3), (24, 6)):
        problem = head_problem(heads, groups, 4)
        assert f"{heads} attention heads" in problem and f"{groups} key-value heads" in problem and "'ring'" in problem
