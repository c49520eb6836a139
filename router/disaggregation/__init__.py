"""Disaggregated serving: one engine computes a request's prompt, and another one its answer.

    kv_transfer_params.py  vLLM's request forms
    bootstrap.py           SGLang's request forms
    pair_sender.py         sends a request to both engines of a pair
    kv_sources.py          names, in requests to engines, the worker to fetch KV from
    pair_booker.py         decides which requests get a pair, and where they go if that fails

`router_client.pricing.prefill_decode` chooses the pair. The KV goes from engine to engine and never passes through the router.
"""
