"""Whose request it is, and how much it may use: proven by what the client shows, never by what a body says.

    caller.py           who sends a request: tenant, models, priority, limits
    clients_file.py     the file of clients: keys, certificates, trusted fronts, issuers of tokens
    issuer.py           a JWT's proof, remembered until it expires
    issuer_keys.py      an issuer's public keys, from a file or an address
    proof.py            from a request's headers, certificate and address to its caller
    refusals.py         why a request is refused
    limits.py           requests and tokens of each client: in flight in this process, and a minute in the fleet
    allowance.py        a client's requests or tokens of a minute, as this process has them
    allowance_exchange.py   what is used here, against the fleet's allowances in the store
    counters.py         counters

`../tenant_gate.py` is the ASGI application in front of the proxy that asks for all of it.
"""
