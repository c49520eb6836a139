"""Identifies a request's sender, and limits what it may use. Clients prove their tenant with credentials; a body proves
nothing.

    caller.py           a request's sender: tenant, models, priority, limits
    clients_file.py     the clients file: keys, certificates, trusted fronts, issuers of tokens
    issuer.py           checks JWTs, and remembers valid ones until they expire
    issuer_keys.py      an issuer's public keys, from a file or an address
    proof.py            finds the caller by a request's headers, certificate and address
    entrance.py         admits a request that proves its caller and is within that client's limits
    refusals.py         why a request is refused
    withheld_fields.py  what a client among several tenants may not tell an engine
    limits.py           each client's requests and tokens, in flight in this process and per minute in the fleet
    allowance.py        this process's part of a client's requests or tokens per minute
    allowance_exchange.py   draws from the fleet's allowances in the store, and returns what is not used
    counters.py         counters

`../tenant_gate.py` is the ASGI application in front of the proxy that applies all of this.
"""
