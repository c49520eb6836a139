"""Rooms of SGLang's bootstrap server."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas_router.disaggregation.bootstrap import bootstrap_fields
from router_client.pricing.transfer_protocol import replace_fields


@given(st.sampled_from([*range(1, 17), 32, 64, 128, 1_024]), st.data())
def test_a_room_leads_to_the_rank_that_was_chosen_however_many_there_are(ranks: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    fields = bootstrap_fields("http://10.0.0.1:30000", None, rank)
    assert fields["bootstrap_room"] % ranks == rank == fields["disagg_prefill_dp_rank"]
    assert 0 <= fields["bootstrap_room"] < 2**63 - 1_000  # the rooms of further prompts come after it


@pytest.mark.parametrize(("url", "host"), [("http://10.0.0.1:30000", "10.0.0.1"), ("https://[fd00::1]:1", "[fd00::1]")])
def test_the_bootstrap_server_is_where_the_prefill_server_is(url: str, host: str) -> None:
    fields = bootstrap_fields(url, None, None)
    assert (fields["bootstrap_host"], fields["bootstrap_port"]) == (host, 8998)
    assert "disagg_prefill_dp_rank" not in fields


def test_a_body_is_only_serialized_again_if_a_field_is_replaced() -> None:
    assert replace_fields({"a": 1}, b'  {"a":  1}', {"b": [2]}) == b'{"b": [2],"a":  1}'
    assert replace_fields({"a": 1}, b'{"a":  1}', {"a": None, "b": 2}) == b'{"a": null, "b": 2}'
    assert replace_fields({"a": 1}, b'{"a":  1}', {}) == b'{"a":  1}'
