"""TransformerEngine's layers compute what the torch layers compute: TE's own forward and backward code, with torch for its kernels."""

import pytest
from te_models import WRITERS

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def apart(in_te, tmp_path_factory):
    return in_te("te_parity_cases.py:main", [str(tmp_path_factory.mktemp("parity"))])


@pytest.mark.parametrize("documents", ["whole", "packed"])
@pytest.mark.parametrize("model", WRITERS)
def test_loss_and_gradients_are_those_of_the_torch_layers(apart, model, documents):
    found = apart[model][documents]
    assert found["loss"] < 1e-6
    assert found["gradient"] < 1e-6
    # Gradients of the norms of queries and keys are small differences of large terms.
    assert max(found["tensors"].values()) < 4e-6, found["tensors"]


@pytest.mark.parametrize("model", WRITERS)
def test_recomputed_gradients_are_bit_identical(apart, model):
    found = apart[model]["recomputed"]
    assert (found["loss"], found["gradient"]) == (0.0, 0.0)
