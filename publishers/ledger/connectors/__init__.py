"""Maps blocks of KV connectors and shared stores to the ledger's blocks."""
