"""The numbers of every id's forward pass are those that were stored."""

import json

import numpy as np
import pytest

from tests.configs.digests import FILE, digest
from tests.model.tiny import DISTINCT, IDS

STORED = json.loads(FILE.read_text(encoding="utf-8"))
# Replicas of the reference model differ in their seed alone.
SAME = {f"kvc_w8s8_1kv_baseline{seed}" for seed in ("", "_seed43", "_seed44", "_seed45")}


def test_every_id_has_a_digest_of_its_own():
    assert list(STORED) == IDS
    distinct = {tuple(values) for variant, values in STORED.items() if variant not in SAME}
    assert len(distinct) == 27 - 4 and len({tuple(STORED[variant]) for variant in SAME}) == 1
    assert not distinct & {tuple(STORED[variant]) for variant in SAME}


@pytest.mark.parametrize("variant", DISTINCT)
def test_the_forward_pass_gives_the_stored_numbers(variant):
    np.testing.assert_allclose(digest(variant), STORED[variant], atol=1e-4)
