"""`kvatlas route` against a real store."""

import json

from tests.kvatlas_cli.conftest import TOKENS, Cli


def test_the_worker_that_holds_the_prefix_is_picked(cli: Cli, fleet_store_url: str) -> None:
    words = ["route", "--tokens", "-", "--model-id", "m", "--redis-url", fleet_store_url]
    done = cli(*words, "--json", stdin=json.dumps(TOKENS * 2))
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    assert (answer["worker"], answer["url"]) == ("w1", "http://w1:8000")
    assert [candidate["worker"] for candidate in answer["candidates"]] == ["w1", "w2"]
    for candidate in answer["candidates"]:
        assert sum(term["us"] for term in candidate["terms"]) == candidate["score_us"]
    table = cli(*words, "--cost-profile", "quillcache", stdin=json.dumps(TOKENS * 2))
    assert table.code == 0 and table.out.startswith("w1 at http://w1:8000")


def test_without_prefill_workers_a_pair_is_one_worker(cli: Cli, fleet_store_url: str) -> None:
    words = ["route", "--pd", "--tokens", "-", "--model-id", "m", "--redis-url", fleet_store_url]
    done = cli(*words, "--json", stdin=json.dumps(TOKENS * 2))
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    assert (answer["prefill"], answer["decode"]["worker"], answer["otherwise"]) == (None, "w1", None)
    assert cli(*words, stdin=json.dumps(TOKENS)).out.startswith("no separate prefill: w1 at http://w1:8000")
