"""Scopes, workers, pools, partitions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.bus.subjects import partition_of
from kvatlas.errors import InvalidValue
from kvatlas.identity import (
    DEFAULT_TENANT,
    MAX_NAME_BYTES,
    Scope,
    check_worker_id,
    pool_id,
    rank_worker_id,
    scope_from_canonical,
    shard_of,
)
from tests.kvatlas.strategies import scopes, worker_ids


@given(scopes)
def test_a_scope_round_trips_through_its_canonical_form(scope: Scope) -> None:
    assert scope_from_canonical(scope.canonical) == scope


@given(scopes, scopes)
def test_scopes_match_exactly_in_all_four_fields(one: Scope, other: Scope) -> None:
    assert (one == other) == (one.canonical == other.canonical) == (one.scope_id == other.scope_id)


@pytest.mark.parametrize(
    "other",
    [
        Scope("m2", "t", "a", "x"),
        Scope("m", "t2", "a", "x"),
        Scope("m", "t", "a2", "x"),
        Scope("m", "t", None, "x"),
        Scope("m", "t", "a", "x2"),
        Scope("t", "m", "a", "x"),
    ],
)
def test_a_scope_with_one_different_field_is_another_scope(other: Scope) -> None:
    assert Scope("m", "t", "a", "x").scope_id != other.scope_id


def test_the_text_none_is_not_an_absent_adapter() -> None:
    ids = {Scope("m", "t", adapter).scope_id for adapter in (None, "None", "none", "nil", "-")}
    assert len(ids) == 5


def test_the_tenant_defaults_to_one_constant() -> None:
    assert Scope("m", "t") == Scope("m", "t", None, DEFAULT_TENANT)


@pytest.mark.parametrize("field", ["model_id", "tokenizer_id", "adapter_id", "tenant_id"])
@pytest.mark.parametrize("value", ["", "x" * (MAX_NAME_BYTES + 1), "é" * MAX_NAME_BYTES, 7])
def test_the_error_names_the_wrong_scope_field(field: str, value: object) -> None:
    fields: dict[str, object] = {
        "model_id": "m",
        "tokenizer_id": "t",
        "adapter_id": "a",
        "tenant_id": "x",
        field: value,
    }
    with pytest.raises(InvalidValue, match=f"scope field {field}"):
        Scope(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["model_id", "tokenizer_id", "tenant_id"])
def test_only_the_adapter_may_be_absent(field: str) -> None:
    fields: dict[str, object] = {"model_id": "m", "tokenizer_id": "t", field: None}
    with pytest.raises(InvalidValue, match=field):
        Scope(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("canonical", [b"", b"\xc1", b"\x94\xa1m\xa1t\xc0", b"\x93\xa1m\xa1t\xc0", b"\x01"])
def test_malformed_canonical_scopes_are_refused(canonical: bytes) -> None:
    with pytest.raises(InvalidValue):
        scope_from_canonical(canonical)


def test_the_pool_depends_on_model_and_tokenizer_only() -> None:
    assert Scope("m", "t", "a", "x").pool_id == Scope("m", "t").pool_id == pool_id("m", "t")
    assert pool_id("m", "t") != pool_id("t", "m")
    assert len(pool_id("m", "t")) == 16


@given(worker_ids)
def test_worker_ids_are_subject_tokens(worker_id: str) -> None:
    assert check_worker_id(worker_id) == worker_id


@pytest.mark.parametrize("worker_id", ["", "x" * 65, "a.b", "a b", "*", ">", "wörker", "a\n", None, 3])
def test_malformed_worker_ids_are_refused(worker_id: str) -> None:
    with pytest.raises(InvalidValue, match="worker id"):
        check_worker_id(worker_id)


def test_each_rank_is_a_worker() -> None:
    assert rank_worker_id("pod-3", 2) == "pod-3-dp2"
    with pytest.raises(InvalidValue):
        rank_worker_id("x" * 62, 1)


@given(worker_ids, st.sampled_from([1, 4, 64]))
def test_a_worker_belongs_to_one_partition_and_one_shard(worker_id: str, partitions: int) -> None:
    partition = partition_of(worker_id, partitions)
    assert 0 <= partition < partitions
    assert shard_of(partition, partitions) == partition
    assert shard_of(partition, 1) == 0


def test_workers_spread_over_partitions() -> None:
    assert len({partition_of(f"w{i}", 64) for i in range(1_000)}) == 64
