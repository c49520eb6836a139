"""Prefill and decode apart, carried out: one engine computes a request's prompt, another one its answer.

    kv_transfer_params.py  vLLM's request forms
    bootstrap.py           SGLang's request forms
    pair_sender.py         sends a request to both engines of a pair
    kv_sources.py          what requests say of a worker to fetch KV from
    pair_booker.py         which requests go apart, and where they go when that failed

`router_client.pricing.prefill_decode` chooses the pair. The KV goes from engine to engine; nothing of it comes here.
"""
